"""Checks of settings and tensors that codecs share: an error names the argument, its value, and what is allowed."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from lowbit.escape import shown
from lowbit.kernels.operators import FLOATS


def check_int(name: str, value: object, low: int, high: int, multiple: int = 1) -> None:
    """Raise unless `value` is an int (not a bool) in [low, high], and a multiple of `multiple`."""
    allowed = f"{low} to {high}" + (f", multiples of {multiple}" if multiple > 1 else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {shown(value)}; allowed: an integer from {allowed}")
    if not low <= value <= high or value % multiple:
        raise ValueError(f"{name} is {value}; allowed: {allowed}")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise unless `value` is one of `allowed`."""
    # 1 equals True, but formats that are equal must have the same text.
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
        raise ValueError(f"{name} is {shown(value)}; allowed: {', '.join(map(repr, allowed))}")


def check_timeout(timeout: object) -> None:
    """Raise unless it is a number of seconds that Gloo can wait: it takes 0 ms for no limit, and centuries overflow."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is {shown(timeout)}; allowed: a number of seconds from 0.001 to 1e9")
    if not 0.001 <= timeout <= 1e9:
        raise ValueError(f"timeout is {timeout}; allowed: a number of seconds from 0.001 to 1e9")


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless it is a dtype that codecs take."""
    if dtype not in FLOATS:
        raise TypeError(f"dtype is {shown(dtype)}; allowed: {', '.join(map(str, FLOATS))}")


def check_float(name: str, x: Tensor) -> None:
    """Raise unless `x` is a tensor of a dtype that codecs take."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; allowed: a tensor")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype}; allowed: {', '.join(map(str, FLOATS))}")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{name} is a {kind} tensor; allowed: dense tensors")


def readable(name: str, x: Tensor) -> Tensor:
    """Return `x`, detached, such that its elements are in memory at its address and strides.

    A negated view, such as `z.conj().imag`, zeros of autograd's, which have no memory, and the result of a functional
    collective are copied. What is traced stays as it is.

    Raises:
        TypeError: a wrapper whose elements no operator puts into a plain tensor, such as a DTensor.
        ValueError: memory that has been freed.
    """
    x = x.detach()
    if is_traced(x):
        return x
    if is_wrapper(x) and is_wrapper(x := x.clone()):
        raise TypeError(f"{name} is {type(x).__name__}; allowed: a plain tensor, such as its to_local()")
    x = x.clone() if x._is_zerotensor() else x.resolve_neg()
    _check_memory(name, x)
    return x


def is_traced(x: Tensor) -> bool:
    """Whether operators on `x` compute shapes, or go through `torch.func` or `torch.compile`, which read its memory."""
    functorch = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta or functorch(x)


def is_wrapper(x: Tensor) -> bool:
    """Whether operators on `x` run in Python: its memory is elsewhere, so that kernels cannot use its address."""
    plain, kind = (getattr(each, "__torch_dispatch__") for each in (Tensor, type(x)))  # noqa: B009 (pyright)
    return kind is not plain


def check_written(name: str, x: Tensor) -> None:
    """Raise unless kernels can write to each element of `x` on its own."""
    if is_traced(x):
        return
    if is_wrapper(x):
        raise TypeError(f"{name} is {type(x).__name__}; allowed: a plain tensor, whose memory can be written to")
    _check_memory(name, x)
    if x.is_neg() or (not x.is_contiguous() and _overlaps(x)):
        kind = "is a negated view" if x.is_neg() else "has elements that share memory, as after expand()"
        raise ValueError(f"{name} {kind}, and is to be overwritten; allowed: a tensor with memory of its own (clone())")


def _check_memory(name: str, x: Tensor) -> None:
    if x.numel() and not x.data_ptr():
        raise ValueError(f"{name} has no memory, as parameters that FSDP has freed; allowed: a tensor with memory")


def _overlaps(x: Tensor) -> bool:
    """Whether elements may share memory: never False if they do."""
    reach = 0  # from the first to the last element of the dimensions with smaller strides
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False


def check_payload(name: str, payload: Tensor, size: int, device: torch.device) -> None:
    """Raise unless `payload` has `size` bytes on the device."""
    if not isinstance(payload, Tensor) or payload.dtype != torch.uint8:
        given = payload.dtype if isinstance(payload, Tensor) else type(payload).__name__
        raise ValueError(f"{name} is {given}; allowed: a uint8 tensor")
    if payload.dim() != 1 or payload.numel() != size:
        raise ValueError(f"{name} has shape {tuple(payload.shape)}; expected one dimension of {size} bytes")
    if payload.device != device:
        raise ValueError(f"{name} is on {payload.device}; expected {device}")


def check_out(out: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raise unless a tensor of this shape can be decoded to `out`."""
    check_float("out", out)
    check_written("out", out)
    if out.shape != shape or out.device != device:
        raise ValueError(f"out has shape {tuple(out.shape)} on {out.device}; expected {tuple(shape)} on {device}")


def draw_seed(rounding: str, device: torch.device) -> int | None:
    """Draw a seed for stochastic rounding from PyTorch's default generator; None for any other rounding.

    Raises:
        RuntimeError: a CUDA graph is being captured: all its replays would round with the same random numbers.
    """
    if rounding != "stochastic":
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rounding is 'stochastic', and a CUDA graph is being captured: its replays would all round alike; "
            "allowed there: 'nearest'"
        )
    return int(torch.randint(2**31, (), device="cpu"))
