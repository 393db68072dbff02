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


@dataclass(frozen=True)
class TAHGeometry:
    """Sizes of a TAH-Quant payload, derived from the shape and the settings.

    Attributes:
        rows: tokens in the message; channels: elements of a token; tiles: tiles of a token.
        tile, high_bits, low_bits, allocation: as in `lowbit.codecs.TAHQuant`; pivot: whether tiles may be rotated.
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
        """Bytes of a tile's middle."""
        return 2 if self.pivot else 1


def tah_geometry(
    shape: Sequence[int],
    tile: int,
    high_bits: int,
    low_bits: int,
    low_fraction: float,
    allocation: str,
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
        exponents=rows,
        scales=rows * tiles,
        mids=rows * tiles * (2 if pivot else 1),
        pivots=rows * tiles if pivot else 0,
        widths=scopes * flag_bytes,
        codes=rows * padded * high_bits // 8 - ((scopes - 1) * low + low_last) * saved,
    )
    return TAHGeometry(
        rows, channels, tile, high_bits, low_bits, allocation, bool(pivot), tiles, full, scope_rows, scopes,
        per_scope, low, per_last, low_last, flag_bytes, padded * high_bits // 8, saved, layout,
    )  # fmt: skip


kernel_geometry = functools.lru_cache(tah_geometry)
"""`tah_geometry` with a cache. (Not for codecs, which `torch.compile` traces.)"""


def _check(
    x: Tensor, payload: Tensor, tile: int, high_bits: int, low_bits: int, low_fraction: float, allocation: str,
    pivot: float | bool | None, _: object = None,
) -> None:  # fmt: skip
    if tile not in (8, 16, 32, 64, 128):
        raise ValueError(f"tile is {tile}; allowed: 8, 16, 32, 64, 128")
    if not 2 <= low_bits <= high_bits <= 8:
        raise ValueError(f"low_bits is {low_bits}, high_bits {high_bits}; allowed: 2 to 8 in order")
    if allocation not in ("token", "tile", "range") or not 0 <= low_fraction <= 1:
        raise ValueError(f"allocation is {shown(allocation)}, low_fraction {low_fraction}")
    check_numbers(x, 3)
    geo = tah_geometry(x.shape, tile, high_bits, low_bits, low_fraction, allocation, pivot)
    check_bytes("payload", payload, geo.layout.nbytes, x.device)


@operator(writes="payload", check=_check)
def encode(
    x: Tensor, payload: Tensor, tile: int, high_bits: int, low_bits: int, low_fraction: float, allocation: str,
    pivot_ratio: float | None,
) -> None:  # fmt: skip
    """x (sequences, length, channels) -> payload; see `lowbit.codecs.TAHQuant` for formulas and layout."""
    geo = tah_geometry(x.shape, tile, high_bits, low_bits, low_fraction, allocation, pivot_ratio)
    x_RC = x.float().reshape(geo.rows, geo.channels)
    pad = x_RC[:, -1:].expand(-1, geo.tiles * geo.tile - geo.channels)  # does not change a ragged tile's range
    x_RTE = torch.cat([x_RC, pad], 1).view(geo.rows, geo.tiles, geo.tile)
    finite_RT = x_RTE.isfinite().all(-1)
    y_RTE, pivot_RT = x_RTE, torch.zeros_like(finite_RT, dtype=torch.uint8)
    if pivot_ratio is not None:
        pivot_RT = find_pivots(x_RTE, finite_RT, geo, pivot_ratio)
        y_RTE = torch.where(pivot_RT[..., None] > 0, rotate(swap(x_RTE, pivot_RT)), x_RTE)
    low_RT, high_RT = y_RTE.amin(-1).clamp(min=-LARGEST), y_RTE.amax(-1).clamp(max=LARGEST)
    half_RT, mid_RT = high_RT * 0.5 - low_RT * 0.5, high_RT * 0.5 + low_RT * 0.5
    # A middle that is too large for its integer widens the cells instead of being clamped.
    extent_RT = torch.maximum(half_RT, mid_RT.abs() * MID_SHARE[geo.mid_bytes])
    counts = torch.full((geo.scopes,), geo.low, device=x.device)
    counts[-1] = geo.low_last
    low = smallest(_keys(x_RTE, extent_RT, finite_RT, geo), counts)
    bits_RT = torch.where(_spread(low, geo), low_bits, high_bits)
    exponent_R, below_RT = _steps(extent_RT, finite_RT, bits_RT)
    step_RT = octave_steps(exponent_R, below_RT)
    m_RT, codes_RTE = _quantize(y_RTE, mid_RT, step_RT, bits_RT, geo.mid_bytes)
    codes_RTE.view(geo.rows, -1)[:, geo.channels :] = 0

    layout = geo.layout
    layout.section(payload, "exponents").copy_(exponent_R)
    layout.section(payload, "scales").copy_(below_RT.reshape(-1))
    m_RT = torch.where(finite_RT, m_RT, float(NAN_MID[geo.mid_bytes]))
    layout.section(payload, "mids", MID_DTYPE[geo.mid_bytes]).copy_(m_RT.reshape(-1))
    if pivot_ratio is not None:
        layout.section(payload, "pivots").copy_(pivot_RT.reshape(-1))
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
    pivot: bool, accumulate: bool,
) -> None:  # fmt: skip
    """Payload -> out (sequences, length, channels), or added to it."""
    geo = tah_geometry(out.shape, tile, high_bits, low_bits, low_fraction, allocation, pivot)
    layout, width = geo.layout, geo.mid_bytes
    low, intact_R = _checked_flags(payload, geo)
    bits_RT = torch.where(_spread(low, geo), low_bits, high_bits)

    mask_RTK = _byte_mask(bits_RT, geo)
    bytes_RTK = torch.zeros(mask_RTK.shape, dtype=torch.uint8, device=payload.device)
    bytes_RTK[mask_RTK] = layout.section(payload, "codes")
    codes_RTE = torch.where(
        (bits_RT == low_bits)[..., None], _tile_codes(bytes_RTK, geo, low_bits), _tile_codes(bytes_RTK, geo, high_bits)
    )
    exponent_R = layout.section(payload, "exponents").int()
    below_RT = layout.section(payload, "scales").view(geo.rows, geo.tiles).int()
    mid_RT = layout.section(payload, "mids", MID_DTYPE[width]).view(geo.rows, geo.tiles)
    step_RT = octave_steps(exponent_R, below_RT)
    step_RT = torch.where((mid_RT == NAN_MID[width]) | ~intact_R[:, None], math.nan, step_RT)
    if pivot:
        pivot_RT = layout.section(payload, "pivots").view(geo.rows, geo.tiles)
        valid_RT = (pivot_RT >= 128) & (pivot_RT.int() < 128 + geo.tile)
        valid_RT[:, geo.full :] = False
        step_RT = torch.where((pivot_RT > 0) & ~valid_RT, math.nan, step_RT)
        pivot_RT = torch.where(valid_RT, pivot_RT, 0)
    levels_RT = torch.exp2(bits_RT.float())
    offset_RT = mid_RT.float() * (levels_RT / MID_UNITS[width])
    centered_RTE = codes_RTE.float() - ((levels_RT - 1) / 2)[..., None]
    y_RTE = (centered_RTE + offset_RT[..., None]) * step_RT[..., None]
    if pivot:
        y_RTE = torch.where(pivot_RT[..., None] > 0, swap(rotate(y_RTE), pivot_RT), y_RTE)
    store(y_RTE.reshape(geo.rows, -1)[:, : geo.channels].reshape(out.shape), out, accumulate)


def find_pivots(x_RTE: Tensor, finite_RT: Tensor, geo: TAHGeometry, ratio: float) -> Tensor:
    """128 + position of each full tile's pivot: its largest |x|, if at least `ratio` times the second; else 0.

    It must be larger, too: the smallest ratios and the tiniest numbers round `second * ratio` to `second`.
    """
    top = x_RTE.abs().nan_to_num(0).topk(2, dim=-1)
    first, second = top.values.unbind(-1)
    qualifies = (first >= second * ratio) & (first > second) & (first < ROTATABLE) & finite_RT
    qualifies[:, geo.full :] = False
    return torch.where(qualifies, top.indices[..., 0] + 128, 0).to(torch.uint8)


def swap(x_RTE: Tensor, pivot_RT: Tensor) -> Tensor:
    """Exchange each tile's first element with the one at its pivot (tiles without a pivot stay)."""
    position = (pivot_RT.long() & 127)[..., None]
    first, pivot = x_RTE[..., :1], x_RTE.gather(-1, position)
    y = x_RTE.scatter(-1, position, first)
    return torch.cat([pivot, y[..., 1:]], -1)


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


def _quantize(x_RTE: Tensor, mid_RT: Tensor, step_RT: Tensor, bits_RT: Tensor, mid_bytes: int) -> tuple[Tensor, Tensor]:
    """Compute integer middles, and codes relative to them; both are 0 where the step is 0."""
    inverse_RT = inverse(step_RT)
    cells_RT = torch.exp2(bits_RT.float())
    limit = MID_LIMIT[mid_bytes]
    m_RT = (mid_RT * inverse_RT * (MID_UNITS[mid_bytes] / cells_RT)).round().clamp(-limit, limit)
    m_RT = torch.where(step_RT > 0, m_RT, 0.0)
    shift_RT = (cells_RT - 1) / 2 - m_RT * (cells_RT / MID_UNITS[mid_bytes])
    v_RTE = (x_RTE * inverse_RT[..., None] + shift_RT[..., None]).round().clamp(min=0)
    v_RTE = torch.minimum(v_RTE, (cells_RT - 1)[..., None]).nan_to_num(0)
    return m_RT, torch.where((step_RT > 0)[..., None], v_RTE, 0.0).to(torch.uint8)


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
