"""The layout of `TAHQuant` payloads, and the definition of its operators by the rules of `lowbit.kernels.exact`.

Shape suffixes: R rows (tokens), T tiles of E elements, C channels; K bytes of a tile's codes.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.escape import shown
from lowbit.kernels import operator
from lowbit.kernels.exact import (
    LARGEST,
    SMALLEST,
    entropy,
    inverse,
    octave_rounding,
    octave_steps,
    rotate,
    smallest,
    store,
)  # fmt: skip
from lowbit.kernels.layout import Layout, ceil_div, pack, pack_flags, unpack, unpack_flags, zero_gaps
from lowbit.kernels.operators import check_bytes, check_numbers

SCOPE_TILES = 256  # tiles among which "range" chooses: a GPU's program holds them in registers
ROTATABLE = 2.0**120  # larger pivots stay where they are: their rotation could overflow
NAN_MID = {1: -128, 2: -32768}
MID_DTYPE = {1: torch.int8, 2: torch.int16}
MID_LIMIT = {1: 127, 2: 32767}
MID_UNITS = {1: 64, 2: 256}  # units of a mid in one range (2^bits steps)
MID_SHARE = {1: 0.2703, 2: 0.0042017}  # least half range for a |mid| of 1: 1 / limit, and a scale's rounding
LAST_APART = 128  # larger bytes of pivots, 129 + position, have a middle: all positions but the last of 128
APART_SHARE = 2.0**-50  # least half range for a pivot of 1 that is sent apart, whose ratio to a step is at most 2^60
APART_SHIFT, APART_ZERO = 14, 4 << 9  # that ratio in 1/512 of an octave (float32 bits >> 14), and what stands for 1
APART_MOST = 0x7F7FFFFF >> APART_SHIFT


@dataclass(frozen=True)
class TAHGeometry:
    """Sizes of a TAH-Quant payload, derived from the shape and the settings.

    Attributes:
        rows: tokens in the message; channels: elements of a token; tiles: tiles of a token.
        tile, high_bits, low_bits, allocation: as in `lowbit.codecs.TAHQuant`; float16: whether a tile has a scale and a
            zero, as in the paper; pivot: whether tiles may be rotated.
        full: tiles of a token that hold `tile` elements (all, or all but a ragged last one).
        scope_rows: consecutive tokens among which `low_bits` are allocated; scopes: number of such scopes.
        per_scope: candidates of a scope; low: number of them that get `low_bits`.
        per_last, low_last: the same for the last scope, which may have fewer tokens.
        flag_bytes: bytes of a scope's bitmap of candidates.
        row_bytes: bytes of the codes of one token, were all its tiles at `high_bits`.
        saved: bytes that one candidate of `low_bits` saves.
        layout: the sections.
    """

    rows: int
    channels: int
    tile: int
    high_bits: int
    low_bits: int
    allocation: str
    float16: bool
    pivot: bool
    tiles: int
    full: int
    scope_rows: int
    scopes: int
    per_scope: int
    low: int
    per_last: int
    low_last: int
    flag_bytes: int
    row_bytes: int
    saved: int
    layout: Layout

    @property
    def mid_bytes(self) -> int:
        """Bytes of a tile's middle, or of its zero."""
        return 2 if self.pivot or self.float16 else 1


def tah_geometry(
    shape: Sequence[int],
    tile: int,
    high_bits: int,
    low_bits: int,
    low_fraction: float,
    allocation: str,
    float16: bool,
    pivot: float | bool | None,
) -> TAHGeometry:
    """Compute the sizes of a TAH-Quant payload of a tensor (sequences, length, channels).

    The number of candidates at `low_bits` is floor(low_fraction * candidates) in each scope (a sequence's tokens, a
    token's tiles, or the tiles of as many tokens as have up to 256), with 1e-9 added so that 0.2 * 10 gives 2. A ragged
    last tile is never a candidate by itself, because the payload's size must not depend on the choice.

    Args:
        shape: of the tensor. pivot: the `pivot_ratio`, or whether there is one.
    """
    sequences, length, channels = shape
    rows, tiles, full = sequences * length, ceil_div(channels, tile), channels // tile
    at_once = min(rows, max(1, SCOPE_TILES // max(1, full)))
    scope_rows = {"token": length, "tile": 1, "range": at_once}[allocation]
    scopes = ceil_div(rows, scope_rows)
    in_row = 1 if allocation == "token" else full
    per_scope, per_last = scope_rows * in_row, (rows - (scopes - 1) * scope_rows) * in_row
    share = low_fraction if high_bits > low_bits else 0.0
    low, low_last = int(share * per_scope + 1e-9), int(share * per_last + 1e-9)
    flag_bytes = ceil_div(per_scope, 8) if low else 0
    padded = full * tile + ceil_div(channels - full * tile, 8) * 8
    saved = (padded if allocation == "token" else tile) * (high_bits - low_bits) // 8
    layout = Layout.of(
        exponents=0 if float16 else rows,
        scales=rows * tiles * (2 if float16 else 1),
        mids=rows * tiles * (2 if pivot or float16 else 1),
        pivots=rows * tiles if pivot else 0,
        widths=scopes * flag_bytes,
        codes=rows * padded * high_bits // 8 - ((scopes - 1) * low + low_last) * saved,
    )
    return TAHGeometry(
        rows, channels, tile, high_bits, low_bits, allocation, float16, bool(pivot), tiles, full, scope_rows, scopes,
        per_scope, low, per_last, low_last, flag_bytes, padded * high_bits // 8, saved, layout,
    )  # fmt: skip


kernel_geometry = functools.lru_cache(tah_geometry)
"""`tah_geometry` with a cache. (Not for codecs, which `torch.compile` traces.)"""


def _check(
    x: Tensor, payload: Tensor, tile: int, high_bits: int, low_bits: int, low_fraction: float, allocation: str,
    float16: bool, pivot: float | bool | None, _: object = None,
) -> None:  # fmt: skip
    if tile not in (8, 16, 32, 64, 128):
        raise ValueError(f"tile is {tile}; allowed: 8, 16, 32, 64, 128")
    if not 2 <= low_bits <= high_bits <= 8:
        raise ValueError(f"low_bits is {low_bits}, high_bits {high_bits}; allowed: 2 to 8 in order")
    if allocation not in ("token", "tile", "range") or not 0 <= low_fraction <= 1:
        raise ValueError(f"allocation is {shown(allocation)}, low_fraction {low_fraction}")
    check_numbers(x, 3)
    geo = tah_geometry(x.shape, tile, high_bits, low_bits, low_fraction, allocation, float16, pivot)
    check_bytes("payload", payload, geo.layout.nbytes, x.device)


@operator(writes="payload", check=_check)
def encode(
    x: Tensor, payload: Tensor, tile: int, high_bits: int, low_bits: int, low_fraction: float, allocation: str,
    float16: bool, pivot_ratio: float | None,
) -> None:  # fmt: skip
    """x (sequences, length, channels) -> payload; see `lowbit.codecs.TAHQuant` for formulas and layout."""
    geo = tah_geometry(x.shape, tile, high_bits, low_bits, low_fraction, allocation, float16, pivot_ratio)
    x_RC = x.float().reshape(geo.rows, geo.channels)
    pad = x_RC[:, -1:].expand(-1, geo.tiles * geo.tile - geo.channels)  # does not change a ragged tile's range
    x_RTE = torch.cat([x_RC, pad], 1).view(geo.rows, geo.tiles, geo.tile)
    finite_RT = x_RTE.isfinite().all(-1)
    y_RTE, peak_RT, pivot_RT = x_RTE, torch.zeros_like(finite_RT, dtype=torch.float32), finite_RT.byte() * 0
    if pivot_ratio is not None:
        y_RTE, peak_RT, pivot_RT = _turned(x_RTE, finite_RT, geo, pivot_ratio)
    low_RT, high_RT = _extremes(y_RTE)
    half_RT, mid_RT = high_RT * 0.5 - low_RT * 0.5, high_RT * 0.5 + low_RT * 0.5
    offset_RT = peak_RT * geo.tile**-0.5  # of the tile, by its pivot
    # A middle too large for its integer widens the cells, unless a pivot makes it so: that is then sent apart.
    least_RT = (mid_RT + offset_RT).abs() * MID_SHARE[geo.mid_bytes]
    apart_RT = (pivot_RT > 0) & ((least_RT > half_RT) | (pivot_RT == LAST_APART))
    least_RT = torch.where(apart_RT, peak_RT.abs() * APART_SHARE, least_RT)
    extent_RT = high_RT - low_RT if float16 else torch.maximum(half_RT, least_RT)
    counts = torch.full((geo.scopes,), geo.low, device=x.device)
    counts[-1] = geo.low_last
    low = smallest(_keys(x_RTE, extent_RT, finite_RT, geo), counts)
    bits_RT = torch.where(_spread(low, geo), low_bits, high_bits)

    if float16:
        sections, codes_RTE = _quantize_float16(y_RTE, low_RT, extent_RT, bits_RT, finite_RT)
    else:
        tile_RT = mid_RT, offset_RT, apart_RT, peak_RT
        sections, codes_RTE = _quantize(y_RTE, *tile_RT, extent_RT, bits_RT, finite_RT, geo.mid_bytes)
        pivot_RT = torch.where((pivot_RT > 0) & ~apart_RT, pivot_RT + LAST_APART, pivot_RT)
    if pivot_ratio is not None:
        sections["pivots"] = pivot_RT
    codes_RTE.view(geo.rows, -1)[:, geo.channels :] = 0
    layout = geo.layout
    for name, values in sections.items():
        layout.section(payload, name, values.dtype).copy_(values.reshape(-1))
    if geo.low:
        layout.section(payload, "widths").copy_(pack_flags(low).view(-1))
    bytes_RTK = torch.where(
        (bits_RT == low_bits)[..., None], _tile_bytes(codes_RTE, geo, low_bits), _tile_bytes(codes_RTE, geo, high_bits)
    )
    layout.section(payload, "codes").copy_(bytes_RTK[_byte_mask(bits_RT, geo)])
    zero_gaps(payload, layout)


@operator(writes="out", check=lambda payload, out, *settings: _check(out, payload, *settings))
def decode(
    payload: Tensor, out: Tensor, tile: int, high_bits: int, low_bits: int, low_fraction: float, allocation: str,
    float16: bool, pivot: bool, accumulate: bool,
) -> None:  # fmt: skip
    """Payload -> out (sequences, length, channels), or added to it."""
    geo = tah_geometry(out.shape, tile, high_bits, low_bits, low_fraction, allocation, float16, pivot)
    layout = geo.layout
    low, intact_R = _checked_flags(payload, geo)
    bits_RT = torch.where(_spread(low, geo), low_bits, high_bits)

    mask_RTK = _byte_mask(bits_RT, geo)
    bytes_RTK = torch.zeros(mask_RTK.shape, dtype=torch.uint8, device=payload.device)
    bytes_RTK[mask_RTK] = layout.section(payload, "codes")
    codes_RTE = torch.where(
        (bits_RT == low_bits)[..., None], _tile_codes(bytes_RTK, geo, low_bits), _tile_codes(bytes_RTK, geo, high_bits)
    )
    pivot_RT, damaged_RT = torch.zeros_like(bits_RT, dtype=torch.uint8), ~intact_R[:, None]
    if pivot:
        pivot_RT = layout.section(payload, "pivots").view(geo.rows, geo.tiles)
        valid_RT = (pivot_RT > 0) & (((pivot_RT.int() - 1) & 127) < geo.tile)
        valid_RT &= (pivot_RT <= LAST_APART) | (not float16)
        valid_RT[:, geo.full :] = False
        damaged_RT = damaged_RT | ((pivot_RT > 0) & ~valid_RT)
        pivot_RT = torch.where(valid_RT, pivot_RT, 0)
    apart_RT = (pivot_RT > 0) & (pivot_RT <= LAST_APART) & (not float16)
    if float16:
        halves = (layout.section(payload, name, torch.float16) for name in ("scales", "mids"))
        scale_RT, zero_RT = (each.view(geo.rows, geo.tiles).float() for each in halves)
        zero_RT = torch.where(damaged_RT, math.nan, zero_RT)
        y_RTE, peak_RT = codes_RTE.float() * scale_RT[..., None] + zero_RT[..., None], zero_RT
    else:
        y_RTE, peak_RT = _numbers(payload, geo, codes_RTE, bits_RT, damaged_RT, apart_RT)
    if pivot:
        turned_RTE = rotate(y_RTE)
        turned_RTE[..., 0] = torch.where(apart_RT, peak_RT, turned_RTE[..., 0])
        y_RTE = torch.where(pivot_RT[..., None] > 0, swap(turned_RTE, pivot_RT), y_RTE)
    store(y_RTE.reshape(geo.rows, -1)[:, : geo.channels].reshape(out.shape), out, accumulate)


def _numbers(
    payload: Tensor, geo: TAHGeometry, codes_RTE: Tensor, bits_RT: Tensor, damaged_RT: Tensor, apart_RT: Tensor
) -> tuple[Tensor, Tensor]:
    """Numbers of tiles as they were quantized, and pivots of those where they were sent apart."""
    exponent_R = geo.layout.section(payload, "exponents").int()
    below_RT = geo.layout.section(payload, "scales").view(geo.rows, geo.tiles).int()
    mid_RT = geo.layout.section(payload, "mids", MID_DTYPE[geo.mid_bytes]).view(geo.rows, geo.tiles).int()
    damaged_RT = damaged_RT | (mid_RT == NAN_MID[geo.mid_bytes])
    step_RT = torch.where(damaged_RT, math.nan, octave_steps(exponent_R, below_RT))
    levels_RT = torch.exp2(bits_RT.float())
    offset_RT = torch.where(apart_RT, 0, mid_RT).float() * (levels_RT / MID_UNITS[geo.mid_bytes])
    centered_RTE = codes_RTE.float() - ((levels_RT - 1) / 2)[..., None]
    return (centered_RTE + offset_RT[..., None]) * step_RT[..., None], _at_distance(mid_RT, step_RT)


def find_pivots(x_RTE: Tensor, finite_RT: Tensor, geo: TAHGeometry, ratio: float) -> Tensor:
    """1 + position of each full tile's pivot: its largest |x|, if at least `ratio` times the second; else 0.

    It must be larger, too: the smallest ratios and the tiniest numbers round `second * ratio` to `second`.
    """
    top = x_RTE.abs().nan_to_num(0).topk(2, dim=-1)
    first, second = top.values.unbind(-1)
    qualifies = (first >= second * ratio) & (first > second) & (first < ROTATABLE) & finite_RT
    qualifies[:, geo.full :] = False
    return torch.where(qualifies, top.indices[..., 0] + 1, 0).to(torch.uint8)


def swap(x_RTE: Tensor, pivot_RT: Tensor) -> Tensor:
    """Exchange each tile's first element with the one at its pivot (tiles without a pivot: with any)."""
    position = ((pivot_RT.long() - 1).clamp(min=0) & 127)[..., None]
    first, pivot = x_RTE[..., :1], x_RTE.gather(-1, position)
    y = x_RTE.scatter(-1, position, first)
    return torch.cat([pivot, y[..., 1:]], -1)


def _turned(x_RTE: Tensor, finite_RT: Tensor, geo: TAHGeometry, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate tiles with a pivot; return them, the pivot where it was left out (else 0), and 1 + its position, or 0.

    A rotated pivot is a constant offset of its tile. As in the paper, `float16` keeps it. Without it, tiny numbers next
    to a huge pivot keep their digits, and a tile whose range would more than double stays as it is.
    """
    pivot_RT = find_pivots(x_RTE, finite_RT, geo, ratio)
    y_RTE = swap(x_RTE, pivot_RT)
    peak_RT = torch.where((pivot_RT > 0) & (not geo.float16), y_RTE[..., 0], 0.0)
    if not geo.float16:
        y_RTE[..., 0] = 0
    y_RTE = rotate(y_RTE)
    if not geo.float16:
        (low, high), (least, most) = _extremes(y_RTE), _extremes(x_RTE)
        wider_RT = high * 0.5 - low * 0.5 > (most * 0.5 - least * 0.5) * 2
        pivot_RT, peak_RT = (torch.where(wider_RT, 0, each) for each in (pivot_RT, peak_RT))
    return torch.where(pivot_RT[..., None] > 0, y_RTE, x_RTE), peak_RT, pivot_RT


def _extremes(x_RTE: Tensor) -> tuple[Tensor, Tensor]:
    # Plus 0: which of two zeros with different signs is the smaller one differs by backend.
    return x_RTE.amin(-1).clamp(min=-LARGEST) + 0.0, x_RTE.amax(-1).clamp(max=LARGEST) + 0.0


def _keys(x_RTE: Tensor, extent_RT: Tensor, finite_RT: Tensor, geo: TAHGeometry) -> Tensor:
    """Sort keys of each scope's candidates, (scopes, per_scope); NaN, Inf and missing candidates come last."""
    if geo.allocation == "range":
        key = torch.where(finite_RT, extent_RT, math.inf)[:, : geo.full]
    elif geo.allocation == "tile":
        key = torch.where(finite_RT, entropy(x_RTE), math.inf)[:, : geo.full]
    else:
        x_RC = x_RTE.reshape(geo.rows, -1)[:, : geo.channels]
        key = torch.where(finite_RT.all(-1), entropy(x_RC), math.inf)
    missing = geo.per_scope - geo.per_last
    return torch.nn.functional.pad(key.reshape(-1), (0, missing), value=math.inf).view(geo.scopes, geo.per_scope)


def _steps(extent_RT: Tensor, finite_RT: Tensor, bits_RT: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each token's exponent, and each tile's step as a distance below its top (see `octave_steps`).

    A step becomes a 12-bit number of sixteenths of an octave, float32's exponent and four bits of its mantissa.
    """
    step_RT = extent_RT / torch.exp2(bits_RT.float() - 1)
    step_RT = torch.where(finite_RT & (extent_RT > 0), step_RT.clamp(min=SMALLEST), 0.0)
    octave_RT = (step_RT.view(torch.int32) + torch.where(bits_RT < 6, octave_rounding(2), octave_rounding(8))) >> 19
    exponent_R = octave_RT.amax(-1) >> 4
    below_RT = (exponent_R[:, None] * 16 + 15 - octave_RT).clamp(0, 254)
    return exponent_R, torch.where(octave_RT > 0, below_RT, 255)


def _quantize(
    x_RTE: Tensor, mid_RT: Tensor, offset_RT: Tensor, apart_RT: Tensor, peak_RT: Tensor, extent_RT: Tensor,
    bits_RT: Tensor, finite_RT: Tensor, mid_bytes: int,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """Compute steps and integer middles, offset included, and codes relative to them; 0 where the step is 0.

    Where the pivot is sent apart, the middle is exact, and not sent: it would only change the pivot.
    """
    exponent_R, below_RT = _steps(extent_RT, finite_RT, bits_RT)
    step_RT = octave_steps(exponent_R, below_RT)
    inverse_RT, cells_RT = inverse(step_RT), torch.exp2(bits_RT.float())
    limit, centre_RT = MID_LIMIT[mid_bytes], (cells_RT - 1) / 2
    m_RT = ((mid_RT + offset_RT) * inverse_RT * (MID_UNITS[mid_bytes] / cells_RT)).round().clamp(-limit, limit)
    m_RT = torch.where(step_RT > 0, m_RT, 0.0)
    shift_RT = centre_RT - m_RT * (cells_RT / MID_UNITS[mid_bytes]) + offset_RT * inverse_RT
    shift_RT = torch.where(apart_RT, centre_RT - mid_RT * inverse_RT, shift_RT)
    v_RTE = (x_RTE * inverse_RT[..., None] + shift_RT[..., None]).round().clamp(min=0)
    v_RTE = torch.minimum(v_RTE, (cells_RT - 1)[..., None]).nan_to_num(0)
    m_RT = torch.where(apart_RT, _distance(peak_RT, step_RT), m_RT)
    m_RT = torch.where(finite_RT, m_RT, float(NAN_MID[mid_bytes])).to(MID_DTYPE[mid_bytes])
    sections = {"exponents": exponent_R.byte(), "scales": below_RT.byte(), "mids": m_RT}
    return sections, torch.where((step_RT > 0)[..., None], v_RTE, 0.0).byte()


def _distance(peak_RT: Tensor, step_RT: Tensor) -> Tensor:
    """A pivot as an int16: its sign, and how far its bits lie above those of the step, nearly a logarithm."""
    above = (peak_RT.abs().view(torch.int32) + (1 << (APART_SHIFT - 1))) >> APART_SHIFT
    above = (above - (step_RT.view(torch.int32) >> APART_SHIFT) + APART_ZERO).clamp(1, 32767)
    return torch.where(peak_RT < 0, above - 32768, above).float()


def _at_distance(mid_RT: Tensor, step_RT: Tensor) -> Tensor:
    """Inverse of `_distance`; NaN where the step is NaN."""
    above = (step_RT.view(torch.int32) >> APART_SHIFT) + (mid_RT & 0x7FFF) - APART_ZERO
    peak_RT = (above.clamp(0, APART_MOST) << APART_SHIFT).view(torch.float32)
    return torch.where(step_RT.isnan(), math.nan, torch.where(mid_RT < 0, -peak_RT, peak_RT))


def _quantize_float16(
    x_RTE: Tensor, zero_RT: Tensor, span_RT: Tensor, bits_RT: Tensor, finite_RT: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute scales and zeros, and codes relative to them before they are rounded, as the paper does."""
    top_RT = torch.exp2(bits_RT.float()) - 1
    scale_RT = span_RT / top_RT
    used_RT = finite_RT & (scale_RT > 0)
    v_RTE = (x_RTE - zero_RT[..., None]) / torch.where(used_RT, scale_RT, 1.0)[..., None]
    codes_RTE = torch.minimum(v_RTE.round().clamp(min=0), top_RT[..., None])
    sections = {
        "scales": torch.where(finite_RT, _float16(scale_RT), 0.0),
        "mids": torch.where(finite_RT, _float16(zero_RT), math.nan),
    }
    return sections, torch.where(used_RT[..., None], codes_RTE, 0.0).byte()


def _float16(x: Tensor) -> Tensor:
    """Round to float16; larger numbers saturate."""
    return x.clamp(-65504, 65504).half()


def _checked_flags(payload: Tensor, geo: TAHGeometry) -> tuple[Tensor, Tensor]:
    """Read the flags of the candidates (scopes, per_scope), and for which tokens (R,) they are valid.

    A scope with another number of flags than the geometry requires is damaged: its first candidates are flagged
    instead, so that its codes and those of later scopes still lie within the payload.
    """
    device = payload.device
    counts = torch.full((geo.scopes, 1), geo.low, device=device)
    counts[-1] = geo.low_last
    place = torch.arange(geo.per_scope, device=device).expand(geo.scopes, -1)
    if not geo.low:
        return place < counts, torch.ones(geo.rows, dtype=torch.bool, device=device)
    packed = geo.layout.section(payload, "widths").view(geo.scopes, geo.flag_bytes)
    low = unpack_flags(packed, geo.per_scope)
    low[-1, geo.per_last :] = False
    intact = low.sum(1, keepdim=True) == counts
    intact_R = intact.view(-1).repeat_interleave(geo.scope_rows)[: geo.rows]
    return torch.where(intact, low, place < counts), intact_R


def _spread(low: Tensor, geo: TAHGeometry) -> Tensor:
    """Expand the flags of candidates to flags of all tiles, (R, T)."""
    if geo.allocation == "token":
        return low.reshape(geo.rows, 1).expand(-1, geo.tiles)
    flags = low.reshape(-1)[: geo.rows * geo.full].view(geo.rows, geo.full)
    return torch.nn.functional.pad(flags, (0, geo.tiles - geo.full))


def _byte_mask(bits_RT: Tensor, geo: TAHGeometry) -> Tensor:
    """(R, T, K): which of the K bytes that a tile may take are in the payload."""
    size_T = torch.full((geo.tiles,), geo.tile, device=bits_RT.device)
    size_T[geo.full :] = _ragged(geo)
    k = torch.arange(geo.tile * geo.high_bits // 8, device=bits_RT.device)
    return k < (size_T * bits_RT // 8)[..., None]


def _tile_bytes(codes_RTE: Tensor, geo: TAHGeometry, bits: int) -> Tensor:
    packed = pack(codes_RTE[:, : geo.full], bits)
    room = geo.tile * geo.high_bits // 8
    parts = [torch.nn.functional.pad(packed, (0, room - packed.shape[-1]))]
    if geo.full < geo.tiles:
        tail = pack(codes_RTE[:, geo.full :, : _ragged(geo)], bits)
        parts.append(torch.nn.functional.pad(tail, (0, room - tail.shape[-1])))
    return torch.cat(parts, 1)


def _tile_codes(bytes_RTK: Tensor, geo: TAHGeometry, bits: int) -> Tensor:
    parts = [unpack(bytes_RTK[:, : geo.full, : geo.tile * bits // 8], bits)]
    if geo.full < geo.tiles:
        tail = unpack(bytes_RTK[:, geo.full :, : _ragged(geo) * bits // 8], bits)
        parts.append(torch.nn.functional.pad(tail, (0, geo.tile - tail.shape[-1])))
    return torch.cat(parts, 1)


def _ragged(geo: TAHGeometry) -> int:
    """Elements that a ragged last tile takes in the payload."""
    return ceil_div(geo.channels - geo.full * geo.tile, 8) * 8
