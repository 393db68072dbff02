"""Pivots and the Walsh-Hadamard transform on eighths of tiles (see `lowbit.kernels.gpu.eighths`)."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.codecs.tah_quant.reference import ROTATABLE
from lowbit.kernels.gpu.numbers import bits_of

ROTATABLE_ = tl.constexpr(ROTATABLE)


@triton.jit
def find_pivots(parts, finite, j, v: tl.constexpr, ratio):
    """128 + position of each tile's pivot, or 0 (see `reference.find_pivots`)."""
    most = tl.zeros(parts[0].shape, tl.float32)
    for k in tl.static_range(8):
        most = tl.maximum(most, tl.abs(parts[k]))
    first = tl.max(most, axis=1)
    second = tl.zeros(parts[0].shape, tl.float32)
    equal = tl.zeros(parts[0].shape, tl.int32)
    position = tl.zeros(parts[0].shape, tl.int32)
    for k in tl.static_range(8):
        a = tl.abs(parts[k])
        top = a == first[:, None]
        second = tl.maximum(second, tl.where(top, 0.0, a))
        equal += top.to(tl.int32)
        position += tl.where(top, k * v + j, 0)
    only = tl.sum(equal, axis=1) == 1
    other = tl.max(second, axis=1)
    is_pivot = only & (first >= other * ratio) & (first < ROTATABLE_) & finite
    return tl.where(is_pivot, tl.sum(position, axis=1) + 128, 0)


@triton.jit
def swapped(parts, pivot, j, v: tl.constexpr):
    """Exchange each tile's first element and the one at its pivot; tiles without a pivot do not change."""
    position = tl.where(pivot > 0, pivot & 127, 0)[:, None]
    bits = tl.zeros(parts[0].shape, tl.int32)
    for k in tl.static_range(8):
        bits |= tl.where(k * v + j == position, bits_of(parts[k]), 0)
    at_pivot = tl.sum(bits, axis=1).to(tl.float32, bitcast=True)[:, None]
    first = tl.sum(tl.where(j == 0, bits_of(parts[0]), 0), axis=1).to(tl.float32, bitcast=True)
    first = first[:, None]
    out = ()
    for k in tl.static_range(8):
        x = tl.where(k * v + j == position, first, parts[k])
        out = out + (tl.where(k * v + j == 0, at_pivot, x),)
    return out


@triton.jit
def _butterfly(x, HALF: tl.constexpr, WIDTH: tl.constexpr, NT: tl.constexpr):
    """One step of the transform among an eighth's elements."""
    pairs = tl.permute(tl.reshape(x, (NT, WIDTH // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (NT, WIDTH))


@triton.jit
def rotated(parts, norm, WIDTH: tl.constexpr, NT: tl.constexpr):
    """Normalised Walsh-Hadamard transform, in the reference's order of steps."""
    if WIDTH > 1:
        parts = [_butterfly(x, 1, WIDTH, NT) for x in parts]
    if WIDTH > 2:
        parts = [_butterfly(x, 2, WIDTH, NT) for x in parts]
    if WIDTH > 4:
        parts = [_butterfly(x, 4, WIDTH, NT) for x in parts]
    if WIDTH > 8:
        parts = [_butterfly(x, 8, WIDTH, NT) for x in parts]
    return [x * norm for x in _across(_across(_across(parts, 1), 2), 4)]


@triton.jit
def _across(parts, STEP: tl.constexpr):
    """One step among the eighths."""
    out = ()
    for k in tl.static_range(8):
        if k & STEP == 0:
            out = out + (parts[k] + parts[k + STEP],)
        else:
            out = out + (parts[k - STEP] - parts[k],)
    return out


@triton.jit
def rotate_pivots(parts, pivot, j, v: tl.constexpr, norm, WIDTH: tl.constexpr, NT: tl.constexpr):
    """Swap pivots to the front of their tiles, and rotate these tiles."""
    return _with_pivot(pivot, rotated(swapped(parts, pivot, j, v), norm, WIDTH, NT), parts)


@triton.jit
def restore_pivots(parts, pivot, j, v: tl.constexpr, norm, WIDTH: tl.constexpr, NT: tl.constexpr):
    """Inverse of `rotate_pivots`."""
    return _with_pivot(pivot, swapped(rotated(parts, norm, WIDTH, NT), pivot, j, v), parts)


@triton.jit
def _with_pivot(pivot, parts, others):
    """Eighths of tiles with a pivot from `parts`, of the others from `others`."""
    out = ()
    for k in tl.static_range(8):
        out = out + (tl.where(pivot[:, None] > 0, parts[k], others[k]),)
    return out
