"""Select the candidates of the low bits without sorting: find the threshold two bits at a time by counting."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

CHUNK = tl.constexpr(4096)
SHORT = tl.constexpr(1024)


@triton.jit
def ordered(key, exists):
    """Map int32 keys to unsigned numbers in the same order; those that do not exist come last."""
    return tl.where(exists, key.to(tl.uint32, bitcast=True) ^ 0x80000000, 0xFFFFFFFF)


@triton.jit
def _counts(u, threshold, unit, DIGITS: tl.constexpr):
    """Count the numbers below three thresholds, in DIGITS bits each of one sum."""
    kind = tl.int32 if DIGITS == 10 else tl.int64
    one = (u < threshold + unit).to(kind)
    two = (u < threshold + unit * 2).to(kind)
    three = (u < threshold + unit * 3).to(kind)
    total = tl.sum(one + (two << DIGITS) + (three << (2 * DIGITS)))
    mask: tl.constexpr = (1 << DIGITS) - 1
    return total & mask, (total >> DIGITS) & mask, total >> (2 * DIGITS)


@triton.jit
def flag_smallest(u, low):
    """Flag (int32) the `low` smallest numbers; of equal ones, the first."""
    DIGITS: tl.constexpr = 10 if u.shape[0] < 1024 else 21
    threshold = tl.full((), 0, tl.uint32)
    for i in range(16):
        unit = tl.full((), 1, tl.uint32) << (30 - 2 * i)
        one, two, three = _counts(u, threshold, unit, DIGITS)
        below = (one < low).to(tl.uint32) + (two < low).to(tl.uint32) + (three < low).to(tl.uint32)
        threshold += below * unit  # past those that have fewer than `low` numbers below
    below, equal = (u < threshold).to(tl.int32), (u == threshold).to(tl.int32)
    admitted = tl.cumsum(equal, axis=0) <= low - tl.sum(below)
    return below | (equal & admitted.to(tl.int32))


@triton.jit
def bitmap(flags, SIZE: tl.constexpr):
    """Flags (8 SIZE,) as SIZE bytes."""
    eights = tl.reshape(flags, (SIZE, 8)) << tl.arange(0, 8)[None, :]
    return tl.sum(eights, axis=1).to(tl.uint8)


@triton.jit
def _load_keys(keys, start, per_scope):
    exists = start + tl.arange(0, CHUNK) < per_scope
    return ordered(tl.load(keys + start + tl.arange(0, CHUNK), mask=exists, other=0), exists)


@triton.jit(do_not_specialize=["low", "flag_bytes", "per_scope"])
def select_long_scope(keys, widths, low, flag_bytes, per_scope):
    """Write the bitmap of a scope that is too long for registers: one program for each."""
    scope = tl.program_id(0).to(tl.int64)
    keys += scope * per_scope
    widths += scope * flag_bytes
    threshold = tl.full((), 0, tl.uint32)
    for d in range(16):
        unit = tl.full((), 1, tl.uint32) << (30 - 2 * d)
        ones, twos, threes = (tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64))
        start = tl.full((), 0, tl.int64)
        while start < per_scope:  # Triton's interpreter has no ranges with computed bounds
            one, two, three = _counts(_load_keys(keys, start, per_scope), threshold, unit, 21)
            ones, twos, threes = ones + one, twos + two, threes + three
            start += CHUNK
        threshold += ((ones < low).to(tl.uint32) + (twos < low).to(tl.uint32) + (threes < low).to(tl.uint32)) * unit
    left = tl.full((), 0, tl.int64) + low
    start = tl.full((), 0, tl.int64)
    while start < per_scope:
        left -= tl.sum((_load_keys(keys, start, per_scope) < threshold).to(tl.int32))
        start += CHUNK
    start = tl.full((), 0, tl.int64)
    while start < per_scope:
        u = _load_keys(keys, start, per_scope)
        equal = (u == threshold).to(tl.int32)
        admitted = tl.cumsum(equal, axis=0) <= left
        flags = (u < threshold).to(tl.int32) | (equal & admitted.to(tl.int32))
        left -= tl.sum(equal)
        byte = start // 8 + tl.arange(0, CHUNK // 8)
        tl.store(widths + byte, bitmap(flags, CHUNK // 8), mask=byte < flag_bytes)
        start += CHUNK


@triton.jit
def _ones(bits):
    """How many bits of each byte are set."""
    bits = (bits & 0x55) + ((bits >> 1) & 0x55)
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    return (bits & 15) + (bits >> 4)


@triton.jit
def count_before(widths, count):
    """Count the set flags among a bitmap's first `count`."""
    total, start = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    byte = tl.arange(0, CHUNK)
    while start < count:
        left = tl.minimum(tl.maximum(count - start - 8 * byte, 0), 8)
        bits = tl.load(widths + start // 8 + byte, mask=left > 0, other=0).to(tl.int32)
        total += tl.sum(_ones(bits & ((1 << left) - 1)))
        start += 8 * CHUNK
    return total


@triton.jit
def count_both(widths, ahead, count):
    """Count the set flags among a bitmap's first `ahead`, and among its first `count`, in one pass."""
    some, total = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    start, byte = tl.full((), 0, tl.int64), tl.arange(0, SHORT)
    while start < count:
        left = tl.minimum(tl.maximum(count - start - 8 * byte, 0), 8)
        bits = tl.load(widths + start // 8 + byte, mask=left > 0, other=0).to(tl.int32)
        total += tl.sum(_ones(bits & ((1 << left) - 1)))
        left = tl.minimum(tl.maximum(ahead - start - 8 * byte, 0), 8)
        some += tl.sum(_ones(bits & ((1 << left) - 1)))
        start += 8 * SHORT
    return some, total


@triton.jit
def store_bitmap(
    flags, widths, per_scope, flag_bytes,
    C: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """Write the flags of a program's tiles, which make up a scope."""
    if C % TILE > 0:  # a ragged last tile is not a candidate
        full: tl.constexpr = C // TILE
        candidate = tl.arange(0, NT)
        index = tl.minimum(candidate // full * T + candidate % full, NT - 1)
        flags = tl.where(candidate < per_scope, tl.gather(flags, index, axis=0), 0)
    if NT >= 8:
        byte = tl.arange(0, NT // 8)
        packed = bitmap(flags, NT // 8)
    else:
        byte = tl.arange(0, 1)
        packed = tl.sum(flags << tl.arange(0, NT), axis=0, keep_dims=True).to(tl.uint8)
    scope = tl.program_id(0).to(tl.int64)
    tl.store(widths + scope * flag_bytes + byte, packed, mask=byte < flag_bytes)


@triton.jit
def load_flags(
    widths, first, row, t, exists, length, flag_bytes,
    C: tl.constexpr, TILE: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Load the flags of a program's tiles from their bitmaps."""
    full: tl.constexpr = C // TILE
    if BY_TOKEN:
        token = first + row
        scope, candidate = token // length, token % length
    else:
        scope = tl.program_id(0).to(tl.int64)
        candidate = row * full + t
        exists = exists & (t < full)
    byte = tl.load(widths + scope * flag_bytes + candidate // 8, mask=exists, other=0).to(tl.int32)
    return (byte >> (candidate % 8).to(tl.int32)) & 1


@triton.jit
def checked_flags(
    widths, first, row, t, exists, length, low, low_last, flag_bytes, rows,
    C: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Load the flags of an untrusted payload, `low_before`, and whether each tile's scope is intact.

    A scope is intact if it has the number of flags that the geometry requires. If not, its first candidates are flagged
    instead: with a wrong number of flags, positions of codes could be beyond the payload.
    """
    flags = load_flags(widths, first, row, t, exists, length, flag_bytes, C, TILE, BY_TOKEN)
    full: tl.constexpr = C // TILE
    if BY_TOKEN:
        token = first + row
        scope, last = first // length, (tl.minimum(first + ROWS, rows) - 1) // length
        ahead = first % length
        some, given = count_both(widths + scope * flag_bytes, ahead, length)
        before = scope * low + tl.where(given == low, some, tl.minimum(ahead, low))
        intact = (given == low) | (row < 0)
        while scope < last:
            scope += 1
            _, given = count_both(widths + scope * flag_bytes, 0, length)
            whole = given == low
            intact = tl.where(token // length == scope, whole, intact)
        flags = tl.where(intact, flags, (token % length < low).to(tl.int32))
    else:
        before = low_before(widths, first, length, low, flag_bytes, False)
        given = tl.where(tl.program_id(0) == tl.num_programs(0) - 1, low_last, low)
        intact = (tl.sum(flags, axis=0) == given) | (row < 0)
        chosen = exists & (t < full) & (row * full + t < given)
        flags = tl.where(intact, flags, chosen.to(tl.int32))
    return flags, before, intact


@triton.jit
def low_before(widths, first, length, low, flag_bytes, BY_TOKEN: tl.constexpr):
    """Count the candidates before a program's first token that have the low bits."""
    if BY_TOKEN:
        scope = first // length
        return scope * low + count_before(widths + scope * flag_bytes, first % length)
    else:
        return tl.program_id(0).to(tl.int64) * low


@triton.jit
def code_offsets(
    first, bits, v, before, exists, C: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr,
    HIGH: tl.constexpr, LOW: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Start of each tile's codes in their section: (NT, 1) int64."""
    if C % TILE > 0:
        ragged: tl.constexpr = (C % TILE + 7) // 8
        eighths: tl.constexpr = C // TILE * (TILE // 8) + ragged
        saved: tl.constexpr = (eighths if BY_TOKEN else TILE // 8) * (HIGH - LOW)
        size = tl.where(exists, bits * tl.sum(v, axis=1), 0)
        start = first * (eighths * HIGH) - before * saved
        return (start + (tl.cumsum(size, axis=0) - size))[:, None]
    else:  # in eighths, which shows the compiler their alignment
        size = tl.where(exists, bits, 0)
        saved: tl.constexpr = (T if BY_TOKEN else 1) * (HIGH - LOW)
        start = first * (T * HIGH) - before * saved
        return ((start + (tl.cumsum(size, axis=0) - size)) * (TILE // 8))[:, None]
