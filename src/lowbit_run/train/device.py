"""Choose a rank's device, its precision, and the backend of its sums."""

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

from lowbit import escape
from lowbit_run.config import ConfigError
from lowbit_run.cores import memory_limit, usable_cores
from lowbit_run.train.config import TrainConfig

log = escape.logger(__name__)


def local_rank() -> int:
    """Return this process's number on its machine, from the launcher."""
    return _launched("LOCAL_RANK", 0, least=0)


def local_ranks(ranks: int) -> int:
    """Return the number of ranks on this machine, from the launcher; without a launcher, all `ranks`."""
    return _launched("LOCAL_WORLD_SIZE", ranks, least=1)


def _launched(name: str, default: int, *, least: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name} is {text!r} in the environment; allowed: an integer of at least {least}")
    return int(text)


def threads_per_rank(ranks: int) -> int:
    """Divide the cores that this process may use (`lowbit_run.cores`) among the ranks of this machine."""
    return max(1, usable_cores() // local_ranks(ranks))


def choose_device(name: str, ranks: int, *, key: str = "run.device") -> torch.device:
    """Choose the device of this rank of `ranks`; `key` is the setting, for messages.

    With "cuda", ranks of a machine take its devices in turn; with "auto", each has its own, or computes on the CPU.
    """
    devices, local = torch.cuda.device_count(), local_ranks(ranks)
    if name == "auto" and 0 < devices < local:
        log.warning(
            "%s is auto; this machine has %d CUDA devices for %d ranks: computing on the CPU (%s=cuda shares them)",
            key, devices, local, key
        )  # fmt: skip
    if name == "cpu" or (name == "auto" and devices < local):
        return torch.device("cpu")
    if not devices:
        raise ConfigError(f"{key} is cuda; this machine has 0 devices; allowed: auto or cpu")
    return torch.device("cuda", local_rank() % devices)


def choose_backend(config: TrainConfig, device: torch.device, ranks: int) -> str:
    """Choose the backend of sums over several pipelines between devices, "gloo" or "nccl"; all else goes over Gloo.

    Raises:
        ConfigError: NCCL is configured, and has nothing to do or cannot be used.
    """
    name, pipelines = config.run.backend, config.pipeline.data_parallel
    devices, local = torch.cuda.device_count(), local_ranks(ranks)
    problem = ""
    if device.type == "cpu":
        problem = "the ranks compute on the CPU"
    elif pipelines == 1:
        problem = "there is one pipeline, whose messages go over Gloo (pipeline.data_parallel is 1)"
    elif not dist.is_nccl_available():
        problem = "this PyTorch has no NCCL"
    elif devices < local:
        problem = f"NCCL needs a device for each rank, and {local} ranks share {devices}"
    if name == "nccl" and problem:
        raise ConfigError(f"run.backend is nccl; {problem}; allowed: auto or gloo")
    return "nccl" if name == "nccl" or (name == "auto" and not problem and ranks == local) else "gloo"


def choose_autocast(precision: str, device: torch.device) -> torch.dtype | None:
    """Choose bfloat16 if configured or supported by the device; other CPUs emulate it, 60 times slower than float32."""
    if precision == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else None
    return torch.bfloat16 if precision == "bf16" else None


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the free bytes of a device's memory, and all; for the CPU those that this process may use, with swap."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    free = whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        free, swap = (1024 * int(lines[key].split()[0]) for key in ("MemAvailable", "SwapTotal"))
        whole += swap
    limit = memory_limit()
    return int(min(free, limit)), int(min(whole, limit))
