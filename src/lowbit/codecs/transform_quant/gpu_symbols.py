"""Symbols of `TransformQuant` on a GPU: operations on each coefficient, their tables, and streams of symbols.

Programs take a chunk of a stream each: consecutive coefficients. Only rANS itself takes a warp for each stream, and a
lane for each of its states.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

import functools
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.codecs.transform_quant import reference
from lowbit.kernels.gpu.numbers import of_bits

ZERO, NAN = tl.constexpr(reference.ZERO), tl.constexpr(reference.NAN)
LOWEST, HIGHEST, DEAD = tl.constexpr(reference.LOWEST), tl.constexpr(reference.HIGHEST), tl.constexpr(reference.DEAD)
DITHERS, MIDDLE, SYMBOLS = (tl.constexpr(n) for n in (reference.DITHERS, reference.MIDDLE, reference.SYMBOLS))
B0, B1, B2, B3, B4, B5, B6 = (tl.constexpr(border) for border in reference.BORDERS)
LEAST_STEP, MOST_STEP = tl.constexpr(reference.LEAST_STEP), tl.constexpr(reference.MOST_STEP)
FARTHEST = tl.constexpr(float(reference.FARTHEST))
MOST_LEVEL = tl.constexpr(reference.MOST_LEVEL)
HALF_QUARTER = tl.constexpr(reference.FINE // 8)
NOTHING = tl.constexpr(reference.CONTEXTS * reference.SYMBOLS)  # placeholder of a symbol that does not change a state
UNITS = tl.constexpr(256)  # of a bit, in `costs`
LANES, SLACK = tl.constexpr(reference.LANES), tl.constexpr(reference.SLACK)
ENTRY, BEGIN = tl.constexpr(reference.ENTRY), tl.constexpr(reference.BEGIN)
STATES = tl.constexpr(4 * reference.LANES)  # bytes
LIMIT, PRECISION, TOTAL = (tl.constexpr(n) for n in (reference.LIMIT, reference.PRECISION, reference.TOTAL))
MANY = tl.constexpr(1024)  # streams whose sizes are summed at a time


class Tables(NamedTuple):
    """Tables on a device.

    Attributes:
        mantissas, inverses: int32, bits of 2^(i / 64), and of one divided by it.
        shares: int64, one per symbol of each context, packed from low to high: a factor (32 bits), which with the shift
            divides by the symbol's share of the probability, its start (12), share (13), and shift. Last: `NOTHING`.
        quarters: int64, one per context: where its symbols 4, 8 and 12 begin, 16 bits each.
        within: int64, one per four symbols: where they begin, and the last place, 12 bits each.
        kept: float32, `reference.shares`.
        costs: int32, bits of each symbol of each context, and of what is sent with it, in `UNITS`.
    """

    mantissas: Tensor
    inverses: Tensor
    shares: Tensor
    quarters: Tensor
    within: Tensor
    kept: Tensor
    costs: Tensor


@functools.lru_cache(maxsize=8)
def tables_on(device: torch.device) -> Tables:
    """All of them."""
    limits = reference.limits()[:, : reference.SYMBOLS + 1].astype(np.int64)
    begin, share = limits[:, :-1].reshape(-1), np.diff(limits).reshape(-1)
    begin, share = np.append(begin, 0), np.append(share, reference.TOTAL)
    shift = np.ceil(np.log2(share)).astype(np.int64)
    factor = -(-(1 << 31 + shift) // share)
    quarters = sum(limits[:, 4 * i] << 16 * (i - 1) for i in (1, 2, 3))
    starts = limits[:, :-1].reshape(-1, 4)
    within = sum(starts[:, i] << 12 * i for i in range(4)) + (limits[:, 4::4].reshape(-1) - 1 << 48)
    mantissas = reference._mantissas(torch.device("cpu"))
    made = (
        mantissas.view(torch.int32),
        mantissas.reciprocal().view(torch.int32),
        factor | begin << 32 | share << 44 | shift << 57,
        quarters,
        within,
        reference.shares(),
        np.rint(reference.symbol_costs().reshape(-1) * UNITS.value).astype(np.int32),
    )
    return Tables(*(torch.as_tensor(table).to(device) for table in made))


@triton.jit
def elements(rows, stream_rows, chunks, C: tl.constexpr, BLOCK: tl.constexpr):
    """A program's stream, its coefficients' places in the tensor, rows and channels, and which of them exist."""
    stream, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    first = stream * stream_rows
    local = chunk * BLOCK + tl.arange(0, BLOCK)
    exists = local < tl.minimum(stream_rows, rows - first) * C
    return stream, first.to(tl.int64) * C + local, first + local // C, local % C, exists


@triton.jit
def seed_of(header):
    """Seed of the message's dither."""
    seed = tl.load(header).to(tl.uint32) * 0x9E3779B1
    seed += tl.load(header + 1).to(tl.uint32) * 0x85EBCA77
    seed += tl.load(header + 2).to(tl.uint32) * 0xC2B2AE3D
    return seed + tl.load(header + 3).to(tl.uint32) * 0x27D4EB2F


@triton.jit
def dither_of(index, seed):
    """`reference.dither`, int32."""
    above = (index >> 32).to(tl.uint32) * 0x9E3779B9
    h = index.to(tl.uint32) ^ (seed + above)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return ((h ^ (h >> 16)) >> 24).to(tl.int32)


@triton.jit
def scale_of(channel, token, step):
    """`reference.clipped`."""
    return tl.minimum(tl.maximum(channel - token - ((step + HALF_QUARTER) >> 4), LOWEST), HIGHEST)


@triton.jit
def drawn_of(middle, shares, scale):
    """`reference.drawn`."""
    size = tl.abs(middle)
    size = tl.maximum(size * tl.load(shares + (scale - LOWEST)), size - 0.5)
    return tl.where(middle < 0, -size, size)


@triton.jit
def context_of(channel, token, step, dither):
    """The table of each symbol, and how many lowest bits travel as they are (see `reference.contexts`)."""
    scale = scale_of(channel, token, step)
    scale = tl.where(token >= NAN, LOWEST, scale)
    raw = tl.maximum(scale, 0) >> 2
    group = tl.where(token >= NAN, DEAD, tl.where(scale >= 0, scale & 3, scale) - LOWEST)
    value = dither >> raw
    near = tl.minimum(value, 255 - value)
    place = (near >= B0).to(tl.int32) + (near >= B1).to(tl.int32) + (near >= B2).to(tl.int32)
    place += (near >= B3).to(tl.int32) + (near >= B4).to(tl.int32) + (near >= B5).to(tl.int32)
    place += (near >= B6).to(tl.int32)
    return group * DITHERS + tl.where(value < 128, place, DITHERS - 1 - place), raw


@triton.jit
def step_of(powers, token, by_norm, step, INVERSE: tl.constexpr):
    """Each token's step, by the table of mantissas, or one divided by it, by theirs; 0 if nothing is coded."""
    fine = step + 16 * tl.minimum(tl.maximum(by_norm, -4096), 4096)
    fine = tl.minimum(tl.maximum(fine, LEAST_STEP), MOST_STEP)
    octave = (fine >> 6) << 23
    bits = tl.load(powers + (fine & 63))
    if INVERSE:
        return of_bits(tl.where(token >= NAN, 0, bits - octave))
    else:
        bits = tl.where(token == NAN, 0x7FC00000, bits + octave)
        return of_bits(tl.where(token == ZERO, 0, bits))


@triton.jit
def code_of(value, inverse, dither):
    """The number of the cell that a coefficient falls into."""
    scaled = value * inverse + (dither.to(tl.float32) + 0.5) * (1 / 256)
    scaled = tl.minimum(tl.maximum(scaled, -FARTHEST), FARTHEST)
    code = scaled.to(tl.int32)
    return code - (code.to(tl.float32) > scaled).to(tl.int32)


@triton.jit
def symbol_of(code, context, raw):
    """Sixteen times the table, plus the symbol of a code's upper part."""
    symbol = (code >> raw) + MIDDLE
    return context * SYMBOLS + tl.where((symbol > 0) & (symbol < SYMBOLS), symbol, 0)


@triton.jit
def loaded(z, header, levels, tokens, norms, index, row, column, exists, BY_TOKEN: tl.constexpr):
    """Load coefficients (0 for unusable ones), the bytes of their scales and norms, and their dither."""
    level = tl.load(levels + column, mask=exists, other=0).to(tl.int32)
    token = tl.load(tokens + row, mask=exists, other=ZERO).to(tl.int32)
    norm = token * 0
    if BY_TOKEN:
        norm = tl.load(norms + row, mask=exists, other=0).to(tl.int32)
    value = tl.load(z + index, mask=exists & (token < NAN), other=0.0)
    return value, level, token, norm, dither_of(index, seed_of(header))


@triton.jit
def coded(value, below, token, norm, dither, inverses, level, largest_norm, step, dead):
    """Compute codes of coefficients, their contexts, and numbers of lowest bits; the code of `dead` ones is 0."""
    context, raw = context_of(level - below, token, step, dither)
    inverse = step_of(inverses, token, largest_norm - norm, step, True)
    return code_of(value, tl.where(dead, 0.0, inverse), dither), context, raw


@triton.jit
def body(streams, stream, count, end):
    """Locate a stream in the section, and read its sizes; all are 0 if it is not within the section.

    Args:
        streams: the section; count: of streams; end: of the section, without its slack.

    Returns:
        Its first byte; numbers of its words, its codes beyond the symbols, its bytes of lowest bits; whether it lies
        within the section.
    """
    table = streams.to(tl.pointer_type(tl.int32))
    start = tl.full((), 0, tl.int64) + 4 * ENTRY * count
    for first in range(0, stream, MANY):
        at, before = table + ENTRY * (first + tl.arange(0, MANY)), first + tl.arange(0, MANY) < stream
        words = tl.load(at, mask=before, other=0).to(tl.int64)
        beyond = tl.load(at + 1, mask=before, other=0).to(tl.int64)
        raw = tl.load(at + 2, mask=before, other=0).to(tl.int64)
        size = STATES + 2 * (words + beyond) + raw
        start += tl.sum(tl.where(before, tl.maximum(size, 0), 0), axis=0)
    words = tl.load(table + ENTRY * stream)
    beyond = tl.load(table + ENTRY * stream + 1)
    raw = tl.load(table + ENTRY * stream + 2)
    size = STATES + 2 * (words.to(tl.int64) + beyond) + raw
    inside = (words >= 0) & (beyond >= 0) & (raw >= 0) & (start + size <= end)
    inside = inside & (((start | raw) & 1) == 0)
    start = tl.where(inside, start, 4 * ENTRY * count)
    return start, tl.where(inside, words, 0), tl.where(inside, beyond, 0), tl.where(inside, raw, 0), inside


@triton.jit
def ranked(flags, lane):
    """Count the set flags of lower lanes, and of all lanes."""
    mask = tl.sum(flags.to(tl.uint32) << lane.to(tl.uint32), axis=0)
    return _ones(mask & ((tl.full((LANES,), 1, tl.uint32) << lane.to(tl.uint32)) - 1)), _ones(mask)


@triton.jit
def _ones(x):
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def encode_stream(symbols, shares, top, states, length):
    """Code a stream's symbols, from the last to the first.

    Args:
        symbols: its own; top: the end of its words, which fill from there; states: to be written.

    Returns:
        The number of words.
    """
    lane = tl.arange(0, LANES)
    state = tl.full((LANES,), BEGIN, tl.uint32)
    words = 0
    at = (length - 1) // LANES * LANES + lane
    share = tl.load(shares + _symbol(symbols, at, length))
    # Loads for the next steps are issued ahead.
    second = _symbol(symbols, at - LANES, length)
    third = _symbol(symbols, at - 2 * LANES, length)
    fourth = _symbol(symbols, at - 3 * LANES, length)
    for _ in range(0, length, LANES):
        fifth = _symbol(symbols, at - 4 * LANES, length)
        following = tl.load(shares + second)
        begin, part, shift = (share >> 32) & 0xFFF, (share >> 44) & 0x1FFF, (share >> 57) & 15
        part = part.to(tl.uint32)
        full = state >= part << LIMIT
        rank, count = ranked(full, lane)
        words += count
        tl.store(top - words + rank, (state & 0xFFFF).to(tl.int16), mask=full)
        state = tl.where(full, state >> 16, state)
        upper = tl.umulhi(state << 1, share.to(tl.uint32)) >> shift.to(tl.uint32)
        state = (upper << PRECISION) + (state - upper * part) + begin.to(tl.uint32)
        share, second, third, fourth = following, third, fourth, fifth
        at -= LANES
    tl.store(states + lane, state.to(tl.int32))
    return words


@triton.jit
def _symbol(symbols, at, length):
    return tl.load(symbols + at, mask=(at >= 0) & (at < length), other=NOTHING).to(tl.int32)


@triton.jit
def decode_stream(contexts, quarters, within, streams, start, words, length, escapes, BLOCK: tl.constexpr):
    """Put upper parts of codes in place of the contexts, int32; -8 for a code beyond the symbols.

    Args:
        contexts: of the stream; streams: the section; start: of the stream there, `words` of which follow its states.
        escapes: (chunks, LANES): how many codes beyond the symbols each lane has had before each chunk, to be written.

    Returns:
        Their number in the end, and whether words and states have come to their end.
    """
    lane = tl.arange(0, LANES)
    halves = (streams + start).to(tl.pointer_type(tl.int16))
    low = tl.load(halves + 2 * lane).to(tl.uint32) & 0xFFFF
    state = low | (tl.load(halves + 2 * lane + 1).to(tl.uint32) << 16)
    word = halves + 2 * LANES
    used = 0
    beyond = tl.zeros((LANES,), tl.int32)
    context = _context(contexts, lane, length)
    quarter = tl.load(quarters + context)
    second = _context(contexts, lane + LANES, length)
    third = _context(contexts, lane + 2 * LANES, length)
    fourth = _context(contexts, lane + 3 * LANES, length)
    for first in range(0, length, LANES):
        if first % BLOCK == 0:
            tl.store(escapes + first // BLOCK * LANES + lane, beyond)
        fifth = _context(contexts, first + 4 * LANES + lane, length)
        following = tl.load(quarters + second)
        exists = first + lane < length
        slot = (state & (TOTAL - 1)).to(tl.int32)
        place = (slot >= (quarter & 0xFFFF).to(tl.int32)).to(tl.int32)
        place += (slot >= ((quarter >> 16) & 0xFFFF).to(tl.int32)).to(tl.int32)
        place += (slot >= (quarter >> 32).to(tl.int32)).to(tl.int32)
        limits = tl.load(within + context * (SYMBOLS // 4) + place)
        one = ((limits >> 12) & 0xFFF).to(tl.int32)
        two = ((limits >> 24) & 0xFFF).to(tl.int32)
        three = ((limits >> 36) & 0xFFF).to(tl.int32)
        last = ((limits >> 48) & 0xFFF).to(tl.int32) + 1
        begin = tl.where(slot >= three, three, tl.where(slot >= two, two, one))
        begin = tl.where(slot >= one, begin, (limits & 0xFFF).to(tl.int32))
        end = tl.where(slot < one, one, tl.where(slot < two, two, tl.where(slot < three, three, last)))
        symbol = (slot >= one).to(tl.int32) + (slot >= two).to(tl.int32) + (slot >= three).to(tl.int32) + 4 * place
        following_state = (end - begin).to(tl.uint32) * (state >> PRECISION) + (slot - begin).to(tl.uint32)
        empty = exists & (following_state < BEGIN)
        rank, count = ranked(empty, lane)
        fresh = tl.load(word + used + rank, mask=empty & (used + rank < words), other=0).to(tl.uint32) & 0xFFFF
        following_state = tl.where(empty, (following_state << 16) | fresh, following_state)
        state = tl.where(exists, following_state, state)
        used += count
        beyond += (exists & (symbol == 0)).to(tl.int32)
        tl.store(contexts + first + lane, symbol - MIDDLE, mask=exists)
        context, quarter = second, following
        second, third, fourth = third, fourth, fifth
    wrong = tl.sum((state != BEGIN).to(tl.int32), axis=0)
    return tl.sum(beyond, axis=0), (used == words) & (wrong == 0)


@triton.jit
def _context(contexts, at, length):
    return tl.load(contexts + at, mask=at < length, other=0)
