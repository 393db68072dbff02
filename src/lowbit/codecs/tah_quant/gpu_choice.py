"""Choose the candidates of the low bits without sorting: find the threshold two bits at a time by counting."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

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
def _raised(threshold, unit, one, two, three, low):
    """Raise the threshold past those of the three that have fewer than `low` numbers below."""
    below = (one < low).to(tl.uint32) + (two < low).to(tl.uint32) + (three < low).to(tl.uint32)
    return threshold + below * unit


@triton.jit
def smallest(u, low):
    """Flag (int32) the `low` smallest numbers; of equal ones, the first."""
    DIGITS: tl.constexpr = 10 if u.shape[0] < 1024 else 21
    threshold = tl.full((), 0, tl.uint32)
    for i in range(16):
        unit = tl.full((), 1, tl.uint32) << (30 - 2 * i)
        one, two, three = _counts(u, threshold, unit, DIGITS)
        threshold = _raised(threshold, unit, one, two, three, low)
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
def choose(keys, widths, low, flag_bytes, per_scope):
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
        threshold = _raised(threshold, unit, ones, twos, threes, low)
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
