"""Decode `TAHQuant` on the CPU; encoding is in `cpu_encode`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.tah_quant.cpu_encode import count_flags, encode, read_checked_flags, rotate, swap
from lowbit.codecs.tah_quant.layout import kernel_geometry
from lowbit.kernels.cpu.jit import helper, kernel, over_rows
from lowbit.kernels.cpu.lines import FLOAT32, KINDS, narrow, sections
from lowbit.kernels.cpu.memory import get_byte, get_float, get_half, put_float
from lowbit.kernels.cpu.operations import power_of_two, step_below
from lowbit.kernels.cpu.runs import HALF, ONE, decode_run

__all__ = ["decode", "encode"]

NAN = np.float32(np.nan)


def decode(payload: Tensor, out: Tensor, *settings: Any) -> None:
    """The reference's numbers."""
    geo, accumulate = kernel_geometry(out.shape, *settings[:-1]), settings[-1]
    at = sections(payload, geo.layout)
    in_row = 0 if not geo.low else 1 if geo.allocation == "token" else geo.full

    def work(start: int, stop: int) -> None:
        nbytes = 4 * geo.channels + 5 * geo.tile + 8 * geo.flag_bytes
        scratch = torch.empty(nbytes, dtype=torch.uint8)
        _decode(
            at["exponents"], at["scales"], at["mids"], at["pivots"], at["codes"],
            geo.row_bytes, geo.saved, at["widths"], geo.flag_bytes, geo.scope_rows, geo.low, geo.low_last, in_row,
            out.data_ptr(), KINDS[out.dtype], geo.rows, geo.channels, geo.tile, geo.tiles, geo.full,
            geo.high_bits, geo.low_bits, geo.allocation == "token", geo.pivot, accumulate, geo.tile**-0.5,
            scratch.data_ptr(), start, stop,
        )  # fmt: skip

    over_rows(work, geo.rows, out.nbytes)


@kernel
def _decode(
    exponents, scales, mids, pivots, codes_at, row_bytes, saved, widths, flag_bytes, scope_rows,
    low_count, low_last, in_row, target, kind, rows, channels, tile, tiles, full, high_bits, low_bits,
    by_token, pivot, accumulate, norm, scratch, start, stop,
) -> None:  # fmt: skip
    line, spun = scratch, scratch + 4 * channels
    codes = spun + 4 * tile
    flags = codes + tile
    direct = kind == FLOAT32 and not accumulate
    scope, at, intact, norm = -1, codes_at, True, np.float32(norm)
    for row in range(start, stop):
        y = target + 4 * row * channels if direct else line
        if row // scope_rows > scope:
            scope, left = row // scope_rows, rows - row // scope_rows * scope_rows
            given = low_count if left > scope_rows else low_last
            candidates = min(left, scope_rows) * in_row
            intact = read_checked_flags(widths + scope * flag_bytes, flag_bytes, candidates, given, flags)
            before = scope * low_count + count_flags(flags, row % scope_rows * in_row)
            at = codes_at + row * row_bytes - before * saved
        chosen = flags + row % scope_rows * in_row
        top = np.int64(get_byte(exponents, row)) * 16 + 15
        for t in range(tiles):
            low = in_row > 0 and t < full and get_byte(chosen, t) > 0
            if by_token:
                low = in_row > 0 and get_byte(chosen, 0) > 0
            bits, i = low_bits if low else high_bits, row * tiles + t
            step, offset = _parameters(scales, mids, i, top, bits, pivot)
            to, count = y + 4 * t * tile, min(tile, channels - t * tile)
            turned = get_byte(pivots, i) if pivot else 0
            if turned and not (128 <= turned < 128 + tile and t < full):
                turned, step = 0, NAN
            if turned:
                at = decode_run(at, tile, bits, offset, step, spun, codes)
                rotate(spun, tile, norm)
                swap(spun, turned - 128)
                for j in range(tile):
                    put_float(to, j, get_float(spun, j))
            else:
                at = decode_run(at, count, bits, offset, step, to, codes)
        if not intact:
            for j in range(channels):
                put_float(y, j, NAN)
        if not direct:
            narrow(line, target, kind, row * channels, channels, accumulate)


@helper
def _parameters(scales, mids, i, top, bits, pivot) -> Any:
    """Return a tile's step, and the offset of its codes."""
    step, cells = step_below(get_byte(scales, i), top), power_of_two(bits)
    if pivot:
        m, nan, unit = np.int64(np.int16(get_half(mids, i))), -32768, np.float32(1 / 256)
    else:
        m, nan, unit = np.int64(np.int8(get_byte(mids, i))), -128, np.float32(1 / 64)
    step = NAN if m == nan else step
    return step, np.float32(m) * (cells * unit) - (cells - ONE) * HALF
