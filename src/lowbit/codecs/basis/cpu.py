"""Renew and follow a basis on the CPU: PyTorch computes matrix products, compiled kernels everything between them.

PyTorch multiplies rows of `x` by a few directions that are rows, too: several times faster than few columns. The
tokens' remainder is never written out: the share of the directions that stay is subtracted from the products. These
sums may differ from the reference's in the last bits; the arithmetic of both ends, in `follow`, may not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.basis.reference import (
    FARTHEST,
    LONGEST,
    PLACES,
    RIDGE,
    WEIGHT,
    Basis,
    BasisGeometry,
    start,
    strides,
)
from lowbit.kernels.cpu.jit import helper, kernel, over_rows, summing
from lowbit.kernels.cpu.lines import add_times as add
from lowbit.kernels.cpu.lines import dot, largest, norm_of, squares
from lowbit.kernels.cpu.memory import (
    get_byte,
    get_float,
    get_half,
    get_word,
    put_byte,
    put_float,
    put_half,
    put_int,
    put_word,
)
from lowbit.kernels.cpu.operations import (
    bits_float,
    float_bits,
    greater,
    greater32,
    lesser,
    magnitude,
    round_signed,
    truncate,
)
from lowbit.kernels.cpu.runs import ONE, SMALLEST, ZERO

FAR, MOST = np.float32(FARTHEST), np.float32(127)
INFINITE = np.float32(np.inf)
DEPENDENT = np.float32(1e-6)  # share of a vector's length: a smaller component outside the others is rounding
TINY = 1e-12  # smallest pivot, so that its root and quotients are finite


def renew(
    x: Tensor, basis: Basis, payload: Tensor, new: Basis, number: int, training: bool, geo: BasisGeometry
) -> Tensor:
    """See `reference`; a message that yields no directions brings zeros."""
    at, rows, channels, rank, count = geo.layout.offsets, geo.rows, geo.channels, geo.directions, geo.renewed
    slots, lengths, codes = (payload.data_ptr() + at[n] for n in ("slots", "lengths", "directions"))
    x, kept = x.float(), basis.directions_KC
    products = torch.mm(kept, x.t())
    scale = _scale(x)
    fresh = torch.empty(count, channels, dtype=torch.float32, device="cpu")
    if scale:
        share, coefficients = torch.empty_like(basis.inverse_KK), torch.mm(basis.inverse_KK, products)
        _replaced(
            coefficients.data_ptr(), basis.inverse_KK.data_ptr(), share.data_ptr(), slots, rank, rows, count, scale
        )
        fresh.copy_(start(count, channels, x.device))
        for stride in strides(rows):
            seen, onto = x[::stride], products[:, ::stride].contiguous()
            along = torch.mm(fresh, seen.t())
            if count < rank:
                along.addmm_(torch.mm(torch.mm(fresh, kept.t()), share), onto, alpha=-1)
            along *= scale
            torch.mm(along, seen, out=fresh)
            if count < rank:
                fresh.addmm_(torch.mm(torch.mm(along, onto.t()), share), kept, alpha=-1)
            _orthonormal(fresh.data_ptr(), count, channels, scale)
        _put_directions(fresh.data_ptr(), lengths, codes, count, channels)
    else:
        _put_nothing(slots, lengths, codes, count, channels)
    _follow(
        slots, lengths, codes, count, rank, channels,
        basis.directions_KC.data_ptr(), basis.digest.data_ptr(), payload.data_ptr() + at["header"],
        new.directions_KC.data_ptr(), new.digest.data_ptr(), number % (1 << 31), training,
    )  # fmt: skip
    if scale:
        along = torch.mm(fresh, x.t())
        _put_rows(along.data_ptr(), slots, products.data_ptr(), count, rows)
    return products.t()


def invert(directions: Tensor, out: Tensor) -> None:
    """See `reference`."""
    gram = torch.mm(directions, directions.t())
    _invert(gram.data_ptr(), out.data_ptr(), len(directions))


def follow(
    payload: Tensor, directions: Tensor, digest: Tensor, header: Tensor, next_directions: Tensor, next_digest: Tensor,
    number: int, training: bool, geo: BasisGeometry,
) -> None:  # fmt: skip
    """The reference's numbers."""
    at, start = geo.layout.offsets, payload.data_ptr()
    _follow(
        start + at["slots"], start + at["lengths"], start + at["directions"], geo.renewed, geo.directions,
        geo.channels, directions.data_ptr(), digest.data_ptr(), header.data_ptr(),
        next_directions.data_ptr(), next_digest.data_ptr(), number % (1 << 31), training,
    )  # fmt: skip


def _scale(x: Tensor) -> float:
    """Factor that scales tokens to at most 1; 0 if they are unusable."""
    magnitudes: list[float] = []
    start, (rows, channels) = x.data_ptr(), x.shape

    def work(first: int, last: int) -> None:
        magnitudes.append(_farthest(start + 4 * first * channels, (last - first) * channels))

    over_rows(work, rows, x.nbytes)
    most = np.float32(max(magnitudes))
    return float(ONE / most) if SMALLEST <= most <= FAR else 0.0


@kernel
def _farthest(x, count) -> Any:
    """The largest magnitude; Inf if there is NaN."""
    most = np.int32(0)
    for j in range(count):
        most = greater32(most, float_bits(magnitude(get_float(x, j))))
    return bits_float(most) if most <= 0x7F800000 else np.float32(np.inf)


@kernel
def _replaced(c, inverse, kept, slots, rank, rows, count, scale) -> None:
    """Choose the directions to replace, those with the least energy; set `kept`, the inverse of the others' products.

    It is inverse - inverse[:, s] B^-1 inverse[s], for the block B of the inverse at s, which leaves zeros in the rows
    and columns of the replaced directions. With B = L L', `part` becomes L^-1 inverse[s].
    """
    energy = np.empty(rank, np.float64)
    for k in range(rank):
        energy[k] = squares(c + 4 * k * rows, rows, np.float32(scale))
    part, lower = np.empty((count, rank), np.float64), np.empty((count, count), np.float64)
    for m in range(count):
        chosen = np.argmin(energy)
        energy[chosen] = np.inf
        put_half(slots, m, chosen)
        for k in range(rank):
            part[m, k] = get_float(inverse, chosen * rank + k)
    for m in range(count):
        for n in range(m + 1):
            total = part[m, np.int64(get_half(slots, n))]
            for i in range(n):
                total -= lower[m, i] * lower[n, i]
            lower[m, n] = total / lower[n, n] if n < m else np.sqrt(max(total, TINY))
    for m in range(count):
        for n in range(m):
            for k in range(rank):
                part[m, k] -= lower[m, n] * part[n, k]
        for k in range(rank):
            part[m, k] /= lower[m, m]
    for j in range(rank):
        for k in range(rank):
            total = np.float64(get_float(inverse, j * rank + k))
            for m in range(count):
                total -= part[m, j] * part[m, k]
            put_float(kept, j * rank + k, np.float32(total))


@kernel
def _invert(gram, out, rank) -> None:
    """The inverse of a positive definite matrix with `RIDGE` on its diagonal, L L': the product of L^-1 with itself."""
    lower, back = np.zeros((rank, rank), np.float64), np.zeros((rank, rank), np.float64)
    for i in range(rank):
        for j in range(i + 1):
            total = np.float64(get_float(gram, i * rank + j)) - _dot_rows(lower, i, j)
            lower[i, j] = total / lower[j, j] if j < i else np.sqrt(max(total + RIDGE, TINY))
    for i in range(rank):
        back[i, i] = 1.0
        for j in range(i):
            for k in range(j + 1):
                back[i, k] -= lower[i, j] * back[j, k]
        for k in range(i + 1):
            back[i, k] /= lower[i, i]
    lower[:] = 0.0
    for i in range(rank):
        for j in range(i + 1):
            for k in range(i + 1):
                lower[j, k] += back[i, j] * back[i, k]
    for j in range(rank):
        for k in range(rank):
            put_float(out, j * rank + k, np.float32(lower[j, k]))


@summing
def _dot_rows(lower, i, j) -> Any:
    """Dot product of rows i and j up to column j."""
    total = 0.0
    for k in range(j):
        total += lower[i, k] * lower[j, k]
    return total


@kernel
def _orthonormal(new, count, channels, scale) -> None:
    """Scale and orthonormalise sums of remainders; replace zeros by any directions."""
    for m in range(count):
        line = new + 4 * m * channels
        for j in range(channels):
            value = get_float(line, j) * np.float32(scale)
            put_float(line, j, value if magnitude(value) < INFINITE else ZERO)
    axis = 0  # an axis that failed once lies in the span of the directions so far, and would fail again
    for m in range(count):
        line = new + 4 * m * channels
        length = norm_of(line, channels)
        while True:
            for _ in range(2):  # the second pass removes what rounding leaves in the first
                for n in range(m):
                    other = new + 4 * n * channels
                    add(line, other, -dot(line, other, channels), channels)
            left = norm_of(line, channels)
            if left > DEPENDENT * length and left > SMALLEST:
                break
            for j in range(channels):
                put_float(line, j, ONE if j == axis else ZERO)
            length, axis = ONE, axis + 1
        for j in range(channels):
            put_float(line, j, get_float(line, j) / left)


@kernel
def _put_directions(new, lengths, codes, count, channels) -> None:
    """Encode new directions, and replace `new` by what the receiver decodes."""
    for m in range(count):
        line = new + 4 * m * channels
        length = largest(line, channels) / MOST
        put_float(lengths, m, length)
        for j in range(channels):
            q = lesser(greater(round_signed(get_float(line, j) / length), -MOST), MOST)
            put_byte(codes, m * channels + j, truncate(q))
            put_float(line, j, q * length)


@kernel
def _put_nothing(slots, lengths, codes, count, channels) -> None:
    for m in range(count):
        put_half(slots, m, -1)
        put_float(lengths, m, ZERO)
    for j in range(count * channels):
        put_byte(codes, j, 0)


@kernel
def _follow(
    slots, lengths, codes, count, rank, channels,
    directions, digest, header, next_directions, next_digest, number, training,
) -> None:  # fmt: skip
    own, fits = _digest(slots, lengths, codes, count, channels), True
    taken = np.zeros(rank, np.uint8)
    for m in range(count):
        slot = np.int64(np.int16(get_half(slots, m)))
        fits = fits and -1 <= slot < rank
        if fits and slot >= 0:
            length = get_float(lengths, m)
            fits = taken[slot] == 0 and 0 <= length <= LONGEST  # false for NaN
            taken[slot] = 1
    own = own if fits else -1
    for i in range(rank * channels):
        put_float(next_directions, i, get_float(directions, i))
    for m in range(count):
        slot = np.int64(np.int16(get_half(slots, m)))
        if fits and slot >= 0:
            length = get_float(lengths, m)
            for j in range(channels):
                q = np.float32(np.int8(get_byte(codes, m * channels + j)))
                put_float(next_directions, slot * channels + j, q * length)
    before = np.int64(get_word(digest, 0))
    put_word(next_digest, 0, (before * 31 + own) & 0x7FFFFFFF)
    put_int(header, 0, number)
    put_int(header, 1, before)
    put_int(header, 2, training)
    put_int(header, 3, own)


@helper
def _digest(slots, lengths, codes, count, channels) -> Any:
    """Digest of a renewal (see `reference.Renewal`): weighted sum of its values, with weights by position from 1 on."""
    total, place = np.int64(0), 0
    for m in range(count):
        place += 1
        total += np.int64(np.int16(get_half(slots, m))) * _weight(place)
    for i in range(2 * count):
        place += 1
        total += np.int64(np.int16(get_half(lengths, i))) * _weight(place)
    for j in range(count * channels):
        place += 1
        total += np.int64(np.int8(get_byte(codes, j))) * _weight(place)
    return (total * WEIGHT) & 0x7FFFFFFF


@helper
def _weight(place) -> Any:
    return (place - 1) % PLACES + 1


@kernel
def _put_rows(source, slots, target, count, rows) -> None:
    for m in range(count):
        to = target + 4 * np.int64(get_half(slots, m)) * rows
        for r in range(rows):
            put_float(to, r, get_float(source, m * rows + r))
