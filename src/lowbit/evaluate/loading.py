"""Local Hugging Face checkpoints: whole, to play ranks with, or cut over the ranks of a job."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowbit.train import ConfigError
from lowbit.train.device import choose_autocast, choose_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """What the model computes in; "auto": bfloat16 where the device has instructions for it, else float32."""
    if name == "auto":
        return choose_autocast("auto", device) or torch.float32
    return DTYPES[name]


def find_device(name: str, ranks: int) -> torch.device:
    """The device of this rank of so many.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    try:
        return choose_device(name, ranks)
    except ConfigError as error:
        raise ConfigError(str(error).replace("run.device", "device")) from error


def load_model(folder: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A causal language model from a local folder; nothing is downloaded.

    Args:
        folder: with `config.json` and weights; dtype: to load them in; device: to compute on.

    Raises:
        ConfigError: no checkpoint there, or one that Hugging Face cannot load.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hugging_face

    model_config(folder)
    hugging_face.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model {folder!r} cannot be loaded: {reason}") from error
    attention = model.config._attn_implementation
    if attention != "sdpa":
        log.warning("%s computes attention by %s: it has no other", type(model).__name__, attention)
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]


def model_config(folder: str) -> PreTrainedConfig:
    """The config of the checkpoint's text model, with the defaults of its architecture.

    Raises:
        ConfigError: it is missing, or Hugging Face does not know the architecture.
    """
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model is {folder!r}, and there is no {path}; allowed: a local folder with a Hugging Face checkpoint"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Hugging Face checks fields with errors of its own
        reason = " ".join(str(error).split())
        raise ConfigError(f"model is {folder!r}; {path} cannot be read: {reason}") from error
    return config.get_text_config()


def check_length(folder: str, length: int) -> None:
    """Raise unless the model knows as many positions.

    Raises:
        ConfigError: windows are longer.
    """
    longest = getattr(model_config(folder), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError(f"length is {length}; the model knows {longest} positions; allowed: at most as many")


def possible_ranks(folder: str, wanted: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[int, ...]:
    """Those numbers of ranks that share out the model's heads evenly."""
    config = model_config(folder)
    heads = [getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")]
    return tuple(n for n in wanted if all(h % n == 0 for h in heads if h))
