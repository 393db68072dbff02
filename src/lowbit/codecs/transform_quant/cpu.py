"""`TransformQuant` on CPUs: streams of symbols, each by one thread, row after row.

What is done to a row's coefficients alike runs as vectors, through a buffer of one row; the entropy coder takes its
symbols one by one. Its states are those of `LANES` coders in turn, so that a processor works on several at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.transform_quant import tables
from lowbit.codecs.transform_quant.cpu_fit import first_step, fitted, next_step, token_steps
from lowbit.codecs.transform_quant.cpu_symbols import (
    code_of,
    context_of,
    dither_of,
    is_full,
    number_of,
    raw_of,
    scale_of,
    shares,
    symbol_at,
    symbol_of,
    with_symbol,
)
from lowbit.codecs.transform_quant.layout import LANES, SLACK, TransformGeometry
from lowbit.codecs.transform_quant.reference import (
    BEGIN,
    ENTRY,
    LEAST_STEP,
    MOST_STEP,
    WORD,
    body_nbytes,
)
from lowbit.codecs.transform_quant.tables import MIDDLE, PRECISION, STRIDE, TOTAL
from lowbit.kernels.cpu.jit import kernel
from lowbit.kernels.cpu.memory import get_float, get_half, get_int, get_word, put_float, put_half, put_int
from lowbit.kernels.cpu.threads import over_rows

STATES = 4 * LANES


def encode(z: Tensor, header: Tensor, payload: Tensor, geo: TransformGeometry) -> None:
    """The reference's format; steps may be others."""
    fit, seed = fitted(z, geo), seed_of(header)
    room = geo.layout.sizes["streams"] - SLACK - 4 * ENTRY * geo.streams
    step = first_step(fit, z, seed, room, geo)
    while True:
        rows, _, inverse = token_steps(fit.token, fit.norm, fit.largest, step, geo)
        entries, bodies = _coded(z, seed, fit.channel, rows, inverse, room, geo)
        size = sum(map(len, bodies)) if bodies else 2 * room
        if size <= room or step >= MOST_STEP:
            break
        step = next_step(step, size - room, z.numel())
    if size > room:
        raise AssertionError("the largest step leaves nothing but dead symbols, and the layout has room for them")
    bytes_, at = payload.numpy(), geo.layout.offsets
    scalars = np.array([fit.highest, fit.largest, step, 0], np.int32).view(np.uint8)
    table = np.array(entries, np.int32).reshape(-1).view(np.uint8)
    for name, part in (("scalars", scalars), ("levels", fit.level), ("tokens", fit.token), ("streams", table)):
        bytes_[at[name] : at[name] + len(part)] = part
    if geo.by_token:
        bytes_[at["norms"] : at["norms"] + geo.rows] = fit.norm
    start = at["streams"] + len(table)
    for body in bodies:
        bytes_[start : start + len(body)] = body
        start += len(body)


def decode(payload: Tensor, header: Tensor, z: Tensor, geo: TransformGeometry) -> Tensor:
    """The reference's numbers."""
    bytes_, at, sizes = payload.numpy(), geo.layout.offsets, geo.layout.sizes
    level, token, norm = (bytes_[at[name] : at[name] + sizes[name]] for name in ("levels", "tokens", "norms"))
    highest, largest, step, _ = bytes_[at["scalars"] :][:16].view(np.int32).tolist()
    step = min(max(step, LEAST_STEP), MOST_STEP)
    channel = (highest - level.astype(np.int64)).astype(np.int32)
    rows, steps, _ = token_steps(token, norm, largest, step, geo)
    table = bytes_[at["streams"] :][: 4 * ENTRY * geo.streams].view(np.int32).reshape(-1, ENTRY).tolist()
    starts = [4 * ENTRY * geo.streams]
    for entry in table:
        starts.append(starts[-1] + (body_nbytes(*entry) if min(entry) >= 0 else sizes["streams"]))
    if starts[-1] > sizes["streams"] - SLACK:
        return torch.zeros((), dtype=torch.bool, device="cpu")
    whole = [False] * geo.streams
    address = payload.data_ptr() + at["streams"]
    fixed = (channel.ctypes.data, rows.ctypes.data, steps.ctypes.data, seed_of(header), tables.limits().ctypes.data)

    def work(begin: int, end: int) -> None:
        for i in range(begin, end):
            first, last = i * geo.stream_rows, min(geo.rows, (i + 1) * geo.stream_rows)
            whole[i] = _decode_stream(address + starts[i], *table[i], *fixed, z.data_ptr(), first, last, geo.channels)

    over_rows(work, geo.streams, z.nbytes)
    return torch.tensor(all(whole), device="cpu")


def seed_of(header: Tensor) -> int:
    """Of the dither, as a signed number of 32 bits: the reference's."""
    number, before, training, own = header.tolist()
    seed = number * 0x9E3779B1 + before * 0x85EBCA77 + training * 0xC2B2AE3D + own * 0x27D4EB2F
    return (seed & 0xFFFFFFFF) - ((seed & 0x80000000) << 1)


def _coded(
    z: Tensor, seed: int, channel: np.ndarray, rows: np.ndarray, inverse: np.ndarray, room: int, geo: TransformGeometry
) -> tuple[list[tuple[int, int, int]], list[np.ndarray]]:
    """Entries of the streams, and their bytes; none if one of them is much longer than the payload."""
    entries, bodies = [(-1, -1, -1)] * geo.streams, [np.empty(0, np.uint8)] * geo.streams
    fixed = (channel.ctypes.data, rows.ctypes.data, inverse.ctypes.data, seed, shares().ctypes.data)
    most = room // 2 * 2 + 2 * geo.channels  # bytes of words, and of codes beyond the symbols

    def work(begin: int, end: int) -> None:
        for i in range(begin, end):
            first, last = i * geo.stream_rows, min(geo.rows, (i + 1) * geo.stream_rows)
            bits = _raw_bits(channel.ctypes.data, rows.ctypes.data, first, last, geo.channels)
            raw = -(-bits // 16) * 2
            if raw > room:
                return
            scratch = np.zeros(2 * most + raw + SLACK + STATES, np.uint8)
            words, beyond = _encode_stream(
                z.data_ptr(), first, last, geo.channels, *fixed, scratch.ctypes.data, most, raw, bits
            )
            if words < 0:
                return
            low = 2 * most + raw
            parts = (slice(low + SLACK, None), slice(most - 2 * words, most), slice(2 * most - 2 * beyond, 2 * most))
            bodies[i] = np.concatenate([*(scratch[part] for part in parts), scratch[2 * most : low]])
            entries[i] = (words, beyond, raw)

    over_rows(work, geo.streams, z.nbytes)
    return entries, bodies if all(map(len, bodies)) else []


@kernel
def _raw_bits(channel, rows, first, last, channels) -> Any:
    """How many bits of a stream travel as they are."""
    total = 0
    for r in range(first, last):
        for j in range(channels):
            total += np.int64(raw_of(scale_of(get_int(channel, j), get_int(rows, r))))
    return total


@kernel
def _encode_stream(
    z, first, last, channels, channel, rows, inverse, seed, shares, scratch, most, raw, bit
) -> Any:  # fmt: skip
    """Code rows from the last symbol to the first; each part of the scratch fills from its end.

    Args:
        scratch: `most` bytes of words, as many of codes beyond the symbols, `raw` of lowest bits, slack, states.
        bit: how many lowest bits there are.

    Returns:
        Numbers of words and of codes beyond the symbols; -1 if they do not fit.
    """
    codes, symbols = np.empty(channels, np.int32), np.empty(channels, np.int32)
    code, symbol = codes.ctypes.data, symbols.ctypes.data
    kept = np.full(LANES, BEGIN, np.int32)
    states = kept.ctypes.data
    word, beyond, low = scratch + most, scratch + 2 * most, scratch + 2 * most
    place = (last - first) * channels
    for r in range(last - 1, first - 1, -1):
        row, scaled = get_int(rows, r), get_float(inverse, r)
        line = z + 4 * r * channels
        for j in range(channels):
            dither = dither_of(r * channels + j, seed)
            scale = scale_of(get_int(channel, j), row)
            value = code_of(get_float(line, j), scaled, dither)
            put_int(code, j, value)
            put_int(symbol, j, symbol_of(value, scale, context_of(scale, dither, row)))
        if word - scratch < 2 * channels or beyond - scratch - most < 2 * channels:
            return -1, -1
        for j in range(channels - 1, -1, -1):
            place -= 1
            both = np.int64(get_int(symbol, j))
            entry, lane = get_word(shares, both), place & (LANES - 1)
            state = np.int64(get_int(states, lane))
            full = is_full(state, entry)
            put_half(word, -1, state)
            word -= 2 * full
            put_int(states, lane, with_symbol(state >> (WORD * full), entry))
            if both & 15 == 0:
                width = raw_of(scale_of(get_int(channel, j), row))
                beyond -= 2
                put_half(beyond, 0, min(max(np.int64(get_int(code, j)) >> width, -32768), 32767))
        for j in range(channels - 1, -1, -1):
            width = np.int64(raw_of(scale_of(get_int(channel, j), row)))
            if width > 0:
                bit -= width
                to = low + (bit >> 3)
                part = np.int64(get_int(code, j)) & ((1 << width) - 1)
                put_int(to, 0, np.int64(get_int(to, 0)) | (part << (bit & 7)))
    for lane in range(LANES):
        put_int(scratch + 2 * most + raw + SLACK, lane, get_int(states, lane))
    return (scratch + most - word) >> 1, (scratch + 2 * most - beyond) >> 1


@kernel
def _decode_stream(
    body, words, beyonds, raw, channel, rows, steps, seed, limits, z, first, last, channels
) -> Any:  # fmt: skip
    """Write a stream's coefficients; whether everything there has been used, and no more."""
    contexts = np.empty(channels, np.int32)
    context = contexts.ctypes.data
    states = np.empty(LANES, np.int64)
    for lane in range(LANES):
        states[lane] = np.int64(get_int(body, lane)) & 0xFFFFFFFF
    word = body + STATES
    beyond = word + 2 * words
    low = beyond + 2 * beyonds
    used, escaped, bit, place = 0, 0, 0, 0
    for r in range(first, last):
        row, step = get_int(rows, r), get_float(steps, r)
        line = z + 4 * r * channels
        for j in range(channels):
            scale = scale_of(get_int(channel, j), row)
            put_int(context, j, context_of(scale, dither_of(r * channels + j, seed), row))
        for j in range(channels):
            at = np.int64(get_int(context, j)) * STRIDE
            lane = place & (LANES - 1)
            place += 1
            state = states[lane]
            slot = state & (TOTAL - 1)
            symbol = symbol_at(limits + 2 * at, slot)
            start = np.int64(get_half(limits, at + symbol))
            share = np.int64(get_half(limits, at + symbol + 1)) - start
            state = share * (state >> PRECISION) + slot - start
            empty = state < BEGIN
            fresh = state << 16 | np.int64(get_half(word, min(used, words)))
            state = fresh if empty else state
            used += empty
            states[lane] = state & 0xFFFFFFFF
            upper = symbol - MIDDLE
            if symbol == 0:
                upper = np.int64(np.int16(get_half(beyond, escaped))) if escaped < beyonds else 0
                escaped += 1
            put_int(line, j, upper)
        for j in range(channels):
            width = np.int64(raw_of(scale_of(get_int(channel, j), row)))
            if width > 0:
                at = min(bit >> 3, raw)
                part = (np.int64(get_int(low + at, 0)) & 0xFFFFFFFF) >> (bit & 7)
                put_int(line, j, np.int64(get_int(line, j)) << width | (part & ((1 << width) - 1)))
                bit += width
        for j in range(channels):
            put_float(line, j, number_of(get_int(line, j), dither_of(r * channels + j, seed), step))
    whole = used == words and escaped == beyonds and ((bit + 15) >> 4) * 2 == raw
    for lane in range(LANES):
        whole = whole and states[lane] == BEGIN
    return whole
