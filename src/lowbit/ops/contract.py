"""Every operator once: schema, argument checks, fake implementation, and which backend computes it.

Operators fill or read a payload that the caller allocated, so they allocate no output and work on posted buffers:

- `group_int_encode(x, payload, bits, group, symmetric, seed)`: x (N,) -> payload; a seed rounds stochastically.
- `group_int_decode(payload, out, bits, group, symmetric, accumulate)`: payload -> out (N,).
- `block_float8_encode(x, payload, format, block, seed, accumulate)`: x (N,) -> payload, or added to what it holds.
- `block_float8_decode(payload, out, format, block, accumulate)`: payload -> out (N,).
- `feature_int4_encode(x, payload, inverse, order, outliers, clipped)`: x (N, E) -> payload; adds to `clipped`, if any.
- `feature_int4_decode(payload, out, scale, order, outliers, accumulate)`: payload -> out (N, E).
- `feature_int4_sum(payloads, out, scales, order, outliers, divisor)`: R payloads -> their sum, divided, in out (N, E).
- `tah_quant_encode(x, payload, tile, high_bits, low_bits, low_fraction, allocation, pivot_ratio)`: x (B, S, C).
- `tah_quant_decode(payload, out, ..., pivot, accumulate)`: payload -> out (B, S, C).

`inverse`, `scale` float32 (E,) and `scales` (R, E) hold 0 at the outliers; `order` int32 (E,): the other features,
then the outliers, both ascending; `clipped` int64 (1,): how many values were NaN, Inf or beyond the codes.

Operators for tokens near to a subspace, `lowbit.codecs.SubspaceQuant`; each fills or reads sections of the payload:

- `subspace_renew(x, directions, inverse, digest, payload, c, unit, next_directions, next_inverse, next_digest, number,
  training, brings, bits, group, refresh)`: what a sender whose basis is `directions` (K, C) finds in x (R, C) -> the
  payload up to its units; the next basis; and, with that, coefficients c (R, K) and their units (K,).
- `subspace_inverse(directions, out)`: of the directions' products with each other, (K, K).
- `subspace_follow(payload, directions, digest, header, next_directions, next_digest, unit, rows, number, training,
  bits, group, refresh)`: payload -> the next basis and the units; and the header (4,) that this end's next message has.
- `subspace_coefficients_encode(c, unit, payload, out, channels, bits, group, refresh)`: c (R, K) float32, in units (K,)
  -> payload; and what it decodes to in out (R, K) float32, which may be c itself.
- `subspace_coefficients_decode(payload, unit, out, channels, bits, group, refresh)`: payload -> out (R, K) float32.
- `subspace_rest_encode(x, c, directions, payload, bits, group, refresh)`: x (R, C) - c directions -> payload.
- `subspace_rest_decode(payload, c, directions, out, bits, group, refresh, accumulate)`: c directions + payload -> out.

Operators for backward from quantized inputs (formulas: `lowbit.ops.fused`). Payloads are those of `group_int_encode`,
asymmetric, of a tensor's elements in order; x' stands for what such a payload decodes to, in float32:

- `norm_encode(x, weight, bias, payload, out, eps, centred, offset, bits, group, seed)`: x (N, C) -> payload, norm(x).
- `norm_recompute(payload, weight, bias, out, eps, ..., bits, group)`: out = norm(x').
- `norm_backward(payload, weight, bias, grad_out, grad_x, grad_weight, grad_bias, out, eps, ..., bits, group)`:
  gradients of norm at x'; and, unless `out` is None, out = norm(x') as well, for the layers that read it.
- `gated_encode(gate, up, payload_gate, payload_up, out, activation, bits, group, seed)`: -> payloads, act(gate) * up.
- `gated_recompute(payload_gate, payload_up, out, activation, bits, group)`: out = act(gate') * up'.
- `gated_backward(payload_gate, payload_up, grad_out, grad_gate, grad_up, out, activation, bits, group)`: gradients at
  gate' and up'; and, unless `out` is None, out = act(gate') * up' as well.

`centred`: LayerNorm; `offset` is added to weights. `weight`, `bias` (C,) and their gradients may be None; so may `up`,
with its payload and gradient: act(gate). Tensors of one call may differ in dtype, not in shape.

All that belongs to a basis is float32 but for digests, int64 (), and headers, int32.

Tensors: float32, bfloat16 or float16, contiguous, not empty. `payload`: uint8, one dimension, contiguous, as long
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

from lowbit.ops import reference
from lowbit.ops.checks import CHECKS
from lowbit.ops.layout import ALIGNMENT

log = logging.getLogger(__name__)

SCHEMAS = {
    "group_int_encode": "(Tensor x, Tensor(a!) payload, int bits, int group, bool symmetric, int? seed) -> ()",
    "group_int_decode": "(Tensor payload, Tensor(a!) out, int bits, int group, bool symmetric, bool accumulate) -> ()",
    "block_float8_encode": "(Tensor x, Tensor(a!) payload, str format, int block, int? seed, bool accumulate) -> ()",
    "block_float8_decode": "(Tensor payload, Tensor(a!) out, str format, int block, bool accumulate) -> ()",
    "feature_int4_encode": "(Tensor x, Tensor(a!) payload, Tensor inverse, Tensor order, int outliers, "
    "Tensor(b!)? clipped) -> ()",
    "feature_int4_decode": "(Tensor payload, Tensor(a!) out, Tensor scale, Tensor order, int outliers, "
    "bool accumulate) -> ()",
    "feature_int4_sum": "(Tensor[] payloads, Tensor(a!) out, Tensor scales, Tensor order, int outliers, "
    "int divisor) -> ()",
    "tah_quant_encode": "(Tensor x, Tensor(a!) payload, int tile, int high_bits, int low_bits, "
    "float low_fraction, str allocation, float? pivot_ratio) -> ()",
    "tah_quant_decode": "(Tensor payload, Tensor(a!) out, int tile, int high_bits, int low_bits, "
    "float low_fraction, str allocation, bool pivot, bool accumulate) -> ()",
    "subspace_renew": "(Tensor x, Tensor directions, Tensor inverse, Tensor digest, Tensor(a!) payload, "
    "Tensor(b!) c, Tensor(c!) unit, Tensor(d!) next_directions, Tensor(e!) next_inverse, Tensor(f!) next_digest, "
    "int number, bool training, bool brings, int bits, int group, int refresh) -> ()",
    "subspace_inverse": "(Tensor directions, Tensor(a!) out) -> ()",
    "subspace_follow": "(Tensor payload, Tensor directions, Tensor digest, Tensor(a!) header, "
    "Tensor(b!) next_directions, Tensor(c!) next_digest, Tensor(d!) unit, int rows, int number, bool training, "
    "int bits, int group, int refresh) -> ()",
    "subspace_coefficients_encode": "(Tensor c, Tensor unit, Tensor(a!) payload, Tensor(b!) out, "
    "int channels, int bits, int group, int refresh) -> ()",
    "subspace_coefficients_decode": "(Tensor payload, Tensor unit, Tensor(a!) out, "
    "int channels, int bits, int group, int refresh) -> ()",
    "subspace_rest_encode": "(Tensor x, Tensor c, Tensor directions, Tensor(a!) payload, "
    "int bits, int group, int refresh) -> ()",
    "subspace_rest_decode": "(Tensor payload, Tensor c, Tensor directions, Tensor(a!) out, "
    "int bits, int group, int refresh, bool accumulate) -> ()",
    "norm_encode": "(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!) payload, Tensor(b!) out, "
    "float eps, bool centred, float offset, int bits, int group, int? seed) -> ()",
    "norm_recompute": "(Tensor payload, Tensor? weight, Tensor? bias, Tensor(a!) out, "
    "float eps, bool centred, float offset, int bits, int group) -> ()",
    "norm_backward": "(Tensor payload, Tensor? weight, Tensor? bias, Tensor grad_out, "
    "Tensor(a!) grad_x, Tensor(b!)? grad_weight, Tensor(c!)? grad_bias, Tensor(d!)? out, "
    "float eps, bool centred, float offset, int bits, int group) -> ()",
    "gated_encode": "(Tensor gate, Tensor? up, Tensor(a!) payload_gate, Tensor(b!)? payload_up, "
    "Tensor(c!) out, str activation, int bits, int group, int? seed) -> ()",
    "gated_recompute": "(Tensor payload_gate, Tensor? payload_up, Tensor(a!) out, "
    "str activation, int bits, int group) -> ()",
    "gated_backward": "(Tensor payload_gate, Tensor? payload_up, Tensor grad_out, "
    "Tensor(a!) grad_gate, Tensor(b!)? grad_up, Tensor(c!)? out, "
    "str activation, int bits, int group) -> ()",
}
BACKENDS = ("auto", "reference", "cpu", "gpu")
NEEDS = {"cpu": "numba", "gpu": "Triton"}
HOMES = {"cpu": "cpu", "cuda": "gpu"}  # whose kernels a device has; others: nobody's

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


@contextlib.contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Apart from the model's computation: no graph, and no autocast, which would round inside the codec."""
    with torch.no_grad():
        if not torch.is_autocast_enabled(device.type):
            yield
            return
        with torch.autocast(device.type, enabled=False):
            yield


def implementation(name: str, device: torch.device) -> Callable[..., None]:
    """What computes an operator on a device, for callers that make all of its tensors themselves.

    It checks nothing, is for use `apart`, wants payloads that begin at a multiple of 16 bytes, and must be kept from
    `torch.compile` (`torch.compiler.disable`), which would free tensors whose addresses are in use. The dispatcher and
    the checks take tens of microseconds, which is as long as the work on a small message takes.
    """
    chosen, home = _chosen.get(), HOMES.get(device.type)
    if chosen == "reference":
        return getattr(reference, name)
    if chosen not in ("auto", home):
        kernels = _load("gpu") if (chosen, home) == ("gpu", "cpu") else None
        if getattr(kernels, "interpreted", False) and hasattr(kernels, name):
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
            if not hasattr(kernels, name):
                why = f"backend {home!r} has no kernel for {name}"
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


def _on(name: str) -> Callable[..., None]:
    def run(*args: Any) -> None:
        CHECKS[name](*args)
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        function = implementation(name, first.device)
        # Sections are read as words and vectors, but a part of a larger buffer may start anywhere.
        aligned = {i: _aligned(args[i]) for i, _ in payloads if not _is_aligned(args[i])}
        with apart(first.device):
            function(*(aligned.get(i, argument) for i, argument in enumerate(args)))
        for i, written in payloads:
            if written and i in aligned:
                args[i].copy_(aligned[i])

    parameters = SCHEMAS[name].split(",")
    payloads = [(i, "!" in p) for i, p in enumerate(parameters) if "payload" in p]
    return run


def _is_aligned(payload: Any) -> bool:
    """Of a payload, a list of them, or None."""
    if isinstance(payload, list | tuple):
        return all(map(_is_aligned, payload))
    return payload is None or payload.data_ptr() % ALIGNMENT == 0


def _aligned(payload: Any) -> Any:
    """A copy that begins where kernels want it."""
    return [p.clone() for p in payload] if isinstance(payload, list | tuple) else payload.clone()


def _register() -> torch.library.Library:
    library = torch.library.Library("lowbit", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        for key in ("CPU", "CUDA", "CompositeExplicitAutograd"):
            library.impl(name, _on(name), key)
        torch.library.register_fake(f"lowbit::{name}", CHECKS[name], lib=library)
    return library


_library = _register()
