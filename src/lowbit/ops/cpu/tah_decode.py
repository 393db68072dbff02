"""`tah_quant_decode` (see `lowbit.codecs.TAHQuant`)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lowbit.ops.cpu.choice import count_flags, read_flags
from lowbit.ops.cpu.floats import FLOAT32, as_arrays, store_line
from lowbit.ops.cpu.jit import get, helper, kernel, put
from lowbit.ops.cpu.operations import bits_float
from lowbit.ops.cpu.planes import load16, unpack
from lowbit.ops.cpu.threads import over_rows
from lowbit.ops.cpu.tiles import ONE, ZERO, restore, rotate, swap
from lowbit.ops.layout import ceil_div, tah_geometry

NAN = np.float32(np.nan)


def tah_quant_decode(
    payload: Tensor,
    out: Tensor,
    tile: int,
    high_bits: int,
    low_bits: int,
    low_fraction: float,
    allocation: str,
    pivot: bool,
    accumulate: bool,
) -> None:
    """The reference's numbers."""
    geo = tah_geometry(
        *out.shape,
        tile=tile,
        high_bits=high_bits,
        low_bits=low_bits,
        low_fraction=low_fraction,
        allocation=allocation,
        pivot=pivot,
    )
    source, target, at = payload.numpy(), as_arrays(out), geo.layout.offsets
    flags = np.zeros(ceil_div(geo.scopes * geo.per_scope, 8) * 8, np.uint8)
    if geo.low:
        read_flags(source, at["widths"], len(flags) // 8, flags)

    def decode(start: int, stop: int) -> None:
        _decode(
            source, at["exponents"], at["scales"], at["mids"], at["pivots"], at["codes"],
            geo.row_bytes, geo.saved, flags, *target, geo.channels, tile, geo.tiles, geo.full,
            high_bits, low_bits, allocation == "token", pivot, accumulate, tile**-0.5, start, stop,
        )  # fmt: skip

    over_rows(decode, geo.rows, out.nbytes)


@kernel
def _decode(
    payload, at_exponents, at_scales, at_mids, at_pivots, at_codes, row_bytes, saved, flags,
    floats, halves, kind, channels, tile, tiles, full,
    high_bits, low_bits, by_token, pivot, accumulate, norm, start, stop,
):  # fmt: skip
    codes, spun = np.empty(tile + 64, np.uint8), np.empty(tile, np.float32)
    direct = kind == FLOAT32 and not accumulate
    line = np.empty(0 if direct else channels, np.float32)
    norm = np.float32(norm)
    per_row = 1 if by_token else full
    at = at_codes + start * row_bytes - count_flags(flags, start * per_row) * saved
    for row in range(start, stop):
        y, base = floats, row * channels
        if not direct:
            y, base = line, 0
        top = np.int64(get(payload, at_exponents + row)) * 16 + 15
        for t in range(tiles):
            i = row * tiles + t
            low = t < full and get(flags, row if by_token else row * full + t)
            low = get(flags, row) if by_token else low
            bits = low_bits if low else high_bits
            count = tile if t < full else channels - t * tile
            at = unpack(payload, at, (count + 7) & -8, bits, codes, 0)
            step, offset = _parameters(payload, at_scales + i, at_mids, i, top, bits, pivot)
            position = get(payload, at_pivots + i) if pivot else 0
            if position:
                restore(codes, 0, tile, offset, step, spun, 0)
                rotate(spun, tile, norm)
                swap(spun, position & 127)
                for j in range(tile):
                    put(y, base + t * tile + j, get(spun, j))
            else:
                restore(codes, 0, count, offset, step, y, base + t * tile)
        if not direct:
            store_line(line, floats, halves, kind, row * channels, channels, accumulate)


@helper
def _parameters(payload, at_scale, at_mids, i, top, bits, pivot):
    """A tile's step, and what is added to its codes."""
    below = np.int64(get(payload, at_scale))
    step = bits_float(max(top - below, 16) << 19) if below != 255 else ZERO
    cells = np.float32(1 << bits)
    if pivot:
        m, none, unit = np.int64(np.int16(load16(payload, at_mids + 2 * i))), -32768, cells / np.float32(256)
    else:
        m, none, unit = np.int64(np.int8(get(payload, at_mids + i))), -128, cells / np.float32(64)
    return NAN if m == none else step, np.float32(m) * unit - (cells - ONE) / np.float32(2)
