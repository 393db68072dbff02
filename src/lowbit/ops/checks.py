"""What the operators of `lowbit.ops.contract` are given, checked before any of them computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowbit.ops.feature_int4 import feature_int4_layout
from lowbit.ops.float8 import FORMATS, block_float8_layout
from lowbit.ops.fused import ACTIVATIONS
from lowbit.ops.layout import group_int_layout, subspace_geometry, tah_geometry

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check(x: Tensor, payload: Tensor, dims: int, nbytes: int, name: str = "tensor") -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; allowed: float32, bfloat16, float16")
    if x.dim() != dims or not x.is_contiguous() or x.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {dims}-D, contiguous, not empty")
    if payload.dtype != torch.uint8 or payload.shape != (nbytes,) or not payload.is_contiguous():
        raise ValueError(f"payload is {payload.dtype} {tuple(payload.shape)}; expected {nbytes} contiguous uint8")
    if x.device != payload.device:
        raise ValueError(f"payload is on {payload.device}; the tensor is on {x.device}")


def _check_group_int(x: Tensor, payload: Tensor, bits: int, group: int, symmetric: bool) -> None:
    _check_settings(bits, group)
    _check(x, payload, 1, group_int_layout(x.numel(), bits, group, symmetric).nbytes)


def _check_block_float8(x: Tensor, payload: Tensor, format: str, block: int) -> None:
    if format not in FORMATS or block < 32 or block % 32:
        raise ValueError(
            f"format is {format!r}, block {block}; allowed: {', '.join(map(repr, FORMATS))}, and a multiple of 32"
        )
    _check(x, payload, 1, block_float8_layout(x.numel(), block).nbytes)


def _check_feature_int4(
    x: Tensor, payloads: Sequence[Tensor], scales: Tensor, order: Tensor, outliers: int,
    clipped: Tensor | None = None, divisor: int = 1,
) -> None:  # fmt: skip
    features = x.shape[-1] if x.dim() else 0
    if not 0 <= outliers < max(1, features) or divisor < 1 or not payloads:
        raise ValueError(
            f"outliers is {outliers} of {features} features, divisor {divisor}, payloads {len(payloads)}; "
            "allowed: fewer outliers than features, at least 1 and 1"
        )
    rows = x.numel() // max(1, features)
    for payload in payloads:
        _check(x, payload, 2, feature_int4_layout(rows, features, outliers).nbytes)
    shape = (features,) if scales.dim() == 1 else (len(payloads), features)
    for name, t, dtype, expected in (
        ("scale", scales, torch.float32, shape), ("order", order, torch.int32, (features,)),
        ("clipped", clipped, torch.int64, (1,)),
    ):  # fmt: skip
        if t is not None:
            _check_table(name, t, dtype, expected, x.device)


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
        raise ValueError(f"tensor has shape {tuple(x.shape)}; allowed: (sequences, length, channels)")
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


def _check_settings(bits: int, group: int) -> None:
    if not (2 <= bits <= 8 and group >= 8 and group % 8 == 0):
        raise ValueError(f"bits is {bits}, group {group}; allowed: 2 to 8, and a multiple of 8")


def _check_payload(name: str, payload: Tensor, like: Tensor, bits: int, group: int) -> None:
    """Of `like`'s elements."""
    nbytes = group_int_layout(like.numel(), bits, group, symmetric=False).nbytes
    if payload.dtype != torch.uint8 or payload.shape != (nbytes,) or not payload.is_contiguous():
        raise ValueError(f"{name} is {payload.dtype} {tuple(payload.shape)}; expected {nbytes} contiguous uint8")
    if payload.device != like.device:
        raise ValueError(f"{name} is on {payload.device}; the tensor is on {like.device}")


def _check_like(shape: Sequence[int], device: torch.device, **tensors: Tensor | None) -> None:
    """Each tensor has this shape; those that are None are not looked at."""
    for name, t in tensors.items():
        if t is None:
            continue
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {t.dtype}; allowed: float32, bfloat16, float16")
        if t.shape != torch.Size(shape) or not t.is_contiguous() or t.numel() == 0:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, contiguous: {t.is_contiguous()}; "
                f"expected {tuple(shape)}, contiguous, not empty"
            )
        if t.device != device:
            raise ValueError(f"{name} is on {t.device}; expected {device}")


def _check_norm(
    x: Tensor, payload: Tensor, eps: float, bits: int, group: int, *,
    rows: dict[str, Tensor | None], channels: dict[str, Tensor | None],
) -> None:  # fmt: skip
    _check_settings(bits, group)
    if x.dim() != 2:
        raise ValueError(f"tensor has shape {tuple(x.shape)}; allowed: (rows, channels)")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps is {eps}; allowed: finite numbers from 0 on")
    _check_like(x.shape, x.device, **rows)
    _check_like(x.shape[1:], x.device, **channels)
    _check_payload("payload", payload, x, bits, group)


def _norm_encode(x, weight, bias, payload, out, eps, centred, offset, bits, group, seed) -> None:
    _check_norm(
        x, payload, eps, bits, group,
        rows={"x": x, "out": out}, channels={"weight": weight, "bias": bias},
    )  # fmt: skip


def _norm_recompute(payload, weight, bias, out, eps, centred, offset, bits, group) -> None:
    _check_norm(
        out, payload, eps, bits, group,
        rows={"out": out}, channels={"weight": weight, "bias": bias},
    )  # fmt: skip


def _norm_backward(
    payload, weight, bias, grad_out, grad_x, grad_weight, grad_bias, out,
    eps, centred, offset, bits, group,
) -> None:  # fmt: skip
    _check_norm(
        grad_x, payload, eps, bits, group,
        rows={"grad_x": grad_x, "grad_out": grad_out, "out": out},
        channels={"weight": weight, "bias": bias, "grad_weight": grad_weight, "grad_bias": grad_bias},
    )  # fmt: skip


def _check_gated(
    x: Tensor, payload_gate: Tensor, payload_up: Tensor | None, activation: str, bits: int, group: int,
    **tensors: Tensor | None,
) -> None:  # fmt: skip
    _check_settings(bits, group)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(map(repr, ACTIVATIONS))}")
    _check_like(x.shape, x.device, **tensors)
    _check_payload("payload_gate", payload_gate, x, bits, group)
    if payload_up is not None:
        _check_payload("payload_up", payload_up, x, bits, group)


def _gated_encode(gate, up, payload_gate, payload_up, out, activation, bits, group, seed) -> None:
    _check_both(up=up, payload_up=payload_up)
    _check_gated(gate, payload_gate, payload_up, activation, bits, group, gate=gate, up=up, out=out)


def _gated_recompute(payload_gate, payload_up, out, activation, bits, group) -> None:
    _check_gated(out, payload_gate, payload_up, activation, bits, group, out=out)


def _gated_backward(payload_gate, payload_up, grad_out, grad_gate, grad_up, out, activation, bits, group) -> None:
    _check_both(payload_up=payload_up, grad_up=grad_up)
    _check_gated(
        grad_gate, payload_gate, payload_up, activation, bits, group,
        grad_gate=grad_gate, grad_up=grad_up, grad_out=grad_out, out=out,
    )  # fmt: skip


def _check_both(**tensors: Tensor | None) -> None:
    """All of them are None, or none is."""
    missing = [name for name, t in tensors.items() if t is None]
    if 0 < len(missing) < len(tensors):
        raise ValueError(f"{missing[0]} is None; allowed: all of {', '.join(tensors)}, or none")


def _check_subspace(
    name: str, x: Tensor, payload: Tensor, rows: int, channels: int, rank: int, bits: int, group: int, refresh: int,
    **tensors: tuple[Tensor, tuple[int, ...]],
) -> None:  # fmt: skip
    """`x`, which is called `name`, is of any dtype; each of `tensors` is float32 and has the shape beside it."""
    _check_settings(bits, group)
    if not 1 <= rank <= channels or refresh < 1:
        raise ValueError(
            f"rank is {rank}, channels {channels}, refresh {refresh}; allowed: 1 to channels, and from 1 on"
        )
    nbytes = subspace_geometry(rows, channels, rank, bits, group, refresh).layout.nbytes
    _check(x, payload, 2, nbytes, name)
    _check_float32(x.device, **tensors)


def _check_float32(device: torch.device, **tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    for name, (t, shape) in tensors.items():
        if t.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {t.dtype}; allowed: float32")
        if t.shape != shape or t.device != device or not t.is_contiguous() or t.numel() == 0:
            _check_like(shape, device, **{name: t})  # which says what is wrong


def _subspace_renew(
    x, directions, inverse, digest, payload, c, unit, next_directions, next_inverse, next_digest,
    number, training, brings, bits, group, refresh,
) -> None:  # fmt: skip
    (rows, channels), rank = x.shape, len(directions)
    basis, square = (rank, channels), (rank, rank)
    _check_subspace(
        "x", x, payload, rows, channels, rank, bits, group, refresh,
        directions=(directions, basis), inverse=(inverse, square), c=(c, (rows, rank)), unit=(unit, (rank,)),
        next_directions=(next_directions, basis), next_inverse=(next_inverse, square),
    )  # fmt: skip
    _check_table("digest", digest, torch.int64, (), x.device)
    _check_table("next_digest", next_digest, torch.int64, (), x.device)


def _subspace_inverse(directions, out) -> None:
    rank = len(directions)
    _check_float32(
        directions.device,
        directions=(directions, (rank, directions.shape[1])),
        out=(out, (rank, rank)),
    )


def _subspace_follow(
    payload, directions, digest, header, next_directions, next_digest, unit,
    rows, number, training, bits, group, refresh,
) -> None:  # fmt: skip
    rank, channels = directions.shape
    _check_subspace(
        "directions", directions, payload, rows, channels, rank, bits, group, refresh,
        directions=(directions, (rank, channels)), next_directions=(next_directions, (rank, channels)),
        unit=(unit, (rank,)),
    )  # fmt: skip
    _check_table("digest", digest, torch.int64, (), payload.device)
    _check_table("next_digest", next_digest, torch.int64, (), payload.device)
    _check_table("header", header, torch.int32, (4,), payload.device)


def _check_table(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if t.dtype != dtype or t.shape != shape or t.device != device or not t.is_contiguous():
        raise ValueError(
            f"{name} is {t.dtype} {tuple(t.shape)} on {t.device}, contiguous: {t.is_contiguous()}; "
            f"expected contiguous {dtype} {shape} on {device}"
        )


def _subspace_coefficients_encode(c, unit, payload, out, channels, bits, group, refresh) -> None:
    rows, rank = c.shape
    _check_subspace(
        "c", c, payload, rows, channels, rank, bits, group, refresh,
        c=(c, (rows, rank)), unit=(unit, (rank,)), out=(out, (rows, rank)),
    )  # fmt: skip


def _subspace_coefficients_decode(payload, unit, out, channels, bits, group, refresh) -> None:
    rows, rank = out.shape
    _check_subspace(
        "out", out, payload, rows, channels, rank, bits, group, refresh,
        unit=(unit, (rank,)), out=(out, (rows, rank)),
    )  # fmt: skip


def _subspace_rest_encode(x, c, directions, payload, bits, group, refresh) -> None:
    (rows, channels), rank = x.shape, len(directions)
    _check_subspace(
        "x", x, payload, rows, channels, rank, bits, group, refresh,
        c=(c, (rows, rank)), directions=(directions, (rank, channels)),
    )  # fmt: skip


def _subspace_rest_decode(payload, c, directions, out, bits, group, refresh, accumulate) -> None:
    (rows, channels), rank = out.shape, len(directions)
    _check_subspace(
        "out", out, payload, rows, channels, rank, bits, group, refresh,
        c=(c, (rows, rank)), directions=(directions, (rank, channels)),
    )  # fmt: skip


CHECKS: dict[str, Callable[..., None]] = {
    "group_int_encode": lambda x, payload, *a: _check_group_int(x, payload, *a[:3]),
    "group_int_decode": lambda payload, out, *a: _check_group_int(out, payload, *a[:3]),
    "block_float8_encode": lambda x, payload, *a: _check_block_float8(x, payload, *a[:2]),
    "block_float8_decode": lambda payload, out, *a: _check_block_float8(out, payload, *a[:2]),
    "feature_int4_encode": lambda x, payload, *a: _check_feature_int4(x, [payload], *a),
    "feature_int4_decode": lambda payload, out, *a: _check_feature_int4(out, [payload], *a[:3]),
    "feature_int4_sum": lambda payloads, out, *a: _check_feature_int4(out, payloads, *a[:3], divisor=a[3]),
    "tah_quant_encode": lambda x, payload, *a: _check_tah(x, payload, *a[:5], pivot=a[5] is not None),
    "tah_quant_decode": lambda payload, out, *a: _check_tah(out, payload, *a[:6]),
    "subspace_renew": _subspace_renew,
    "subspace_inverse": _subspace_inverse,
    "subspace_follow": _subspace_follow,
    "subspace_coefficients_encode": _subspace_coefficients_encode,
    "subspace_coefficients_decode": _subspace_coefficients_decode,
    "subspace_rest_encode": _subspace_rest_encode,
    "subspace_rest_decode": _subspace_rest_decode,
    "norm_encode": _norm_encode,
    "norm_recompute": _norm_recompute,
    "norm_backward": _norm_backward,
    "gated_encode": _gated_encode,
    "gated_recompute": _gated_recompute,
    "gated_backward": _gated_backward,
}
