"""The definition of `FeatureInt`'s operators in plain PyTorch, by the rules of `lowbit.kernels.exact`.

`inverse` and `offset` are float32 (E,), `scales` is (R, E); all hold 0 at the outliers. `order` int32 (E,):
the other features, then the outliers, both ascending. Shape suffixes: N rows of E features, K of which travel as
bfloat16 (the outliers), and M as codes; R ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.kernels import exact, operator
from lowbit.kernels.exact import store
from lowbit.kernels.layout import Layout, pack, planes_nbytes, unpack, zero_gaps
from lowbit.kernels.operators import check_bytes, check_numbers, check_table

FEWEST, MOST = 3, 8  # bits of a code
LARGEST_BF16 = 2.0**127 * (2 - 2.0**-7)
NAN_BF16 = 0x7FC0


def feature_int_layout(rows: int, features: int, outliers: int, bits: int, by_token: bool) -> Layout:
    """Payload of `encode` (see `lowbit.codecs.FeatureInt`)."""
    codes = rows * planes_nbytes(features - outliers, bits)
    return Layout.of(gains=2 * rows * by_token, features=2 * rows * outliers, codes=codes)


def center_of(bits: int, by_token: bool) -> float:
    """Middle of the codes: between two of them or, with static ranges, the code that means 0."""
    return 2.0 ** (bits - 1) - (0.5 if by_token else 1.0)


def _check(
    x: Tensor, payloads: Sequence[Tensor], scales: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    by_token: bool, divisor: int = 1,
) -> None:  # fmt: skip
    features = x.shape[-1] if x.dim() else 0
    if not 0 <= outliers < max(1, features) or not FEWEST <= bits <= MOST or divisor < 1 or not payloads:
        raise ValueError(
            f"outliers is {outliers} of {features} features, bits {bits}, divisor {divisor}, payloads {len(payloads)}; "
            f"allowed: fewer outliers than features, {FEWEST} to {MOST}, at least 1 and 1"
        )
    check_numbers(x, 2)
    nbytes = feature_int_layout(len(x), features, outliers, bits, by_token).nbytes
    for payload in payloads:
        check_bytes("payload", payload, nbytes, x.device)
    check_table("scales", scales, torch.float32, (len(payloads), features), x.device)
    check_table("offset", offset, torch.float32, (features,), x.device)
    check_table("order", order, torch.int32, (features,), x.device)


@operator(
    writes="payload",
    check=lambda x, payload, inverse, *rest: _check(x, [payload], inverse[None], *rest[:4], by_token=rest[5]),
)
def encode(
    x: Tensor, payload: Tensor, inverse: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    share: float, by_token: bool,
) -> None:  # fmt: skip
    """x (N, E) -> payload.

    See `lowbit.codecs.FeatureInt` for formulas and layout. `share`: ratio of a row's gain to its largest magnitude, or
    the gain of all rows, which is not sent.
    """
    rows, features = x.shape
    layout, center = feature_int_layout(rows, features, outliers, bits, by_token), center_of(bits, by_token)
    zero_gaps(payload, layout)
    rest, chosen = order.long().tensor_split([features - outliers])
    x_NE = x.float()
    v_NM = ((x_NE - offset) * inverse)[:, rest]
    finite_N = v_NM.isfinite().all(1)
    if by_token:
        most_N = v_NM.abs().amax(1)  # NaN where a row holds one
        gain_N = torch.where(most_N > 0, (most_N * share).clamp(min=exact.SMALLEST), 0.0).bfloat16()
        bits_N = torch.where(finite_N, gain_N.view(torch.int16), NAN_BF16)
        layout.section(payload, "gains", torch.int16).copy_(bits_N)
        gain_N = torch.where(finite_N, gain_N.float(), 0.0)
    else:
        gain_N = torch.full_like(v_NM[:, 0], share)
    v_NM = v_NM * exact.inverse(gain_N)[:, None] + center
    codes_NM = torch.where(v_NM > 0, v_NM, 0.0).clamp(max=2 * center).round().to(torch.uint8)
    if not by_token:
        codes_NM[~finite_N] = 2**bits - 1
    layout.section(payload, "codes").copy_(pack(codes_NM, bits).view(-1))
    x_NK = x_NE[:, chosen]
    x_NK = torch.where(x_NK.isfinite(), x_NK.clamp(-LARGEST_BF16, LARGEST_BF16), x_NK)
    # Written as bits: the NaN of a conversion to bfloat16 differs between machines.
    bits_NK = torch.where(x_NK.isnan(), NAN_BF16, x_NK.bfloat16().view(torch.int16))
    layout.section(payload, "features", torch.int16).copy_(bits_NK.view(-1))


@operator(
    writes="out",
    check=lambda payloads, out, *rest: _check(out, payloads, *rest[:5], by_token=not rest[5], divisor=rest[6]),
)
def decode(
    payloads: Sequence[Tensor], out: Tensor, scales: Tensor, offset: Tensor, order: Tensor, outliers: int, bits: int,
    gain: float, divisor: int, accumulate: bool,
) -> None:  # fmt: skip
    """Sum R decoded payloads in float32 in order, add the offsets of all, divide; write to out (N, E) or add to it.

    `gain`: of all rows; 0: each row's own, in the payload.
    """
    total = _decoded(payloads[0], out.shape, scales[0], order, outliers, bits, gain)
    for payload, scale in zip(payloads[1:], scales[1:], strict=True):
        total = total + _decoded(payload, out.shape, scale, order, outliers, bits, gain)
    total = total + offset
    # Divide by a tensor: for a number, CUDA multiplies by its rounded inverse.
    store(total / total.new_full((), divisor) if divisor > 1 else total, out, accumulate)


def _decoded(
    payload: Tensor, shape: torch.Size, scale: Tensor, order: Tensor, outliers: int, bits: int, gain: float
) -> Tensor:
    """Decode to float32 (N, E), without offsets."""
    rows, features = shape
    layout = feature_int_layout(rows, features, outliers, bits, not gain)
    rest, chosen = order.long().tensor_split([features - outliers])
    codes_NM = unpack(layout.section(payload, "codes").view(rows, -1), bits, len(rest))
    if gain:
        gain_N = torch.where(codes_NM[:, 0] == 2**bits - 1, torch.nan, torch.full_like(scale[:1], gain))
    else:
        gain_N = layout.section(payload, "gains", torch.bfloat16).float()
    y_NM = (codes_NM.float() - center_of(bits, not gain)) * gain_N[:, None] * scale[rest]
    y_NE = torch.empty(shape, dtype=torch.float32, device=payload.device)
    y_NE[:, rest] = y_NM
    y_NE[:, chosen] = layout.section(payload, "features", torch.bfloat16).view(rows, -1).float()
    return y_NE
