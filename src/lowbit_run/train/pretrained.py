"""Check and load folders with a pretrained model or a tokenizer, which may be foreign or incomplete.

The checks come before any communication: the configuration, and names, shapes and types of all weights, read from the
headers of their files. Code in a folder is never run, whatever its files ask for, and nothing is downloaded.
"""

import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lowbit import escape
from lowbit.files import MOST_BYTES, parse_json, read_bounded
from lowbit_run.config import ConfigError
from lowbit_run.train.cut import CUT, NOT_CUT, check_decoder, layer_count

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


log = escape.logger(__name__)

SIZES = {
    "num_hidden_layers": 4096, "n_layer": 4096, "num_layers": 4096, "hidden_size": 1 << 20, "n_embd": 1 << 20,
    "vocab_size": 1 << 26, "num_attention_heads": 1 << 14, "n_head": 1 << 14, "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 16, "intermediate_size": 1 << 22, "max_position_embeddings": 1 << 30,
    "n_positions": 1 << 30,
}  # fmt: skip
"""Largest allowed sizes by their names in `config.json`: a larger one is a mistake or an attack."""

_LONGEST = 400  # characters of an error's reason
_INDEX = ".index.json"
_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which Transformers looks for them
_FLOATS = {"F64", "F32", "F16", "BF16"} | {str(dtype) for dtype in (torch.float64, torch.float32)}
_FLOATS |= {str(torch.float16), str(torch.bfloat16)}
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$")  # older versions saved these too
_LAYER = re.compile(r"\b(?:layers|h)\.\d+\.")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_LFS = b"version https://git-lfs"

GENERATION = "generation_config.json"
MODEL_FILES = re.compile(
    r"generation_config\.json|(LICEN[CS]E|[Ll]icen[cs]e|NOTICE|[Nn]otice|COPYING|USE_POLICY)(\.txt|\.md|\.rst)?"
)
"""Files of a pretrained model that belong to every model trained from it; its README describes another model."""
TOKENIZER_FILES = re.compile(
    r"(vocab|added_tokens|special_tokens_map)\.json|vocab\.txt|merges\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
)
"""Files of a tokenizer that other programs read, and that Transformers need not write again."""

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tekken.json")  # the same, which Transformers writes

_Shapes = dict[str, tuple[tuple[int, ...], str]]  # shape and type of a weight, by name


def read_config(folder: str, key: str = "model.pretrained") -> dict[str, Any]:
    """Read the `config.json` of a model that `lowbit train` supports; `key`: the setting, for errors."""
    setting, path = f"{key} is {folder!r}", Path(folder) / "config.json"
    if (path.parent / "adapter_config.json").is_file() and not path.is_file():
        raise ConfigError(f"{setting}, which holds adapters, not a model; allowed: the folder of their model")
    try:
        values = _read_object(setting, path)
    except OSError as error:
        why = f"{path}: {error.strerror}; allowed: a folder with a saved model{hint(folder)}"
        raise ConfigError(f"{setting}; {why}") from error
    kind, quantized = values.get("model_type"), values.get("quantization_config")
    if "text_config" in values:
        raise ConfigError(
            f"{setting}, a model of type {kind!r} for more than text; allowed: a folder with its text model"
        )
    if not isinstance(kind, str) or kind not in CUT:
        why = f": {NOT_CUT[kind]}" if isinstance(kind, str) and kind in NOT_CUT else ""
        raise ConfigError(
            f"{setting}, a model of type {kind!r}, which cannot be cut into stages{why}; allowed: llama, qwen3, "
            f"gemma3_text and {len(CUT) - 3} others (docs/how-to/train.md)"
        )
    if quantized is not None:
        _check_quantized(setting, quantized)
    for name, most in SIZES.items():
        value = values.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise ConfigError(f"{setting}; {path} has {name} {value!r}; allowed: an integer from 1 to {most}")
    return values


def _check_quantized(setting: str, about: Any) -> None:
    how = about.get("quant_method") if isinstance(about, dict) else about
    if how != "bitsandbytes":
        raise ConfigError(f"{setting}, which is quantized ({how}); allowed: bitsandbytes, or weights in floating point")
    bits = [about.get(f"load_in_{bits}bit", about.get(f"_load_in_{bits}bit", False)) for bits in (4, 8)]
    if bits not in ([True, False], [False, True]):
        raise ConfigError(
            f"{setting}; its quantization_config has load_in_4bit {bits[0]!r} and load_in_8bit {bits[1]!r}; "
            "allowed: true for one of them"
        )
    if (kind := about.get("bnb_4bit_quant_type", "nf4")) not in ("nf4", "fp4"):
        raise ConfigError(f"{setting}; its quantization_config has bnb_4bit_quant_type {kind!r}; allowed: nf4, fp4")


def _read_object(setting: str, path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except ValueError as error:
        raise ConfigError(f"{setting}; {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{setting}; {path} does not hold a JSON object")
    return values


def check_generation_config(folder: str, key: str = "model.pretrained") -> None:
    """Check how to generate text, if a model's folder says so: Transformers ignores it if it is not a JSON object."""
    from transformers import GenerationConfig

    path = Path(folder) / GENERATION
    if path.is_file():
        values = _read_object(f"{key} is {folder!r}", path)
        try:
            with quiet():
                GenerationConfig.from_dict(values)
        except Exception as error:  # from Transformers, of many kinds
            raise ConfigError(f"{key} is {folder!r}; {path} cannot be used: {reason(error)}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file of bounded size, without NaN and Infinity.

    Raises:
        OSError: it cannot be read. ValueError: it is too large or invalid.
    """
    data = read_bounded(path)
    if data.startswith(_LFS):
        raise ValueError("it is a pointer of Git LFS; `git lfs pull` brings the file")
    return parse_json(data)


def transformers_config(folder: str, key: str) -> "PreTrainedConfig":
    """Load the configuration of any model that Transformers supports."""
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{key} is {folder!r}, and there is no {path}; allowed: a local folder with a Hugging Face checkpoint"
            f"{hint(folder)}"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Transformers raises errors of its own
        raise ConfigError(f"{key} is {folder!r}; {path} cannot be read: {reason(error)}") from error


def hint(name: str) -> str:
    """Explain how to download a model if the name can be one on the Hugging Face Hub; otherwise empty."""
    if Path(name).exists() or not _HUB_NAME.fullmatch(name):
        return ""
    folder = name.rpartition("/")[2]
    return (
        "; lowbit downloads nothing: if this is a name on the Hugging Face Hub, run "
        f"hf download {name} --local-dir {folder} and give the folder {folder}"
    )


def check_files(folder: str, key: str) -> _Shapes:
    """Read shapes and types of a folder's weights from the headers of their files."""
    setting = f"{key} is {folder!r}"
    for path in _candidates(Path(folder)):
        return headers_of(setting, _shards(setting, path) if path.name.endswith(_INDEX) else [path])
    raise ConfigError(f"{setting}, which holds no weights; allowed: a folder with {', '.join(_FILES)}, or their parts")


def _candidates(folder: Path) -> Iterator[Path]:
    """Yield files with a folder's weights, or with an index of them, in Transformers' order."""
    for name in _FILES:
        yield from (path for path in (folder / name, folder / f"{name}{_INDEX}") if path.exists())


def check_weights(folder: str, config: Any, key: str = "model.pretrained") -> dict[str, str]:
    """Check that a folder has the weights of a model of this configuration (Transformers'), and no other layers.

    Returns:
        The names in the folder of the model's embedding and output matrix, by their names in the model, as far as the
        model ties them and the folder has them.
    """
    from transformers import AutoModelForCausalLM

    setting, stored = f"{key} is {folder!r}", check_files(folder, key)
    layers = {match[0] for match in map(_LAYER.search, stored) if match}
    count = layer_count(config)
    if count > len(layers):  # check this before building so many layers
        raise ConfigError(f"{setting}; config.json has {count} layers, the weights are of {len(layers)}")
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # Transformers and PyTorch raise many kinds of errors
        raise ConfigError(f"{setting}; config.json does not describe a valid model: {reason(error)}") from error
    # A tied weight counts under both names: a file may hold either, or two weights that differ.
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    uses = _uses(model, expected, stored)
    covered, tied = set().union(*uses.values()), getattr(model, "all_tied_weights_keys", None) or {}
    tied = tied | {source: name for name, source in tied.items() if name in covered}
    if missing := [name for name in expected if name not in covered and name not in tied]:
        raise ConfigError(f"{setting}, which has no weights {_few(missing)}; allowed: a complete checkpoint")
    if not getattr(config, "quantization_config", None):
        for source, names in uses.items():
            (shape, dtype), whole = stored[source], len(names) == 1 and sum(n == names for n in uses.values()) == 1
            if whole and shape != expected[names[0]]:
                raise ConfigError(f"{setting}; {source} has shape {shape}, config.json says {expected[names[0]]}")
            if names and dtype not in _FLOATS:
                raise ConfigError(
                    f"{setting}, which is quantized ({source} is {dtype}); allowed: weights in floating point"
                )
    ignored = [re.compile(text) for text in model._keys_to_ignore_on_load_unexpected or ()]
    prefixes = tuple(f"{name}." for name in expected)
    others = [source for source, names in uses.items() if not (names or source.startswith(prefixes))]
    others = [source for source in others if not any(pattern.search(source) for pattern in (*ignored, _COMPUTED))]
    if strange := sorted(name for name in others if _LAYER.search(name)):
        raise ConfigError(f"{setting}; its layers hold {_few(strange)}, which {config.model_type} does not have")
    if others:
        log.warning("%s: %s of the folder are not part of the model, and are not used", setting, _few(sorted(others)))
    try:
        check_decoder(model)
    except Exception as error:  # Transformers and PyTorch raise many kinds of errors
        raise ConfigError(f"{setting}, a model that cannot be cut into stages: {reason(error)}") from error
    pair = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: source for source, names in uses.items() for name in names if name in (*pair, *pair.values())}


def same_tensors(folder: str, *names: str) -> bool:
    """Whether two tensors of a folder's weights are equal."""
    first, second = (_read(Path(folder), name) for name in names)
    return torch.equal(first, second)


def read_embedding(folder: str, config: Any, *, vocab: int) -> torch.Tensor:
    """Return the embedding of a folder that `check_weights` accepts, (vocabulary, width) in the dtype of its file.

    Nothing is read yet: the file is mapped into memory, and a row is read when it is used.

    Args:
        config: Transformers' configuration of the model. vocab: number of rows that are needed.

    Raises:
        ConfigError: it is quantized, or has fewer rows.
    """
    from transformers import AutoModelForCausalLM

    setting, stored = f"model.pretrained is {folder!r}", check_files(folder, "model.pretrained")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    weight = model.get_input_embeddings().weight
    same = [name for name, each in model.named_parameters(remove_duplicate=False) if each is weight]  # tied: two
    uses = _uses(model, dict.fromkeys(model.state_dict(), ()), stored)
    source = next(source for name in same for source, names in uses.items() if name in names)
    shape, dtype = stored[source]
    if dtype not in _FLOATS or len(shape) != 2 or shape[0] < vocab:
        raise ConfigError(
            f"pipeline.anchor is true and {setting}, whose embedding {source} is {dtype} {shape}; "
            f"allowed: at least {vocab} rows in floating point"
        )
    return _read(Path(folder), source).detach()  # a file of pickled parameters gives parameters


def _read(folder: Path, name: str) -> torch.Tensor:
    """Return one tensor of a folder that `check_files` accepts."""
    from safetensors import safe_open

    setting = f"model.pretrained is {str(folder)!r}"
    files = next(_shards(setting, path) if path.name.endswith(_INDEX) else [path] for path in _candidates(folder))
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                if name in file.keys():  # noqa: SIM118
                    return file.get_tensor(name)
        elif name in (content := torch.load(path, weights_only=True, map_location="cpu", mmap=True)):
            return content[name]
    raise KeyError(name)


def _uses(model: Any, expected: Mapping[str, Any], stored: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters that Transformers makes of each stored tensor, alone or with others; [] for none.

    A file may lack the decoder's prefix or have it in excess, and may store experts one by one, which the model stacks.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_source = {pattern: t.target_patterns for t in converters for pattern in t.source_patterns}
    known = dict.fromkeys(expected, True)
    uses: dict[str, list[str]] = {}
    for source in stored:
        name, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, known)
        if name not in known:
            name, pattern = rename_source_key(source, [], [], model.base_model_prefix, known)
        first, *others = by_source.get(pattern, [""]) if pattern else [""]
        names = [name, *(name.replace(first, other) for other in others)]
        uses[source] = [name for name in names if name in known]
    return uses


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let Transformers log errors only, and show no progress."""
    from transformers.utils import logging as hugging_face

    hugging_face.disable_progress_bar()
    level = hugging_face.get_verbosity()
    hugging_face.set_verbosity_error()
    try:
        yield
    finally:
        hugging_face.set_verbosity(level)


def load(auto: Any, folder: str, key: str, *, complete: bool = True, **options: Any) -> tuple[Any, list[str]]:
    """Load a model with one of Transformers' Auto classes; also return the names of weights that the folder lacks.

    Args:
        complete: refuse a folder that lacks weights. options: for `from_pretrained`.

    Raises:
        ConfigError: it cannot be loaded, or weights are missing or have other shapes.
    """
    try:
        with quiet():  # errors below report the same in one line
            model, about = auto.from_pretrained(
                folder, output_loading_info=True, local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:  # from safetensors, pickle, Transformers or PyTorch
        raise ConfigError(f"{key} {folder!r} cannot be loaded: {reason(error)}") from error
    if about.get("mismatched_keys"):
        name, stored, shape = min(about["mismatched_keys"])
        raise ConfigError(f"{key} is {folder!r}; {name} has shape {tuple(stored)}, config.json says {tuple(shape)}")
    missing = sorted(about["missing_keys"])
    if complete and missing:
        raise ConfigError(f"{key} is {folder!r}, which has no weights {_few(missing)}; allowed: a complete checkpoint")
    return model, missing


def reason(error: BaseException) -> str:
    """Return in few words why Transformers refuses a folder."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it needs code of its own (auto_map), which lowbit never runs; allowed: what Transformers itself has"
    bare = not text or isinstance(error, LookupError | AttributeError)  # such as the name of a key
    named = f"{type(error).__name__}: {text}" if bare else text
    return named[:_LONGEST].rstrip(": ")


def _shards(setting: str, index: Path) -> list[Path]:
    """List the files that an index names."""
    try:
        names = set(read_json(index)["weight_map"].values())
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("allowed: names of files in the same folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{setting}; {index} cannot be used: {reason(error)}") from error
    if missing := sorted(name for name in names if not (index.parent / name).exists()):
        raise ConfigError(
            f"{setting}, which lacks {_few(missing)} of {len(names)} files; allowed: a complete checkpoint"
        )
    return [index.parent / name for name in sorted(names)]


def headers_of(setting: str, files: Iterable[Path]) -> _Shapes:
    """Read the headers of files, without running code in them or reading weights."""
    from safetensors import safe_open

    shapes: _Shapes = {}
    for path in files:
        try:
            if not path.is_file():
                raise ValueError("it is not a regular file")
            with path.open("rb") as file:
                if file.read(len(_LFS)) == _LFS:
                    raise ValueError("it is a pointer of Git LFS; `git lfs pull` brings the file")
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                    shapes |= {name: (tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}
                continue
            content = torch.load(path, weights_only=True, map_location="meta", mmap=True)
            if not isinstance(content, Mapping):
                raise ValueError(f"it holds {type(content).__name__}; allowed: weights by name")
            tensors = {name: x for name, x in content.items() if isinstance(name, str) and isinstance(x, torch.Tensor)}
            shapes |= {name: (tuple(x.shape), str(x.dtype)) for name, x in tensors.items()}
        except Exception as error:  # from safetensors, zipfile or pickle
            why = f"it has {path.stat().st_size} bytes; {reason(error)}" if path.is_file() else reason(error)
            raise ConfigError(f"{setting}; {path} is cut short or cannot be read: {why}") from error
    return shapes


def copy_files(folder: str, target: Path, names: re.Pattern[str]) -> None:
    """Copy those files of a foreign folder that have such names to a saved model; log a line for each that cannot be.

    A link may lead to a file of the folder, or of the Hugging Face cache that it lies in, and nowhere else: a model is
    published, its user's files are not. What `target` has already stays, except how to generate text.
    """
    place = Path(folder).resolve()
    roots = [place, place.parents[1] / "blobs"] if place.parent.name == "snapshots" else [place]
    for path in sorted(file for file in place.glob("*") if names.fullmatch(file.name)):
        if (target / path.name).exists() and path.name != GENERATION:
            continue
        try:
            real = path.resolve(strict=True)
            if not real.is_file() or not any(real.is_relative_to(root) for root in roots):
                raise OSError(None, "it is a link out of the folder, or not a file")
            if real.stat().st_size > MOST_BYTES:
                raise OSError(None, f"it has more than {MOST_BYTES >> 20} MiB")
            shutil.copyfile(real, target / path.name)
        except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
            log.warning("%s is not saved with the model: %s", path, getattr(error, "strerror", None) or error)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class ByteTokenizer:
    """A tokenizer whose tokens are bytes; a token's id is the byte's value. size: entries of the vocabulary."""

    size = 256

    def encode(self, document: bytes) -> np.ndarray:
        """Return the bytes themselves, uint8."""
        return np.frombuffer(document, dtype=np.uint8)

    def hugging_face(self) -> "PreTrainedTokenizerBase":
        """Return a byte-level tokenizer without merges, with the same ids."""
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # Byte-level tokenizers write each byte as a printable character (GPT-2's table).
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        vocabulary = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        fast = Fast(models.BPE(vocab=vocabulary, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False)


class FolderTokenizer:
    """A Hugging Face tokenizer; documents end with its end-of-text token, if it has one."""

    def __init__(self, folder: str, *, key: str = "data.tokenizer") -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of many kinds; panics of the package tokenizers are not an `Exception`
            raise ConfigError(f"{key} {folder!r} cannot be loaded: {reason(error)}") from error
        self.size = len(self._tokenizer)

    def encode(self, document: bytes) -> np.ndarray:
        """Return token ids, uint32; bytes that are not UTF-8 become the replacement character."""
        text = document.decode("utf-8", errors="replace")
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if self._tokenizer.eos_token_id is not None:
            ids.append(self._tokenizer.eos_token_id)
        return np.asarray(ids, dtype=np.uint32)

    def hugging_face(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer as it was loaded."""
        return self._tokenizer


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return what a tokenizer of Transformers puts in front of a text, and its ids, as samples are encoded."""
    whole = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    begin = whole["input_ids"][: [*whole["special_tokens_mask"], 0].index(0)]
    return [*begin, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


Tokenizer = ByteTokenizer | FolderTokenizer


def load_tokenizer(name: str, *, key: str = "data.tokenizer") -> Tokenizer:
    """Load the tokenizer with this name; `key` is the setting, for errors."""
    if name == "bytes":
        return ByteTokenizer()
    if not Path(name).is_dir():
        raise ConfigError(f"{key} is {name!r}; allowed: bytes, or a folder that exists{hint(name)}")
    return FolderTokenizer(name, key=key)


def tokenizer_for(name: str, pretrained: str) -> Tokenizer:
    """Load the tokenizer `data.tokenizer`; without a name that of `model.pretrained`, or bytes without a model."""
    if name or not pretrained:
        return load_tokenizer(name or "bytes")
    if not _has_tokenizer(pretrained):
        raise ConfigError(
            f"model.pretrained is {pretrained!r}, which holds no tokenizer, and data.tokenizer is empty; "
            "allowed: the folder of the model's tokenizer in data.tokenizer, or bytes"
        )
    stored = FolderTokenizer(pretrained, key="the tokenizer of model.pretrained")
    bytes_ = ByteTokenizer()  # of a model that was trained on bytes, where byte 0 ends an answer
    return bytes_ if definition(stored.hugging_face()) == definition(bytes_.hugging_face()) else stored


def is_own(tokenizer: Tokenizer, name: str, pretrained: str) -> bool:
    """Whether a tokenizer, loaded from `name`, is that of the pretrained model."""
    if not name or Path(name).resolve() == Path(pretrained).resolve():
        return True
    if not _has_tokenizer(pretrained):
        return False
    with contextlib.suppress(ConfigError):
        own = FolderTokenizer(pretrained).hugging_face()
        return definition(own) == definition(tokenizer.hugging_face())
    return False


def _has_tokenizer(folder: str) -> bool:
    return any(TOKENIZER_FILES.fullmatch(path.name) or path.name in _TOKENIZER for path in Path(folder).glob("*"))


def definition(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return vocabulary and rules as text; `repr` shows the folder instead."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return fast.to_str() if fast is not None else repr(sorted(tokenizer.get_vocab().items()))
