"""Launch kernels on the tensor's device and the current stream, without fusing multiply and add."""

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from lowbit.kernels.layout import ALIGNMENT, Layout

log = logging.getLogger(__name__)

INTERPRETED: bool = knobs.runtime.interpret


@functools.cache
def unsupported(device: torch.device) -> str:
    """Return why kernels cannot run on a device; empty if they can."""
    if torch.version.hip:
        return "the kernels are made for NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the kernels need compute capability 8.0, and it has {capability[0]}.{capability[1]}"
    return ""


def launch(kernel: Any, programs: int, warps: int, shape: dict[str, Any], *arguments: Any, **settings: Any) -> None:
    """Queue `programs` programs of a kernel; the first tensor argument determines the device.

    For a CPU tensor, in Triton's interpreter, device -1 means none.
    """
    tensor = next(a for a in arguments if isinstance(a, Tensor))
    with torch.cuda.device(tensor.device if tensor.is_cuda else -1):
        kernel[(programs,)](*arguments, **settings, **shape, num_warps=warps, enable_fp_fusion=False)


@functools.cache
def warn_once(message: str) -> None:
    """Log, once, that an operator takes the slow reference path."""
    log.warning(message)


def starts(layout: Layout, *names: str) -> tuple[int, ...]:
    """Starts of sections in `ALIGNMENT` bytes: the kernel multiplies them, so that its compiler knows the alignment.

    The start of an empty section has no meaning.
    """
    return tuple(layout.offsets[name] // ALIGNMENT for name in names)


def ends(layout: Layout, *names: str) -> tuple[int, ...]:
    """Ends of sections, in bytes."""
    return tuple(layout.offsets[name] + layout.sizes[name] for name in names)


def power_of_two_from(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def warps_for(lanes: int) -> int:
    """Number of warps for a program whose tensors have `lanes` lanes of eight elements."""
    return min(32, max(1, lanes // 256))
