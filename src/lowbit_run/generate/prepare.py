"""Check what is to be answered as far as that needs no peers, before a process group exists."""

import copy
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lowbit import __version__
from lowbit.codecs import Codec
from lowbit_run.config import ConfigError
from lowbit_run.generate.adapters import CONFIG, WEIGHTS, base_of, check_adapters
from lowbit_run.generate.prompts import Prompt, read_prompts, read_scored
from lowbit_run.generate.settings import GenerateSettings
from lowbit_run.train.answers import Encoded
from lowbit_run.train.boundaries import codec_of
from lowbit_run.train.config import LoraConfig, ModelConfig, PipelineConfig, TrainConfig
from lowbit_run.train.cut import layer_count, parts_of
from lowbit_run.train.device import choose_autocast, choose_device
from lowbit_run.train.fits import check_weights_fit
from lowbit_run.train.footprint import model_bytes
from lowbit_run.train.identity import pretrained_digest
from lowbit_run.train.layout import PipelineLayout, make_layout
from lowbit_run.train.model import check_starts
from lowbit_run.train.pretrained import (
    GENERATION,
    FolderTokenizer,
    check_generation_config,
    check_weights,
    hint,
    read_config,
    transformers_config,
)
from lowbit_run.train.weights import check_packages, quantization

_USUAL_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Settings with everything derived from them on this machine.

    Attributes:
        base: folder of the model. adapters: folder of its adapters, if any, and PEFT's configuration of them.
        exact: configuration of the model, Transformers'. positions: of the model, if they are limited.
        prompts, samples: to answer and to score, on rank 0 only.
    """

    settings: GenerateSettings
    base: str
    exact: Any
    adapters: tuple[Path, Any] | None
    layout: PipelineLayout
    codec: Codec
    device: torch.device
    tokenizer: FolderTokenizer
    positions: int | None
    prompts: list[Prompt]
    samples: list[Encoded]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the model computes."""
        return torch.float32 if self.settings.weights == "fp32" else torch.bfloat16

    @property
    def quantized(self) -> Any:
        """Configuration of bitsandbytes for the weights, if they are to be quantized."""
        settings = self.settings
        return quantization(settings.weights, self.exact, self.dtype, double=settings.double_quantization)

    @cached_property
    def generation(self) -> Any:
        """How to generate, Transformers': as the folder says, without what several machines do not do."""
        from transformers import GenerationConfig

        folders = [*([self.adapters[0]] if self.adapters else []), Path(self.base)]
        folder = next((each for each in folders if (each / GENERATION).is_file()), None)
        found = (
            GenerationConfig.from_model_config(copy.deepcopy(self.exact))
            if folder is None
            else GenerationConfig.from_pretrained(folder, local_files_only=True)
        )
        inner: Any = self.tokenizer.hugging_face()
        own = found.eos_token_id
        ends = {*(own if isinstance(own, list) else [own]), inner.eos_token_id} - {None}
        found.eos_token_id = sorted(ends) or None
        pads = (found.pad_token_id, inner.pad_token_id, *sorted(ends))
        found.pad_token_id = next((x for x in pads if x is not None and 0 <= x < self.exact.vocab_size), 0)
        found.max_new_tokens = self.settings.tokens or found.max_new_tokens or _USUAL_TOKENS
        found.max_length = None
        found.num_beams, found.do_sample = 1, self.settings.sample
        if not found.do_sample:
            found.temperature = found.top_p = found.top_k = found.min_p = found.typical_p = None
        return found

    def facts(self) -> dict[str, str]:
        """What all ranks must agree on."""
        names = ("weights", "double_quantization", "sample", "batch", "checksums")
        facts = {name: str(getattr(self.settings, name)) for name in names}
        adapters = b""
        if self.adapters is not None:
            folder, config = self.adapters
            own = {**config.to_dict(), "base_model_name_or_path": ""}  # each machine has its own folder
            adapters = json.dumps(own, default=_plain, sort_keys=True).encode() + (folder / WEIGHTS).read_bytes()
        return facts | {
            "lowbit version": __version__,
            "layers": str(list(self.layout.layer_counts)),
            "format": f"{self.codec} [{self.codec.fingerprint()}]",
            "model": pretrained_digest(self.base),
            "adapters": _digest(adapters) if adapters else "none",
            "generation_config.json": _digest(self.generation.to_json_string(use_diff=False).encode()),
        }


def prepare(settings: GenerateSettings, *, rank: int, ranks: int) -> Prepared:
    """Check settings for rank `rank` of `ranks`, and read the prompts on rank 0.

    Raises:
        ConfigError: something would keep the ranks from answering.
    """
    folder = _folder(settings.folder)
    adapted = (folder / CONFIG).is_file()
    if settings.base and not adapted:
        raise ConfigError(f"base is {settings.base!r}, and {folder} holds no {CONFIG}; allowed: with adapters only")
    base = (settings.base or base_of(folder)) if adapted else str(folder)
    key = "base" if adapted else "folder"
    if adapted and not base:
        raise ConfigError(f"base is empty, and {folder / CONFIG} names no model; allowed: the adapters' model")
    if adapted and not settings.base and not Path(base).is_dir():
        raise ConfigError(
            f"base is empty, and the adapters name {base!r} as their model, which is not a folder on this machine; "
            "allowed: the model's folder here (--base FOLDER)"
        )
    read_config(base, key)
    check_generation_config(base, key)
    if adapted:
        check_generation_config(str(folder), "folder")
    exact: Any = transformers_config(base, key)
    parts_of(exact)
    pipeline = PipelineConfig(ranks=ranks, layers=settings.layers, schedule="GPipe")
    layout = make_layout(pipeline, ranks=ranks, layers=layer_count(exact))
    check_starts(exact, [layout.layers_of(stage)[0] for stage in range(1, layout.stages)], "layers")
    codec = codec_of("format", settings.format, _check_codec)
    device = choose_device(settings.device, ranks, key="device")
    if settings.weights in ("int8", "nf4") or getattr(exact, "quantization_config", None):
        stored = getattr(exact, "quantization_config", None)
        check_packages(
            f"{key} is {base!r}, whose weights have 4 or 8 bits" if stored else f"weights is {settings.weights}"
        )
    positions = getattr(exact, "max_position_embeddings", None)
    own = adapted and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer = FolderTokenizer(str(folder) if own else base, key=key)
    prompts: list[Prompt] = []
    samples: list[Encoded] = []
    if rank == 0 and settings.score:
        samples = read_scored(settings, tokenizer, longest=positions)
    elif rank == 0:
        prompts = read_prompts(settings, tokenizer.hugging_face(), longest=positions)
    check_weights(base, copy.deepcopy(exact), key)
    adapters = (folder, check_adapters(folder, exact, base)) if adapted else None
    _check_memory(settings, base, layout, ranks, device, vocab=exact.vocab_size)
    return Prepared(
        settings=settings, base=base, exact=exact, adapters=adapters, layout=layout, codec=codec, device=device,
        tokenizer=tokenizer, positions=positions, prompts=prompts, samples=samples,
    )  # fmt: skip


def _check_memory(
    settings: GenerateSettings, base: str, layout: PipelineLayout, ranks: int, device: torch.device, *, vocab: int
) -> None:
    config = TrainConfig(
        model=ModelConfig(
            pretrained=base, weights=settings.weights, double_quantization=settings.double_quantization
        ),
        lora=LoraConfig(rank=1),  # frozen weights
    )  # fmt: skip
    kept = model_bytes(config, vocab=vocab, autocast=choose_autocast("auto", device))
    advice = "fewer layers here (layers) or more ranks, on other machines"
    advice = advice if settings.weights == "nf4" else f'weights "nf4", {advice}'
    check_weights_fit(kept, layout, ranks=ranks, device=device, advice=advice)


def _folder(name: str) -> Path:
    """Return the folder of a model or of adapters: the given one, or the model of a run."""
    folder = Path(name)
    if not name or not folder.is_dir():
        raise ConfigError(
            f"folder is {name!r}; allowed: a folder that exists, with a model, adapters or a run{hint(name)}"
        )
    holds = (folder / CONFIG).exists() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return folder if holds or not (folder / "model").is_dir() else folder / "model"


def _check_codec(codec: Codec) -> Codec:
    from lowbit.integrations.transformers import check_stateless

    return check_stateless(codec)


def _plain(value: Any) -> Any:
    """Return a value of a configuration as JSON has it: sets have no order."""
    return sorted(value) if isinstance(value, set) else str(value)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
