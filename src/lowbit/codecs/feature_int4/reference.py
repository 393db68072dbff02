"""The definition of `FeatureInt4`'s operators in plain PyTorch, by the rules of `lowbit.kernels.exact`.

`inverse`, `scale` float32 (E,) and `scales` (R, E) hold 0 at the outliers; `order` int32 (E,): the other features,
then the outliers, both ascending. Shape suffixes: N rows of E features, K of which travel as bfloat16 (the outliers); R
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.kernels import operator
from lowbit.kernels.checks import check_bytes, check_numbers, check_table
from lowbit.kernels.exact import store
from lowbit.kernels.layout import Layout, ceil_div, zero_gaps

LIMIT = 7  # codes from -7 to 7
NAN_CODE = -8
BEYOND = 7.5  # from here on a number would have rounded to more than the limit
LARGEST_BF16 = 2.0**127 * (2 - 2.0**-7)
NAN_BF16 = 0x7FC0


def feature_int4_layout(rows: int, features: int, outliers: int) -> Layout:
    """Payload of `encode` (see `lowbit.codecs.FeatureInt4`)."""
    return Layout.of(features=2 * rows * outliers, codes=rows * ceil_div(features - outliers, 2))


def _check(
    x: Tensor, payloads: Sequence[Tensor], scales: Tensor, order: Tensor, outliers: int,
    clipped: Tensor | None = None, divisor: int = 1,
) -> None:  # fmt: skip
    features = x.shape[-1] if x.dim() else 0
    if not 0 <= outliers < max(1, features) or divisor < 1 or not payloads:
        raise ValueError(
            f"outliers is {outliers} of {features} features, divisor {divisor}, payloads {len(payloads)}; "
            "allowed: fewer outliers than features, at least 1 and 1"
        )
    check_numbers(x, 2)
    nbytes = feature_int4_layout(len(x), features, outliers).nbytes
    for payload in payloads:
        check_bytes("payload", payload, nbytes, x.device)
    shape = (features,) if scales.dim() == 1 else (len(payloads), features)
    check_table("scale", scales, torch.float32, shape, x.device)
    check_table("order", order, torch.int32, (features,), x.device)
    if clipped is not None:
        check_table("clipped", clipped, torch.int64, (1,), x.device)


@operator(writes=("payload", "clipped"), check=lambda x, payload, *rest: _check(x, [payload], *rest))
def encode(x: Tensor, payload: Tensor, inverse: Tensor, order: Tensor, outliers: int, clipped: Tensor | None) -> None:
    """x (N, E) -> payload; adds to `clipped`, int64 (1,), how many values were NaN, Inf or beyond the codes.

    See `lowbit.codecs.FeatureInt4` for formulas and layout.
    """
    rows, features = x.shape
    layout = feature_int4_layout(rows, features, outliers)
    rest, chosen = order.long().tensor_split([features - outliers])
    x_NE = x.float()
    v_NE = x_NE * inverse
    if clipped is not None:
        clipped.add_((~(v_NE.abs() < BEYOND)).sum())
    v_NE = v_NE.round().clamp(-LIMIT, LIMIT)
    codes = torch.where(x_NE.isfinite(), v_NE, NAN_CODE).to(torch.int8)[:, rest].view(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)) & 15
    low, high = codes.chunk(2, 1) if codes.shape[1] else (codes, codes)
    zero_gaps(payload, layout)
    layout.section(payload, "codes").copy_((low | (high << 4)).view(-1))
    x_NK = x_NE[:, chosen]
    x_NK = torch.where(x_NK.isfinite(), x_NK.clamp(-LARGEST_BF16, LARGEST_BF16), x_NK)
    # By bits: which NaN a conversion to bfloat16 gives differs between machines.
    bits_NK = torch.where(x_NK.isnan(), NAN_BF16, x_NK.bfloat16().view(torch.int16))
    layout.section(payload, "features", torch.int16).copy_(bits_NK.view(-1))


@operator(writes="out", check=lambda payload, out, *rest: _check(out, [payload], *rest[:3]))
def decode(payload: Tensor, out: Tensor, scale: Tensor, order: Tensor, outliers: int, accumulate: bool) -> None:
    """Payload -> out (N, E), or added to it."""
    store(_decoded(payload, out.shape, scale, order, outliers), out, accumulate)


@operator(writes="out", check=lambda payloads, out, *rest: _check(out, payloads, *rest[:3], divisor=rest[3]))
def sum(payloads: Sequence[Tensor], out: Tensor, scales: Tensor, order: Tensor, outliers: int, divisor: int) -> None:
    """The sum of what R payloads decode to, in float32 and in their order, then divided and rounded once, to out."""
    total = _decoded(payloads[0], out.shape, scales[0], order, outliers)
    for payload, scale in zip(payloads[1:], scales[1:], strict=True):
        total = total + _decoded(payload, out.shape, scale, order, outliers)
    # By a tensor: CUDA multiplies by the rounded inverse of a number.
    store(total / total.new_full((), divisor) if divisor > 1 else total, out, False)


def _decoded(payload: Tensor, shape: torch.Size, scale: Tensor, order: Tensor, outliers: int) -> Tensor:
    """float32 (N, E)."""
    rows, features = shape
    layout = feature_int4_layout(rows, features, outliers)
    rest, chosen = order.long().tensor_split([features - outliers])
    packed = layout.section(payload, "codes").view(rows, -1)
    codes = torch.cat([packed & 15, packed >> 4], 1)[:, : len(rest)]
    code_NM = (codes.to(torch.int8) ^ 8) - 8
    y_NM = torch.where(code_NM == NAN_CODE, math.nan, code_NM.float() * scale[rest])
    y_NE = torch.empty(shape, device=payload.device)
    y_NE[:, rest] = y_NM
    y_NE[:, chosen] = layout.section(payload, "features", torch.bfloat16).view(rows, -1).float()
    return y_NE
