"""`TransformQuant` on a GPU: a warp for each stream; everything else by programs that take a chunk of a stream.

The host never waits for the GPU, which decides itself which step fits: choices are int64 numbers in a plan on the
device, which later kernels read, and attempts that are not needed do nothing.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# PyTorch's matrix products and decomposition, with one row per direction.
from lowbit.codecs.transform_quant.basis import Transform, follow, renew
from lowbit.codecs.transform_quant.gpu_symbols import (
    ENTRY,
    HIGHEST,
    LANES,
    LEAST_STEP,
    LOWEST,
    MIDDLE,
    MOST_LEVEL,
    MOST_STEP,
    SLACK,
    STATES,
    SYMBOLS,
    UNITS,
    body,
    coded,
    context_of,
    decode_stream,
    dither_of,
    drawn_of,
    elements,
    encode_stream,
    loaded,
    scale_of,
    seed_of,
    step_of,
    symbol_of,
    tables_on,
)
from lowbit.codecs.transform_quant.memory import own_squares
from lowbit.codecs.transform_quant.reference import FINE, Fit, TransformGeometry, fitted
from lowbit.kernels.gpu.launch import launch, power_of_two_from
from lowbit.kernels.layout import ceil_div

__all__ = ["Transform", "decode", "encode", "follow", "own_squares", "renew"]

BLOCK = 1024  # coefficients of a chunk
WARPS = 4
ATTEMPTS = 4  # to fill the payload; those after one that fits take no time, and the last one always fits
# Positions in a plan: the largest scale and norm; the bits that a larger step saves; for each attempt its step, its
# largest scale and its bytes; and the sample's bits with each of the steps.
LEVEL, NORM, SLOPE, STEPS = (tl.constexpr(i) for i in (0, 1, 2, 4))
LEVELS, TOTALS, COSTS = (tl.constexpr(4 + i * ATTEMPTS) for i in (1, 2, 3))
LAST = tl.constexpr(ATTEMPTS - 1)
CANDIDATES = tl.constexpr(HIGHEST.value - LOWEST.value + 1)  # steps, by quarters of an octave
SAMPLE = 1 << 17  # fewest sampled coefficients, if there are as many
SAMPLED = 256  # coefficients of a sample per program
RESERVE = 0.004  # share of the payload that the first attempt leaves free
BEYOND_REACH = tl.constexpr(4096)  # quarters of an octave: a scale this much lower marks dead symbols
FINE_ = tl.constexpr(FINE)


def encode(z: Tensor, header: Tensor, payload: Tensor, geo: TransformGeometry) -> None:
    """Encode in the reference's format; the chosen steps may differ."""
    (fit, plan), table, section = planned(z, geo), tables_on(z.device), geo.layout.section
    section(payload, "levels").copy_(fit.levels)
    section(payload, "tokens").copy_(fit.tokens)
    if geo.by_token:
        section(payload, "norms").copy_(fit.norms)
    streams = section(payload, "streams").zero_()
    room = _end(geo) - 4 * ENTRY.value * geo.streams
    choose_step(fit, plan, z, header, room, geo)
    shape, programs, place = _shape(geo)
    by_chunk = [torch.empty(programs, dtype=torch.int32, device=z.device) for _ in range(2)]
    symbols, words = (torch.empty(z.numel(), dtype=torch.int16, device=z.device) for _ in range(2))
    states = torch.empty(geo.streams, LANES.value, dtype=torch.int32, device=z.device)
    what = z, header, fit.levels, fit.tokens, fit.norms, table.inverses, plan
    tokens, many = {"BY_TOKEN": geo.by_token}, {"CHUNKS": power_of_two_from(place[-1])}
    for number in range(ATTEMPTS):
        launch(_quantize, programs, WARPS, shape, *what, symbols, *by_chunk, number, room, *place, **tokens)
        launch(
            _encode, geo.streams, 1, shape | many, symbols, table.shares, words, states, *by_chunk, streams, plan,
            number, room, *place,
        )  # fmt: skip
    given = plan, streams, room, geo.streams, _end(geo)
    scalars = section(payload, "scalars", torch.int32)
    launch(_assemble, programs, WARPS, shape, words, states, scalars, *given, *place)
    launch(_pack, programs, WARPS, shape | many, *what, *by_chunk, *given[1:], *place, **tokens)


def decode(payload: Tensor, header: Tensor, z: Tensor, geo: TransformGeometry) -> Tensor:
    """The reference's numbers."""
    table, section = tables_on(z.device), geo.layout.section
    levels, tokens, scalars = section(payload, "levels"), section(payload, "tokens"), section(payload, "scalars")
    norms, streams = section(payload, "norms" if geo.by_token else "tokens"), section(payload, "streams")
    scalars, contexts = scalars.view(torch.int32), z.view(torch.int32)
    shape, programs, place = _shape(geo)
    raws = torch.empty(programs, dtype=torch.int32, device=z.device)
    escapes = torch.zeros(programs, LANES.value, dtype=torch.int32, device=z.device)  # also of streams left out
    whole = torch.empty(geo.streams, dtype=torch.bool, device=z.device)
    given, many = (streams, geo.streams, _end(geo)), {"CHUNKS": power_of_two_from(place[-1])}
    launch(_contexts, programs, WARPS, shape, contexts, header, levels, tokens, scalars, raws, *place)
    launch(
        _decode, geo.streams, 1, shape | many, contexts, table.quarters, table.within, raws, escapes, whole,
        *given, *place,
    )  # fmt: skip
    launch(
        _numbers, programs, WARPS, shape | many, z, header, levels, tokens, norms, table.mantissas, table.kept,
        scalars, raws, escapes, *given, *place, BY_TOKEN=geo.by_token,
    )  # fmt: skip
    return whole.all()


def _shape(geo: TransformGeometry) -> tuple[dict[str, Any], int, tuple[int, int, int]]:
    """Shape and number of the programs that take a chunk of a stream each, and the scan that finds their place."""
    chunks = ceil_div(geo.stream_rows * geo.channels, BLOCK)
    return {"C": geo.channels, "BLOCK": BLOCK}, chunks * geo.streams, (geo.rows, geo.stream_rows, chunks)


def _end(geo: TransformGeometry) -> int:
    """End of the streams in their section."""
    return geo.layout.sizes["streams"] - SLACK.value


NUMBERS = ("number", "room", "rows", "stream_rows", "chunks", "count", "end")
"""Arguments that change with a message's length: kernels are compiled once for all of them."""


@triton.jit(do_not_specialize=NUMBERS)
def _quantize(
    z, header, levels, tokens, norms, inverses, plan, symbols, escapes, raws, number, room,
    rows, stream_rows, chunks,
    C: tl.constexpr, BLOCK: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Compute the symbols of a chunk, and count its codes beyond the symbols and its lowest bits."""
    needed, step, level, dead = attempt(plan, number, room)
    if tl.program_id(0) == 0:
        tl.store(plan + STEPS + number, step.to(tl.int64))
        tl.store(plan + LEVELS + number, level.to(tl.int64))
    if needed:
        _, index, row, column, exists = elements(rows, stream_rows, chunks, C, BLOCK)
        value, below, token, norm, dither = loaded(
            z, header, levels, tokens, norms, index, row, column, exists, BY_TOKEN
        )
        largest_norm = tl.load(plan + NORM).to(tl.int32)
        code, context, raw = coded(value, below, token, norm, dither, inverses, level, largest_norm, step, dead)
        raw = tl.where(exists, raw, 0)
        symbol = symbol_of(code, context, raw)
        tl.store(symbols + index, symbol.to(tl.int16), mask=exists)
        beyond = exists & (symbol % SYMBOLS == 0)
        tl.store(escapes + tl.program_id(0), tl.sum(beyond.to(tl.int32), axis=0))
        tl.store(raws + tl.program_id(0), tl.sum(raw, axis=0))


@triton.jit(do_not_specialize=NUMBERS)
def _encode(
    symbols, shares, words, states, escapes, raws, streams, plan, number, room, rows, stream_rows, chunks,
    C: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Compute a stream's words and states, and its entry in the table."""
    needed, _, _, _ = attempt(plan, number, room)
    if needed:
        stream = tl.program_id(0)
        first, length = _span(stream, rows, stream_rows, C)
        count = encode_stream(symbols + first, shares, words + first + length, states + stream * LANES, length)
        i = tl.arange(0, CHUNKS)
        beyond = tl.sum(tl.load(escapes + stream * chunks + i, mask=i < chunks, other=0), axis=0)
        raw = tl.sum(tl.load(raws + stream * chunks + i, mask=i < chunks, other=0), axis=0)
        raw = (raw + 15) // 16 * 2
        entry = streams.to(tl.pointer_type(tl.int32)) + stream * ENTRY
        tl.store(entry, count)
        tl.store(entry + 1, beyond)
        tl.store(entry + 2, raw)
        size = STATES + 2 * (count.to(tl.int64) + beyond) + raw
        tl.atomic_add(plan + TOTALS + number, size)


@triton.jit
def _span(stream, rows, stream_rows, C: tl.constexpr):
    """A stream's first coefficient, and its number of coefficients."""
    first = stream * stream_rows
    return first.to(tl.int64) * C, tl.minimum(stream_rows, rows - first) * C


@triton.jit(do_not_specialize=NUMBERS)
def _assemble(
    words, states, scalars, plan, streams, room, count, end, rows, stream_rows, chunks,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put a chunk of words, a stream's states, and the message's scalars in their places."""
    stream, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    fits = tl.load(plan + TOTALS + LAST) <= room
    if tl.program_id(0) == 0:
        tl.store(scalars, tl.load(plan + LEVELS + LAST).to(tl.int32))
        tl.store(scalars + 1, tl.load(plan + NORM).to(tl.int32))
        tl.store(scalars + 2, tl.load(plan + STEPS + LAST).to(tl.int32))
        tl.store(scalars + 3, 0)
        if not fits:  # cannot happen; receivers would refuse it
            tl.store(streams.to(tl.pointer_type(tl.int32)), -1)
    if fits:
        start, some, _, _, _ = body(streams, stream, count, end)
        first, length = _span(stream, rows, stream_rows, C)
        to = (streams + start).to(tl.pointer_type(tl.int16))
        if chunk == 0:
            lane = tl.arange(0, LANES)
            state = tl.load(states + stream * LANES + lane)
            tl.store(to + 2 * lane, state.to(tl.int16))
            tl.store(to + 2 * lane + 1, (state >> 16).to(tl.int16))
        i = chunk * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + first + length - some + i, mask=i < some, other=0)
        tl.store(to + 2 * LANES + i, word, mask=i < some)


@triton.jit(do_not_specialize=NUMBERS)
def _pack(
    z, header, levels, tokens, norms, inverses, plan, escapes, raws, streams, room, count, end,
    rows, stream_rows, chunks,
    C: tl.constexpr, BLOCK: tl.constexpr, BY_TOKEN: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Add a chunk's codes beyond the symbols, and its lowest bits."""
    fits = tl.load(plan + TOTALS + LAST) <= room
    some = tl.load(escapes + tl.program_id(0)) + tl.load(raws + tl.program_id(0))
    if fits & (some > 0):
        step, level = tl.load(plan + STEPS + LAST).to(tl.int32), tl.load(plan + LEVELS + LAST).to(tl.int32)
        dead = level != tl.load(plan + LEVEL)
        stream, index, row, column, exists = elements(rows, stream_rows, chunks, C, BLOCK)
        value, below, token, norm, dither = loaded(
            z, header, levels, tokens, norms, index, row, column, exists, BY_TOKEN
        )
        largest_norm = tl.load(plan + NORM).to(tl.int32)
        code, context, raw = coded(value, below, token, norm, dither, inverses, level, largest_norm, step, dead)
        raw = tl.where(exists, raw, 0)
        start, words, beyonds, _, _ = body(streams, stream, count, end)
        to = streams.to(tl.pointer_type(tl.int32))
        beyond = exists & (symbol_of(code, context, raw) % SYMBOLS == 0)
        upper = tl.minimum(tl.maximum(code >> raw, -32768), 32767) & 0xFFFF
        rank = tl.cumsum(beyond.to(tl.int32), axis=0) - 1 + _before(escapes, stream, chunks, CHUNKS)
        half = start // 2 + 2 * LANES + words + rank
        tl.atomic_or(to + half // 2, upper << (half % 2 * 16).to(tl.int32), mask=beyond)
        bit = 8 * (start + STATES) + 16 * (words + beyonds).to(tl.int64)
        bit += tl.cumsum(raw, axis=0) - raw + _before(raws, stream, chunks, CHUNKS)
        part = (code & ((1 << raw) - 1)).to(tl.int64) << (bit & 31)
        tl.atomic_or(to + bit // 32, part.to(tl.int32), mask=raw > 0)
        tl.atomic_or(to + bit // 32 + 1, (part >> 32).to(tl.int32), mask=(part >> 32) > 0)


@triton.jit
def _before(counts, stream, chunks, CHUNKS: tl.constexpr):
    """The sum of the counts of a stream's chunks before this program's."""
    i = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(counts + stream * chunks + i, mask=i < tl.program_id(0) % chunks, other=0), axis=0)


@triton.jit
def _scalars(scalars):
    """A message's largest scale and norm, and its step."""
    level = tl.minimum(tl.maximum(tl.load(scalars), -MOST_LEVEL), MOST_LEVEL)
    step = tl.minimum(tl.maximum(tl.load(scalars + 2), LEAST_STEP), MOST_STEP)
    return level, tl.load(scalars + 1), step


@triton.jit(do_not_specialize=NUMBERS)
def _contexts(
    contexts, header, levels, tokens, scalars, raws, rows, stream_rows, chunks, C: tl.constexpr, BLOCK: tl.constexpr
):
    """Put each coefficient's context in its place, and count a chunk's lowest bits."""
    _, index, row, column, exists = elements(rows, stream_rows, chunks, C, BLOCK)
    level, _, step = _scalars(scalars)
    token = tl.load(tokens + row, mask=exists, other=255).to(tl.int32)
    channel = level - tl.load(levels + column, mask=exists, other=0).to(tl.int32)
    context, raw = context_of(channel, token, step, dither_of(index, seed_of(header)))
    tl.store(contexts + index, context, mask=exists)
    tl.store(raws + tl.program_id(0), tl.sum(tl.where(exists, raw, 0), axis=0))


@triton.jit(do_not_specialize=NUMBERS)
def _decode(
    contexts, quarters, within, raws, escapes, whole, streams, count, end, rows, stream_rows, chunks,
    C: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Put upper parts of a stream's codes in place of their contexts."""
    stream = tl.program_id(0)
    start, words, beyonds, raw, inside = body(streams, stream, count, end)
    if inside:
        first, length = _span(stream, rows, stream_rows, C)
        by_lane = escapes + stream.to(tl.int64) * chunks * LANES
        used, ended = decode_stream(contexts + first, quarters, within, streams, start, words, length, by_lane, BLOCK)
        i = tl.arange(0, CHUNKS)
        bits = tl.sum(tl.load(raws + stream * chunks + i, mask=i < chunks, other=0), axis=0)
        inside = ended & (used == beyonds) & ((bits + 15) // 16 * 2 == raw)
    tl.store(whole + stream, inside)


@triton.jit(do_not_specialize=NUMBERS)
def _numbers(
    z, header, levels, tokens, norms, mantissas, kept, scalars, raws, escapes, streams, count, end, rows, stream_rows,
    chunks, BY_TOKEN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Put a chunk's coefficients in place of the upper parts of their codes."""
    stream, index, row, column, exists = elements(rows, stream_rows, chunks, C, BLOCK)
    level, largest_norm, step = _scalars(scalars)
    token = tl.load(tokens + row, mask=exists, other=255).to(tl.int32)
    by_norm = token * 0
    if BY_TOKEN:
        by_norm = largest_norm - tl.load(norms + row, mask=exists, other=0).to(tl.int32)
    channel = level - tl.load(levels + column, mask=exists, other=0).to(tl.int32)
    dither = dither_of(index, seed_of(header))
    _, raw = context_of(channel, token, step, dither)
    raw = tl.where(exists, raw, 0)

    start, words, beyonds, size, _ = body(streams, stream, count, end)
    code = tl.load(z.to(tl.pointer_type(tl.int32)) + index, mask=exists, other=0)
    halves = (streams + start).to(tl.pointer_type(tl.int16)) + 2 * LANES + words
    beyond = exists & (code == -MIDDLE)
    lane = tl.arange(0, LANES)
    rank = tl.sum(tl.load(escapes + tl.program_id(0).to(tl.int64) * LANES + lane), axis=0)
    rank += tl.cumsum(beyond.to(tl.int32), axis=0) - 1
    upper = tl.load(halves + rank, mask=beyond & (rank >= 0) & (rank < beyonds), other=0).to(tl.int32)
    code = tl.where(beyond, upper, code) << raw

    bit = tl.cumsum(raw, axis=0) - raw + _before(raws, stream, chunks, CHUNKS)
    halves += beyonds
    half = bit // 16
    low = tl.zeros((BLOCK,), tl.int64)
    for i in tl.static_range(3):
        part = tl.load(halves + half + i, mask=(raw > 0) & (half + i < size // 2), other=0).to(tl.int64)
        low |= (part & 0xFFFF) << 16 * i
    code |= (low >> (bit & 15)).to(tl.int32) & ((1 << raw) - 1)

    value = code.to(tl.float32) + (127.5 - dither.to(tl.float32)) * (1 / 256)
    if BY_TOKEN:
        value = drawn_of(value, kept, scale_of(channel, token, step))
    value *= step_of(mantissas, token, by_norm, step, False)
    tl.store(z + index, value, mask=exists)


def planned(z: Tensor, geo: TransformGeometry) -> tuple[Fit, Tensor]:
    """Fit scales with float32 sums, and put the largest ones into a new plan."""
    fit = fitted(z, geo, torch.float32)
    plan = torch.zeros(COSTS.value + CANDIDATES.value, dtype=torch.int64, device=z.device)
    plan[LEVEL.value] = fit.highest
    if geo.by_token:
        plan[NORM.value] = fit.largest
    return fit, plan


def choose_step(fit: Fit, plan: Tensor, z: Tensor, header: Tensor, room: int, geo: TransformGeometry) -> None:
    """Put the first attempt's step into the plan, from the bits of a sample that stands for the message."""
    table = tables_on(z.device)
    every = max(1, z.numel() // SAMPLE)
    size = ceil_div(z.numel(), every)
    launch(
        _count, ceil_div(size, SAMPLED), 2, {"C": geo.channels, "BLOCK": SAMPLED}, z, header, fit.levels, fit.tokens,
        fit.norms, table.inverses, table.costs, plan, z.numel(), every, BY_TOKEN=geo.by_token,
    )  # fmt: skip
    wanted = 8 * (room - 4 * LANES.value * geo.streams) * (1 - RESERVE)
    launch(_choose, 1, 1, {}, plan, float(max(0.0, wanted)), z.numel() / size)


@triton.jit(do_not_specialize=["count", "every"])
def _count(
    z, header, levels, tokens, norms, inverses, costs, plan, count, every,
    BY_TOKEN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up a sample block's bits with each candidate step: one coefficient at a random place of each run."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = place.to(tl.uint32) * 0x9E3779B1
    h = (h ^ (h >> 15)) * 0x846CA68B
    index = place * every + ((h >> 8) % every.to(tl.uint32)).to(tl.int64)
    exists = index < count
    row, column = (index // C).to(tl.int32), (index % C).to(tl.int32)
    value, below, token, norm, dither = loaded(z, header, levels, tokens, norms, index, row, column, exists, BY_TOKEN)
    level, largest_norm = tl.load(plan + LEVEL).to(tl.int32), tl.load(plan + NORM).to(tl.int32)
    for k in range(CANDIDATES):
        step = tl.minimum(tl.maximum((level - HIGHEST + k) * 16, LEAST_STEP), MOST_STEP)
        code, context, raw = coded(value, below, token, norm, dither, inverses, level, largest_norm, step, False)
        cost = tl.load(costs + symbol_of(code, context, raw)) + UNITS * raw
        tl.atomic_add(plan + COSTS + k, tl.sum(tl.where(exists, cost, 0), axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["wanted", "share"])
def _choose(plan, wanted, share):
    """Return the smallest step that takes at most `wanted` bits, by linear interpolation between candidates."""
    k = tl.arange(0, 128)
    bits = tl.load(plan + COSTS + k, mask=k < CANDIDATES, other=0).to(tl.float32) * (share / UNITS)
    at = tl.min(tl.where((bits <= wanted) & (k < CANDIDATES), k, CANDIDATES - 1), axis=0)
    here = tl.sum(tl.where(k == at, bits, 0.0), axis=0)
    before = tl.sum(tl.where(k == at - 1, bits, 0.0), axis=0)
    falling = tl.maximum(before - here, 1.0)
    back = tl.minimum(tl.maximum((wanted - here) * 16 / falling, 0.0), 15.0)
    level = tl.load(plan + LEVEL)
    step = (level - HIGHEST + at) * 16 - tl.where(at > 0, back.to(tl.int32), 0)
    tl.store(plan + SLOPE, tl.maximum(falling * (1 / 16), 1.0).to(tl.int64))
    tl.store(plan + STEPS, tl.minimum(tl.maximum(step, LEAST_STEP), MOST_STEP))
    tl.store(plan + LEVELS, level)


@triton.jit
def attempt(plan, number, room):
    """Whether the attempt of this number is needed; its step, its largest scale, and whether no coefficient is coded.

    The last one sends dead symbols alone.
    """
    before = tl.maximum(number - 1, 0)
    step, level = tl.load(plan + STEPS + before).to(tl.int32), tl.load(plan + LEVELS + before).to(tl.int32)
    excess = tl.load(plan + TOTALS + before) - room
    needed = (number == 0) | (excess > 0)
    if number > 0:
        more = 1 + 8 * tl.maximum(excess, 0) // tl.load(plan + SLOPE)
        more = tl.where(number == 1, tl.minimum(more, FINE_), FINE_).to(tl.int32)
        step = tl.where(needed & (number < LAST), tl.minimum(step + more, MOST_STEP), step)
    dead = needed & (number == LAST)
    return needed, step, tl.where(dead, level - BEYOND_REACH, level), dead
