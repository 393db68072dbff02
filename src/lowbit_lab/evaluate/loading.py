"""Load local Hugging Face checkpoints, whole or split over the ranks of a job, and calibrations, for both commands."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowbit.config import ConfigError
from lowbit.job.process_group import joined, world
from lowbit.tensor_parallel import Calibration, SumSettings, tensor_parallel_
from lowbit.tensor_parallel.low_bit import load_agreed
from lowbit.tensor_parallel.plan import ENCODERS
from lowbit.terminal import console, filtered_again
from lowbit.train.device import choose_autocast, choose_device
from lowbit.train.pretrained import check_files, load, transformers_config
from lowbit.wire.pytorch import default_group
from lowbit_lab.evaluate.settings import InferenceConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TIMEOUT = 300.0
CAUSAL, ENCODER = "causal language model", "encoder"
log = logging.getLogger(__name__)


def prepare(settings: InferenceConfig) -> torch.device:
    """Check the model's folder, set the number of threads, and return the device of this rank."""
    device = choose_device(settings.device, world()[1], key="device")
    config = model_config(settings.model)
    check_files(settings.model, "model")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and settings.length > longest:
        raise ConfigError(f"length is {settings.length}; the model has {longest} positions; allowed: at most as many")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return device


@contextlib.contextmanager
def job(device: torch.device) -> Iterator[None]:
    """Join the process group of the job for this block, if there is a job."""
    if world()[1] == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with joined(TIMEOUT, backend="nccl" if device.type == "cuda" else "gloo"):
        yield


def load_model(folder: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """Load a language model or encoder: split over the ranks of the job, or whole without one; nothing is downloaded.

    It is split on the CPU: the host briefly holds a whole model for each rank, a device only its rank's part.

    Args:
        folder: with `config.json` and weights; dtype: see the settings.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM if model_kind(folder) == CAUSAL else AutoModel
    model, missing = load(auto, folder, "model", complete=False, dtype=choose_dtype(dtype, device))
    if any(name.startswith("pooler.") for name in missing):  # the pooler is not needed
        model.pooler, missing = None, [name for name in missing if not name.startswith("pooler.")]
    if missing:
        raise ConfigError(f"model {folder!r} has no weights {', '.join(missing[:3])}; allowed: a complete checkpoint")
    attention = model.config._attn_implementation
    if attention != "sdpa":
        log.warning("%s computes attention by %s: it supports nothing else", type(model).__name__, attention)
    model.eval()
    if world()[1] > 1:
        tensor_parallel_(model)
    return model.to(device)  # pyright: ignore[reportArgumentType]


def model_kind(folder: str) -> str:
    """Return `CAUSAL` or `ENCODER`, as the checkpoint's config says."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = model_config(folder).model_type
    if kind in ENCODERS:
        return ENCODER
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"model {folder!r} is of the type {kind!r}; allowed: causal language models, and the "
            f"encoders {', '.join(ENCODERS)}"
        )
    return CAUSAL


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the computation; "auto": bfloat16 if the device has instructions for it, else float32."""
    if name == "auto":
        return choose_autocast("auto", device) or torch.float32
    return getattr(torch, name)


def model_config(folder: str) -> PreTrainedConfig:
    """Return the config of the checkpoint's text model, with the defaults of its architecture."""
    return transformers_config(folder, "model").get_text_config()


def possible_ranks(folder: str, most: int = 128) -> list[int]:
    """Return the numbers of ranks that can share the model's heads evenly."""
    config = model_config(folder)
    heads = [getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")]
    return [n for n in range(1, most + 1) if all(h % n == 0 for h in heads if h)]


def check_ranks(key: str, ranks: int, folder: str) -> None:
    """Raise ConfigError, which names the setting `key`, unless this many ranks can share the model's heads evenly."""
    if ranks not in (possible := possible_ranks(folder)):
        raise ConfigError(f"{key} is {ranks}; allowed: what divides the model's heads, {', '.join(map(str, possible))}")


def load_calibrations(files: tuple[str, ...]) -> dict[int, Calibration]:
    """Load calibrations, at most one for each number of ranks, and return them by number (`load_calibration`)."""
    loaded = [load_calibration(file) for file in files]
    worlds = [calibration.world for calibration in loaded]
    if twice := next((world for world in worlds if worlds.count(world) > 1), None):
        raise ConfigError(f"calibration has two files for {twice} ranks; allowed: one for each number of ranks")
    return dict(zip(worlds, loaded, strict=True))


def load_calibration(path: str | Path) -> Calibration:
    """Load a calibration; in a job, all ranks return the same one or raise the same error."""
    if world()[1] == 1:
        return Calibration.load(path)
    loaded = load_agreed(path, default_group(), SumSettings())
    assert isinstance(loaded, Calibration)
    return loaded


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on the terminal of the first rank; yield a function that takes the number of finished items."""
    from rich.markup import escape
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    hidden = os.environ.get("RANK", "0") != "0"
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=hidden) as bar, filtered_again():
        task = bar.add_task(escape(title), total=total)
        yield lambda done: bar.update(task, completed=done)
