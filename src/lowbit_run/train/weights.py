"""Build a rank's share of a model: read only its weights, in the width that they need, or draw random ones.

No rank holds more than its share: modules of other stages exist on the meta device only, and tensors are read, or
drawn, one at a time.
"""

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.activations import checkpoint_
from lowbit_run.config import ConfigError
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.cut import Elsewhere, Share, attention_of, class_for, parts_of, whole_class
from lowbit_run.train.model import add_adapters, hugging_face_config
from lowbit_run.train.pretrained import check_weights, load, quiet, read_config, same_tensors
from lowbit_run.train.widened import widen_

_RANDOM = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
_CONSTANT = {torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor}


_PIECE = 1 << 20  # weights that are quantized at a time on the CPU
_MMAP_THRESHOLD, _LOADING, _USUAL = -3, 1 << 20, 32 << 20  # of glibc's mallopt; the last is what it reaches by itself
_DONTNEED = 4  # of madvise
_MAPPED_FILE = re.compile(r"(?m)^([0-9a-f]+)-([0-9a-f]+) .*\.safetensors\n(?:[A-Z].*\n)*?Anonymous: +(\d+) kB")
_MALLOC = ctypes.CDLL(None) if hasattr(ctypes.CDLL(None), "malloc_trim") else None  # glibc only


@contextlib.contextmanager
def _returned_memory() -> Iterator[None]:
    """Give the memory of each large tensor that is freed in the `with` block back to the system.

    Otherwise glibc keeps it, in pieces that the next tensor does not fit into: a rank that quantizes its weights ends
    with several times their size.
    """
    if _MALLOC is not None:
        _MALLOC.mallopt(_MMAP_THRESHOLD, _LOADING)
    try:
        yield
    finally:
        if _MALLOC is not None:
            _MALLOC.mallopt(_MMAP_THRESHOLD, _USUAL)
            _MALLOC.malloc_trim(0)
            _release_files(_MALLOC)


def _release_files(libc: Any) -> None:
    """Drop from this process the pages of weights files that were read, and that the system reads again if needed.

    The whole file stays mapped as long as any of its tensors is in use, such as the embedding of a quantized model.
    """
    with contextlib.suppress(OSError):  # Linux only
        mappings = re.findall(_MAPPED_FILE, Path("/proc/self/smaps").read_text())
        for begin, end, changed in mappings:
            if changed == "0":  # a page that was written to exists nowhere else
                start = int(begin, 16)
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(int(end, 16) - start), _DONTNEED)


@_returned_memory()
def build_share(config: TrainConfig, share: Share, *, vocab: int, device: torch.device, autocast: Any) -> Any:
    """Build a rank's share of a run's model, with adapters if it has any, in training mode on its device.

    Args:
        vocab: entries of the embedding. autocast: dtype of matrix products; None: float32 for frozen weights, that of
            the weights for trained ones.

    Raises:
        ConfigError: the folder cannot be loaded, or a package is missing.
    """
    model, exact = config.model, hugging_face_config(config.model, vocab=vocab, sequence=config.data.sequence)
    dtype = torch.bfloat16 if weights_of(config, autocast) != "fp32" else torch.float32
    if not model.pretrained:
        built = random_share(exact, share, config.run.seed).to(device, dtype)
    else:
        quantized = quantization(model.weights, exact, dtype, double=model.double_quantization)
        built = load_share(model.pretrained, exact, share, dtype=dtype, quantized=quantized, device=device)
    for module in built.modules():
        # In evaluation mode, bitsandbytes packs weights for processors with AVX-512 so that later training gets no
        # gradient through them, without an error.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if config.lora.rank:
        if dtype == torch.bfloat16 and autocast is None:
            widen_(built)
        add_adapters(built, config)
        share_inputs(built, config, autocast)
    if config.checkpoints:
        checkpoint_layers(built)
    return built.train()  # a pretrained model is loaded in evaluation mode, without dropout


def load_share(
    folder: str, exact: Any, share: Share, *, dtype: torch.dtype, quantized: Any, device: torch.device,
    key: str = "model.pretrained",
) -> Any:  # fmt: skip
    """Read a share of a folder's model, without adapters, in evaluation mode on its device.

    Args:
        exact: the folder's configuration, which is changed. quantized: configuration of bitsandbytes, or None.
        key: the setting, for errors.

    Raises:
        ConfigError: the folder cannot be loaded, or a package is missing.
    """
    return share_loader(folder, exact, dtype=dtype, quantized=quantized, device=device, key=key)(share)


def share_loader(
    folder: str, exact: Any, *, dtype: torch.dtype, quantized: Any, device: torch.device, key: str = "model.pretrained"
) -> Callable[[Share], Any]:
    """Return what reads shares of a folder's model as `load_share` does, and checks the folder only once."""
    tied = check_weights(folder, exact, key)
    # Whatever its configuration says, Transformers ties no weights that differ in the file.
    if len(tied) == 2 and not same_tensors(folder, *tied.values()):
        exact.tie_word_embeddings = False
    only_output = len(tied) == 1 and next(iter(tied)).count(".") == 1  # in the file, outside the decoder
    placed: dict[str, Any] = {"device_map": {"": device}} if quantized is not None or device.type != "cpu" else {}

    def read(share: Share) -> Any:
        if only_output and share.first:
            share = replace(share, last=True)  # it is the embedding
        with _InPieces():
            built, _ = load(
                class_for(exact, share), folder, key, config=exact, attn_implementation=attention_of(exact),
                dtype=dtype, quantization_config=quantized, **placed,
            )  # fmt: skip
        return built

    return read


def checkpoint_layers(model: Any) -> None:
    """Keep only the input of each decoder layer for backward, where the layer runs again."""
    for number, layer in enumerate(getattr(model.base_model, parts_of(model.config)[1])):
        if not isinstance(layer, Elsewhere):
            checkpoint_(layer, name=str(number))


class _InPieces(TorchDispatchMode):
    """Quantizes large matrices a piece at a time on the CPU, where bitsandbytes makes several float32 copies of each.

    The result is the same. It takes less memory, and a third less time, since the copies stay in the caches.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) != "bitsandbytes.quantize_4bit.default" or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        parts = [func(piece, *args[1:], **(kwargs or {})) for piece in args[0].reshape(-1).split(_PIECE)]
        return tuple(torch.cat(same) for same in zip(*parts, strict=True))


def share_inputs(model: nn.Module, config: TrainConfig, autocast: torch.dtype | None) -> None:
    """Let adapters without dropout save the inputs of their layers as they are, if autocast converts them.

    PEFT converts them to float32, and autocast that to bfloat16: a copy each for queries, keys, values and gates.
    """
    if autocast is None or config.lora.dropout:
        return
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False  # pyright: ignore[reportArgumentType]


def weights_of(config: TrainConfig, autocast: torch.dtype | None) -> str:
    """Return the format of a run's weights in memory: `model.weights`, or its default.

    It is bf16 for what a folder with weights in few bits has besides these.
    """
    if config.model.weights is not None:
        return config.model.weights
    stored = bool(config.model.pretrained and read_config(config.model.pretrained).get("quantization_config"))
    return "bf16" if stored or (config.lora.rank and autocast == torch.bfloat16) else "fp32"


def check_quantization(config: TrainConfig) -> None:
    """Check what a run with frozen weights in few bits needs.

    Raises:
        ConfigError: the folder's weights are quantized and would be trained, or quantized again; a package is missing.
    """
    model = config.model
    stored = bool(model.pretrained and read_config(model.pretrained).get("quantization_config"))
    setting = f"model.pretrained is {model.pretrained!r}, whose weights have 4 or 8 bits"
    if stored and model.weights is not None:
        raise ConfigError(f"{setting}, and model.weights is {model.weights}; allowed: no model.weights")
    if stored and not config.lora.rank:
        raise ConfigError(f"{setting}, and lora.rank is 0; allowed: with lora.rank of at least 1")
    if stored or model.weights in ("int8", "nf4"):
        check_packages(setting if stored else f"model.weights is {model.weights}")


def check_packages(setting: str) -> None:
    """Check that the packages for weights in few bits are there. `setting`: which needs them, for the ConfigError."""
    for package in ("bitsandbytes", "accelerate"):
        if find_spec(package) is None:
            raise ConfigError(f"{setting}, which needs the package {package}: pip install 'lowbit[qlora]'")


def quantization(weights: str | None, config: Any, dtype: torch.dtype, *, double: bool) -> Any:
    """Return bitsandbytes' configuration for a format of weights; None: full precision, or a folder that is quantized.

    `double`: quantize the scales of nf4 as well.
    """
    if weights not in ("int8", "nf4") or getattr(config, "quantization_config", None):
        return None
    from transformers import BitsAndBytesConfig

    if weights == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=dtype,
    )  # fmt: skip


def random_share(config: Any, share: Share, seed: int) -> Any:
    """Build a share with the random float32 weights that the whole model gets from this seed."""
    from transformers.modeling_utils import PreTrainedModel

    config._attn_implementation = "sdpa"
    cut, whole, draws = class_for(config, share), whole_class(config), _Draws()
    with torch.device("meta"):
        held = dict(cut(config).named_parameters()).keys()
    initialize = PreTrainedModel.init_weights

    def init_weights(model: Any) -> None:  # called for the decoder before the output matrix exists, then for all
        prefix = "" if isinstance(model, whole) else f"{whole.base_model_prefix}."
        draws.names = {p: prefix + name for name, p in model.named_parameters() if prefix + name in held}
        with torch.device("cpu"):  # on the meta device, Transformers initializes nothing
            initialize(model)

    torch.manual_seed(seed)
    PreTrainedModel.init_weights = init_weights  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with draws, torch.device("meta"):
            whole(config)
    finally:
        PreTrainedModel.init_weights = initialize
    assert draws.values.keys() == held, draws.values.keys() ^ held
    with quiet():
        return cut.from_pretrained(None, config=config, state_dict=draws.values, dtype=torch.float32)


class _Draws(TorchDispatchMode):
    """Draws on the CPU what is drawn on the meta device, and keeps the values of some parameters.

    Attributes:
        names: of parameters whose values are kept, by parameter. values: the last of each, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[Tensor, str] = {}
        self.values: dict[str, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else None
        if isinstance(target, Tensor) and target.is_meta and (func in _RANDOM or func in _CONSTANT):
            name = self.names.get(target)
            if func in _RANDOM or name is not None:
                value = func(torch.empty(target.shape, dtype=target.dtype, device="cpu"), *args[1:], **kwargs)
                if name is not None:
                    self.values[name] = value
        return func(*args, **kwargs)
