"""Every operator once: schema, argument checks, fake implementation, and which backend computes it.

Operators fill or read a payload that the caller allocated, so they allocate no output and work on posted buffers:

- `group_int_encode(x, payload, bits, group, symmetric, seed)`: x (N,) -> payload; a seed rounds stochastically.
- `group_int_decode(payload, out, bits, group, symmetric, accumulate)`: payload -> out (N,).
- `block_float8_encode(x, payload, format, block, seed, accumulate)`: x (N,) -> payload, or added to what it holds.
- `block_float8_decode(payload, out, format, block, accumulate)`: payload -> out (N,).
- `tah_quant_encode(x, payload, tile, high_bits, low_bits, low_fraction, allocation, pivot_ratio)`: x (B, S, C).
- `tah_quant_decode(payload, out, ..., pivot, accumulate)`: payload -> out (B, S, C).

`x` and `out`: float32, bfloat16 or float16, contiguous, not empty. `payload`: uint8, one dimension, contiguous, as long
as `lowbit.ops.layout` says; one that does not begin at a multiple of 16 bytes is copied. PyTorch's dispatcher picks the
implementation by device; `backend("reference")` forces the plain PyTorch one, and `backend("cpu")` or `backend("gpu")`
makes the kernels' absence an error instead of a line in the log.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit.ops import reference
from lowbit.ops.float8 import FORMATS, block_float8_layout
from lowbit.ops.layout import ALIGNMENT, group_int_layout, tah_geometry

log = logging.getLogger(__name__)

SCHEMAS = {
    "group_int_encode": "(Tensor x, Tensor(a!) payload, int bits, int group, bool symmetric, "
    "int? seed) -> ()",
    "group_int_decode": "(Tensor payload, Tensor(a!) out, int bits, int group, bool symmetric, "
    "bool accumulate) -> ()",
    "block_float8_encode": "(Tensor x, Tensor(a!) payload, str format, int block, int? seed, "
    "bool accumulate) -> ()",
    "block_float8_decode": "(Tensor payload, Tensor(a!) out, str format, int block, "
    "bool accumulate) -> ()",
    "tah_quant_encode": "(Tensor x, Tensor(a!) payload, int tile, int high_bits, int low_bits, "
    "float low_fraction, str allocation, float? pivot_ratio) -> ()",
    "tah_quant_decode": "(Tensor payload, Tensor(a!) out, int tile, int high_bits, int low_bits, "
    "float low_fraction, str allocation, bool pivot, bool accumulate) -> ()",
}
BACKENDS = ("auto", "reference", "cpu", "gpu")
NEEDS = {"cpu": "numba", "gpu": "Triton"}

_chosen: contextvars.ContextVar[str] = contextvars.ContextVar("lowbit_backend", default="auto")
_kernels: dict[str, Any] = {}  # modules of kernels by backend, or why one is missing
_told: set[str] = set()


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute operators with one backend inside a `with` block (this thread or task only).

    Args:
        name: "auto" (the fastest there is, a missing one logged once), "reference" (plain PyTorch), "cpu" (numba) or
            "gpu" (Triton). The last two are an error where they are missing or the tensor is elsewhere; Triton's
            interpreter (TRITON_INTERPRET=1 in the environment) takes CPU tensors as well.

    Raises:
        ValueError: another name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def _implementation(name: str, home: str | None, device: torch.device) -> Callable[..., None]:
    """What computes an operator on a device, whose kernels are the backend `home`'s (None: nobody's)."""
    chosen = _chosen.get()
    if chosen == "reference":
        return getattr(reference, name)
    if chosen not in ("auto", home):
        kernels = _load("gpu") if (chosen, home) == ("gpu", "cpu") else None
        if getattr(kernels, "interpreted", False):
            return getattr(kernels, name)
        kind = {"cpu": "the CPU", "gpu": "a GPU"}[chosen]
        raise RuntimeError(f"backend {chosen!r} needs tensors on {kind}; found {device}")
    why = "there are no kernels for them"
    if home:
        kernels = _load(home)
        if isinstance(kernels, ImportError):
            why = f"backend {home!r} needs {NEEDS[home]}, which cannot be imported: {kernels}"
        else:
            why = kernels.unsupported(device) if home == "gpu" else ""
        if not why:
            return getattr(kernels, name)
        if chosen == home:
            raise RuntimeError(why)
    if device.type not in _told:
        _told.add(device.type)
        log.warning("%s tensors take the slow reference path: %s", device.type, why)
    return getattr(reference, name)


def _load(name: str) -> Any:
    """A backend's kernels, or why they cannot be imported."""
    if name not in _kernels:
        try:
            _kernels[name] = importlib.import_module(f"lowbit.ops.{name}")
        except ImportError as error:
            _kernels[name] = error
    return _kernels[name]


def _on(name: str, home: str | None) -> Callable[..., None]:
    def run(*args: Any) -> None:
        CHECKS[name](*args)
        function, payload = _implementation(name, home, args[0].device), args[place]
        if payload.data_ptr() % ALIGNMENT == 0:
            function(*args)
            return
        # Sections are read as words and vectors, but a part of a larger buffer may start anywhere.
        aligned = payload.clone()
        function(*args[:place], aligned, *args[place + 1 :])
        if place:
            payload.copy_(aligned)

    place = 0 if name.endswith("decode") else 1
    return run


def _check(x: Tensor, payload: Tensor, dims: int, nbytes: int) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"tensor has dtype {x.dtype}; allowed: float32, bfloat16, float16")
    if x.dim() != dims or not x.is_contiguous() or x.numel() == 0:
        raise ValueError(
            f"tensor has shape {tuple(x.shape)}; allowed: {dims}-D, contiguous, not empty"
        )
    if payload.dtype != torch.uint8 or payload.shape != (nbytes,) or not payload.is_contiguous():
        raise ValueError(
            f"payload is {payload.dtype} {tuple(payload.shape)}; expected {nbytes} contiguous uint8"
        )
    if x.device != payload.device:
        raise ValueError(f"payload is on {payload.device}; the tensor is on {x.device}")


def _check_group_int(x: Tensor, payload: Tensor, bits: int, group: int, symmetric: bool) -> None:
    if not (2 <= bits <= 8 and group >= 8 and group % 8 == 0):
        raise ValueError(f"bits is {bits}, group {group}; allowed: 2 to 8, and a multiple of 8")
    _check(x, payload, 1, group_int_layout(x.numel(), bits, group, symmetric).nbytes)


def _check_block_float8(x: Tensor, payload: Tensor, format: str, block: int) -> None:
    if format not in FORMATS or block < 32 or block % 32:
        raise ValueError(
            f"format is {format!r}, block {block}; "
            f"allowed: {', '.join(map(repr, FORMATS))}, and a multiple of 32"
        )
    _check(x, payload, 1, block_float8_layout(x.numel(), block).nbytes)


def _check_tah(
    x: Tensor,
    payload: Tensor,
    tile: int,
    high_bits: int,
    low_bits: int,
    low_fraction: float,
    allocation: str,
    pivot: bool,
) -> None:
    if tile not in (8, 16, 32, 64, 128):
        raise ValueError(f"tile is {tile}; allowed: 8, 16, 32, 64, 128")
    if not 2 <= low_bits <= high_bits <= 8:
        raise ValueError(f"low_bits is {low_bits}, high_bits {high_bits}; allowed: 2 to 8 in order")
    if allocation not in ("token", "tile", "range") or not 0 <= low_fraction <= 1:
        raise ValueError(f"allocation is {allocation!r}, low_fraction {low_fraction}")
    if x.dim() != 3:
        raise ValueError(
            f"tensor has shape {tuple(x.shape)}; allowed: (sequences, length, channels)"
        )
    geo = tah_geometry(
        *x.shape,
        tile=tile,
        high_bits=high_bits,
        low_bits=low_bits,
        low_fraction=low_fraction,
        allocation=allocation,
        pivot=pivot,
    )
    _check(x, payload, 3, geo.layout.nbytes)


CHECKS: dict[str, Callable[..., None]] = {
    "group_int_encode": lambda x, payload, *a: _check_group_int(x, payload, *a[:3]),
    "group_int_decode": lambda payload, out, *a: _check_group_int(out, payload, *a[:3]),
    "block_float8_encode": lambda x, payload, *a: _check_block_float8(x, payload, *a[:2]),
    "block_float8_decode": lambda payload, out, *a: _check_block_float8(out, payload, *a[:2]),
    "tah_quant_encode": lambda x, payload, *a: _check_tah(
        x, payload, *a[:5], pivot=a[5] is not None
    ),
    "tah_quant_decode": lambda payload, out, *a: _check_tah(out, payload, *a[:6]),
}


def _register() -> torch.library.Library:
    library = torch.library.Library("lowbit", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _on(name, "cpu"), "CPU")
        library.impl(name, _on(name, "gpu"), "CUDA")
        library.impl(name, _on(name, None), "CompositeExplicitAutograd")
        torch.library.register_fake(f"lowbit::{name}", CHECKS[name], lib=library)
    return library


_library = _register()
