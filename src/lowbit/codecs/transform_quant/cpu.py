"""`TransformQuant` on CPUs: streams of symbols, each coded by one thread, row after row.

Elementwise work on coefficients is vectorised, row after row. The entropy coder processes symbols one by one in a loop
that does nothing else; it takes the states of `LANES` coders in turn, so that a processor overlaps several.
"""

import ctypes
import struct
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.transform_quant.cpu_basis import Transform, follow, renew
from lowbit.codecs.transform_quant.cpu_fit import first_step, fitted, own_squares, token_steps
from lowbit.codecs.transform_quant.cpu_symbols import (
    DEAD_TOKEN,
    NEUTRAL,
    code_of,
    coding_of,
    context_of,
    decoded_eight,
    dither_of,
    drawn,
    encoded_eight,
    middle_of,
    padded_limits,
    raw_of,
    scale_of,
    shares,
    symbol_of,
    word_places,
)
from lowbit.codecs.transform_quant.reference import (
    BEGIN,
    CONTEXTS,
    ENTRY,
    FINE,
    LANES,
    LEAST_STEP,
    MIDDLE,
    MOST_LEVEL,
    MOST_STEP,
    SLACK,
    TransformGeometry,
    body_nbytes,
)
from lowbit.kernels.cpu.jit import helper, kernel, over_rows
from lowbit.kernels.cpu.memory import (
    Room,
    address,
    get_byte,
    get_float,
    get_half,
    get_int,
    put_float,
    put_half,
    put_int,
)

__all__ = ["Transform", "decode", "encode", "follow", "own_squares", "renew"]

STATES = 4 * LANES
LISTS = 16  # of channels with lowest bits, by a row's addend modulo this
NO_ROW = np.int32(DEAD_TOKEN - 1)
BEYOND = -MIDDLE  # marks a code beyond the symbols


def encode(z: Tensor, header: Tensor, payload: Tensor, geo: TransformGeometry) -> None:
    """Encode in the reference's format; the chosen steps may differ."""
    fit, seed = fitted(z, payload, geo), seed_of(header)
    room = geo.layout.sizes["streams"] - SLACK - 4 * ENTRY * geo.streams
    step = first_step(fit, z, seed, room, geo)
    while True:
        steps = token_steps(fit.token, fit.norm, fit.largest, step, geo)
        rows, _, inverse = steps.at
        table, rooms = _coded(z, seed, fit.channel, rows, inverse, geo)
        size = sum(body_nbytes(*entry) for entry in table)
        if size <= room or step >= MOST_STEP:
            break
        step = min(MOST_STEP, step + 1 + min(FINE, 8 * FINE * (size - room) // z.numel()))
    if size > room:
        raise AssertionError("the largest step leaves nothing but dead symbols, and the layout has room for them")
    start = payload.data_ptr() + geo.layout.offsets["streams"]
    scalars = (fit.highest, fit.largest, step, 0)
    for to, numbers in ((payload.data_ptr() + geo.layout.offsets["scalars"], scalars), (start, [*chain(*table)])):
        ctypes.memmove(to, struct.pack(f"<{len(numbers)}i", *numbers), 4 * len(numbers))
    start += 4 * ENTRY * geo.streams
    for i, ((words, beyond, raw), held) in enumerate(zip(table, rooms, strict=True)):
        (codes, symbols, taken, states), (first, last) = held.at, _rows_of(i, geo)
        ctypes.memmove(start, states, STATES)
        ctypes.memmove(start + STATES, taken + 2 * ((last - first) * geo.channels - words), 2 * words)
        start += STATES + 2 * words
        _put_rest(codes, symbols, first, last, geo.channels, fit.channel, rows, start, beyond)
        start += 2 * beyond + raw


def decode(payload: Tensor, header: Tensor, z: Tensor, geo: TransformGeometry) -> Tensor:
    """The reference's numbers."""
    start, at, size = payload.data_ptr(), geo.layout.offsets, geo.layout.sizes["streams"]
    scalars = ctypes.string_at(start + at["scalars"], 16)
    highest, largest, step, _ = struct.unpack("<4i", scalars)
    step, highest = min(max(step, LEAST_STEP), MOST_STEP), min(max(highest, -MOST_LEVEL), MOST_LEVEL)
    room = Room(4 * geo.channels)
    (channel,) = room.at
    _channels_of(start + at["levels"], geo.channels, highest, channel)
    by_token = token_steps(start + at["tokens"], start + at["norms"], largest, step, geo)
    rows, steps, _ = by_token.at
    address_ = start + at["streams"]
    numbers = struct.unpack(f"<{ENTRY * geo.streams}i", ctypes.string_at(address_, 4 * ENTRY * geo.streams))
    table = [numbers[i : i + ENTRY] for i in range(0, len(numbers), ENTRY)]
    starts = [4 * ENTRY * geo.streams]
    for entry in table:
        starts.append(starts[-1] + (body_nbytes(*entry) if min(entry) >= 0 else size))
    if starts[-1] > size - SLACK:
        return torch.zeros((), dtype=torch.bool, device="cpu")
    whole = [False] * geo.streams
    seed, limits, places = seed_of(header), address(padded_limits), address(word_places)

    def work(begin: int, end: int) -> None:
        for i in range(begin, end):
            first, last = _rows_of(i, geo)
            words, beyond, raw = table[i]
            word, count = address_ + starts[i] + STATES, (last - first) * geo.channels
            line, room = z.data_ptr() + 4 * first * geo.channels, Room(STATES, 64)
            states, spare = room.at
            ctypes.memmove(states, word - STATES, STATES)
            _contexts_of(first, last, geo.channels, channel, rows, seed, z.data_ptr())
            given = _given_out(states, word, words, limits, places, count, line, spare)
            left = _numbers_of(
                first, last, geo.channels, channel, rows, steps, seed, geo.by_token, word + 2 * words, beyond, raw,
                z.data_ptr(),
            )  # fmt: skip
            whole[i] = given == (words, True) and left == (raw, beyond)

    over_rows(work, geo.streams, z.nbytes)
    return torch.tensor(all(whole), device="cpu")


def seed_of(header: Tensor) -> int:
    """Seed of the dither, as in the reference, as a signed 32-bit number."""
    number, before, training, own = header.tolist()
    seed = number * 0x9E3779B1 + before * 0x85EBCA77 + training * 0xC2B2AE3D + own * 0x27D4EB2F
    return (seed & 0xFFFFFFFF) - ((seed & 0x80000000) << 1)


def _rows_of(stream: int, geo: TransformGeometry) -> tuple[int, int]:
    return stream * geo.stream_rows, min(geo.rows, (stream + 1) * geo.stream_rows)


def _coded(
    z: Tensor, seed: int, channel: int, rows: int, inverse: int, geo: TransformGeometry
) -> tuple[list[tuple[int, int, int]], list[Room]]:
    """Code streams.

    Returns:
        Of each, its numbers of words, of codes beyond the symbols and of bytes of lowest bits; and what holds its
        codes, its symbols, its words at the end of their place, and the states.
    """
    table: list[Any] = [None] * geo.streams
    rooms: list[Any] = [None] * geo.streams

    def work(begin: int, end: int) -> None:
        for i in range(begin, end):
            first, last = _rows_of(i, geo)
            count = (last - first) * geo.channels
            rooms[i] = Room(4 * count, 2 * count + 14, 2 * count, STATES)
            codes, symbols, words, states = rooms[i].at
            bits, beyond = _symbols_of(
                z.data_ptr(), first, last, geo.channels, channel, rows, inverse, seed, codes, symbols
            )
            used = _taken_in(symbols, count, address(shares), words, states)
            table[i] = used, beyond, -(-bits // 16) * 2

    over_rows(work, geo.streams, z.nbytes)
    return table, rooms


@kernel
def _channels_of(level, channels, highest, out) -> None:
    """Scales of channels, int32."""
    for j in range(channels):
        put_int(out, j, highest - np.int64(get_byte(level, j)))


@kernel
def _symbols_of(z, first, last, channels, channel, rows, inverse, seed, codes, symbols) -> Any:
    """Compute codes and symbols of rows; return the number of uncoded bits, and of codes beyond the symbols."""
    bits, beyond, (lines, keys) = 0, 0, _lines(channels)
    for r in range(first, last):
        row, scaled = get_int(rows, r), get_float(inverse, r)
        line, at = z + 4 * r * channels, (r - first) * channels
        coding = _codings(lines, keys, channel, row, channels)
        for j in range(channels):
            dither, how = dither_of(r * channels, j, seed), coding[j]
            value = code_of(get_float(line, j), scaled, dither)
            put_int(codes, at + j, value)
            put_half(symbols, at + j, symbol_of(value, how, context_of(how, dither)))
        for j in range(channels):
            bits += np.int64(raw_of(coding[j]))
        beyond += _beyond(symbols + 2 * at, channels)
    return bits, beyond


@helper
def _lines(channels) -> Any:
    """Room for a line of int32 numbers by channel for each of some addends of rows, and the addends, of which none."""
    return np.empty((LISTS, channels), np.int32), np.full(LISTS, NO_ROW)


@helper
def _codings(lines, keys, channel, row, channels) -> Any:
    """How the channels of rows of this addend are coded."""
    slot = np.int64(row) & (LISTS - 1)
    coding = lines[slot]
    if keys[slot] != row:
        keys[slot] = row
        for j in range(channels):
            coding[j] = coding_of(scale_of(get_int(channel, j), row), row)
    return coding


@kernel
def _taken_in(symbols, count, table, words, states) -> Any:
    """Encode symbols into states from the last to the first; fill `words` from its end, and return their number."""
    end = words + 2 * count
    for lane in range(LANES):
        put_int(states, lane, BEGIN)
    for place in range(count, (count + 7) // 8 * 8):
        put_half(symbols, place, NEUTRAL)
    for place in range((count - 1) // 8 * 8, -1, -8):
        end -= 2 * encoded_eight(states + 4 * (place & (LANES - 1)), symbols + 2 * place, table, end)
    return (words + 2 * count - end) >> 1


@helper
def _width_of(channel, j, row) -> Any:
    return np.int64(raw_of(coding_of(scale_of(get_int(channel, j), row), row)))


@helper
def _wide_in(lists, keys, counts, channel, row, channels) -> Any:
    """The line of `lists` that holds the channels with lowest bits in rows of this addend: 32 channel + width."""
    slot = np.int64(row) & (LISTS - 1)
    if keys[slot] != row:
        wide = 0
        for j in range(channels):
            width = _width_of(channel, j, row)
            lists[slot, wide] = j << 5 | width
            wide += width > 0
        keys[slot], counts[slot] = row, wide
    return slot


@kernel
def _put_rest(codes, symbols, first, last, channels, channel, rows, beyond, count) -> None:
    """Write the `count` codes beyond the symbols, then the lowest bits of all codes."""
    low, held, bits, at = beyond + 2 * count, 0, 0, 0
    lists, keys, counts = np.empty((LISTS, channels), np.int64), np.full(LISTS, NO_ROW), np.empty(LISTS, np.int64)
    for r in range(first, last):
        row = get_int(rows, r)
        slot = _wide_in(lists, keys, counts, channel, row, channels)
        for k in range(counts[slot]):
            entry = lists[slot, k]
            width = entry & 31
            held |= (np.int64(get_int(codes, at + (entry >> 5))) & ((1 << width) - 1)) << bits
            bits += width
            put_int(low, 0, held)
            low, held, bits = low + (bits >> 3), held >> (bits & 56), bits & 7
        here = _beyond(symbols + 2 * at, channels) if count > 0 else 0
        j = 0
        while here > 0:
            if get_half(symbols, at + j) & 15 == 0:
                width = _width_of(channel, j, row)
                put_half(beyond, 0, min(max(np.int64(get_int(codes, at + j)) >> width, -32768), 32767))
                beyond, here = beyond + 2, here - 1
            j += 1
        at += channels


@helper
def _beyond(symbols, count) -> Any:
    """How many of these symbols stand for codes beyond them."""
    beyond = 0
    for j in range(count):
        beyond += (np.int64(get_half(symbols, j)) & 15) == 0
    return beyond


@kernel
def _contexts_of(first, last, channels, channel, rows, seed, out) -> None:
    """Write the symbols' coding tables, int32, in the place of the coefficients."""
    lines, keys = _lines(channels)
    for r in range(first, last):
        row, line = get_int(rows, r), out + 4 * r * channels
        coding = _codings(lines, keys, channel, row, channels)
        for j in range(channels):
            put_int(line, j, context_of(coding[j], dither_of(r * channels, j, seed)))


@kernel
def _given_out(states, word, words, limits, places, count, out, spare) -> Any:
    """Replace the tables of codes by the codes' upper parts, and by `BEYOND` for codes beyond the symbols.

    Args:
        spare: 64 bytes, for the last words and tables, which eight symbols would read beyond.

    Returns:
        Words used, and whether all states have returned to their initial value.
    """
    used = 0
    for place in range(0, count, 8):
        line, at = out + 4 * place, word + 2 * used
        if used + 8 > words:
            at = spare + 48
            for k in range(8):
                put_half(at, k, get_half(word, used + k) if used + k < words else 0)
        if place + 8 > count:
            for k in range(8):
                put_int(spare, k, get_int(line, k) if place + k < count else CONTEXTS)
            used += decoded_eight(states + 4 * (place & (LANES - 1)), spare, limits, places, at)
            for k in range(count - place):
                put_int(line, k, get_int(spare, k))
        else:
            used += decoded_eight(states + 4 * (place & (LANES - 1)), line, limits, places, at)
    whole = True
    for lane in range(LANES):
        whole = whole and get_int(states, lane) == BEGIN
    return used, whole


@kernel
def _numbers_of(first, last, channels, channel, rows, steps, seed, draw, beyond, count, raw, out) -> Any:
    """Replace upper parts of codes by coefficients; return the numbers of bytes of lowest bits, and of codes beyond."""
    low, bit, left = beyond + 2 * count, 0, count
    lists, keys, counts = np.empty((LISTS, channels), np.int64), np.full(LISTS, NO_ROW), np.empty(LISTS, np.int64)
    for r in range(first, last):
        row, step, line = get_int(rows, r), get_float(steps, r), out + 4 * r * channels
        here = 0
        for j in range(channels):
            here += np.int64(get_int(line, j) == BEYOND)
        j = 0
        while here > 0:
            if get_int(line, j) == BEYOND:
                put_int(line, j, np.int64(np.int16(get_half(beyond, 0))) if left > 0 else 0)
                beyond, left, here = beyond + 2 * (left > 0), left - 1, here - 1
            j += 1
        slot = _wide_in(lists, keys, counts, channel, row, channels)
        for k in range(counts[slot]):
            entry = lists[slot, k]
            j, width = entry >> 5, entry & 31
            part = (np.int64(get_int(low + min(bit >> 3, raw), 0)) & 0xFFFFFFFF) >> (bit & 7)
            put_int(line, j, np.int64(get_int(line, j)) << width | (part & ((1 << width) - 1)))
            bit += width
        for j in range(channels):
            middle = middle_of(get_int(line, j), dither_of(r * channels, j, seed))
            if draw:
                middle = drawn(middle, scale_of(get_int(channel, j), row))
            put_float(line, j, middle * step)
    return ((bit + 15) >> 4) * 2, count - left
