"""Streams of symbols of `TransformQuant` on a GPU: rANS, a warp for each stream, a lane for each of its states.

Work that does not depend on states is done before and after, by programs that take a chunk of a stream each.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.codecs.transform_quant import layout, reference, tables
from lowbit.codecs.transform_quant.gpu_symbols import MIDDLE, NOTHING, SYMBOLS

LANES, SLACK = tl.constexpr(layout.LANES), tl.constexpr(layout.SLACK)
ENTRY, BEGIN = tl.constexpr(reference.ENTRY), tl.constexpr(reference.BEGIN)
STATES = tl.constexpr(4 * layout.LANES)  # bytes
LIMIT, PRECISION, TOTAL = (tl.constexpr(n) for n in (reference.LIMIT, tables.PRECISION, tables.TOTAL))
MANY = tl.constexpr(1024)  # streams whose sizes are summed at a time


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
    share = _share(symbols, shares, at, length)
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
    symbol = tl.load(symbols + at, mask=(at >= 0) & (at < length), other=NOTHING)
    return symbol.to(tl.int32)


@triton.jit
def _share(symbols, shares, at, length):
    return tl.load(shares + _symbol(symbols, at, length))


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
