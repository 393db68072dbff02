"""LoRA (PEFT): adapters on a pretrained model with frozen weights, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.config import ConfigError
from lowbit.train.config import TrainConfig
from lowbit.train.model import architecture, linear_layers
from lowbit.train.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL = "all-linear"


def check_lora(config: TrainConfig) -> None:
    """Check the adapters of a run, if it has any.

    Raises:
        ConfigError: PEFT is missing, or no layer has the name of a target.
    """
    if not config.lora.rank:
        return
    _peft(config.lora.rank)
    targets_of(config)


@lru_cache(maxsize=4)
def targets_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the names, within a decoder layer, of the linear layers that get an adapter.

    Raises:
        ConfigError: no layer has the name of a target.
    """
    names = linear_layers(config.model)
    chosen: set[str] = set()
    for target in config.lora.targets:
        matches = {name for name in names if target == ALL or f".{name}".endswith(f".{target}")}
        if not matches:
            raise ConfigError(
                f"lora.targets has {target!r}, which no decoder layer has; allowed: {ALL}, {', '.join(names)}, "
                "or the last part of such a name"
            )
        chosen |= matches
    return tuple(name for name in names if name in chosen)


def add_adapters(model: PreTrainedModel, config: TrainConfig) -> None:
    """Add adapters in place, initialized from `run.seed` alone, and freeze all other weights."""
    torch.manual_seed(config.run.seed)
    _peft(config.lora.rank).inject_adapter_in_model(_peft_config(config), model)


def save_adapters(folder: Path, weights: Mapping[str, Tensor], config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Write adapters and tokenizer so that `PeftModel.from_pretrained(model, folder)` loads them.

    Args:
        weights: the adapters, by their names in the whole model.
    """
    from safetensors.torch import save_file

    named = {f"base_model.model.{name.replace('.default.', '.')}": w.contiguous() for name, w in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    saved = _peft_config(config)
    saved.inference_mode = True
    saved.save_pretrained(str(folder))
    tokenizer.hugging_face().save_pretrained(folder)


def _peft_config(config: TrainConfig) -> Any:
    lora = config.lora
    pretrained, family = Path(config.model.pretrained), architecture(config.model, vocab=0)["family"]
    return _peft(lora.rank).LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(targets_of(config)),
        fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM", base_model_name_or_path=str(pretrained.resolve()),
    )  # fmt: skip


def _peft(rank: int) -> Any:  # PEFT, of an optional package
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"lora.rank is {rank}, which needs: pip install 'lowbit[frameworks]'") from error
    return peft
