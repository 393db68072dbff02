"""Bases on the CPU: PyTorch computes products with matrices, compiled kernels those with few vectors and all between.

The tokens' remainder is never written out: new directions are kept orthogonal to those that stay. Sums may differ from
the reference's in the last bits, and the inverse by its ridge; the arithmetic of both ends, in `follow`, may not.

The transform takes matrix products with the directions themselves, instead of reflections. For an orthonormal basis Q
(C, K) of the directions D = L Q', with D D' = L L', and for signs S, the reflections of `basis` multiply to

    H = I - G W G',  G = Q S - E,  W = (I - S Q[:K]')^-1,

where E holds the first K columns of I. So a token x has the first coefficients x Q S = x D' A with A = L'^-1 S, and all
of them are x - B D with B = (x Q S - x[:K]) M'^-1, for the matrix M = S L' - D[:, :K]'. Elimination with M's rows, from
the first to the last, gives the signs: each pivot gets the one that makes it larger, as a Householder reflection does.
The sums that decide are float64, so that all machines find the same signs.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.transform_quant import basis
from lowbit.codecs.transform_quant.basis import FARTHEST, LONGEST, PLACES, RIDGE, WEIGHT, Basis, start, strides
from lowbit.codecs.transform_quant.reference import TransformGeometry
from lowbit.kernels.cpu.jit import helper, kernel, over_rows, summing
from lowbit.kernels.cpu.lines import add_times, dot, largest, largest_bits, norm_of, squares, sum_over_rows
from lowbit.kernels.cpu.memory import (
    Room,
    get_byte,
    get_double,
    get_float,
    get_half,
    get_word,
    put_byte,
    put_double,
    put_float,
    put_half,
    put_int,
    put_word,
)
from lowbit.kernels.cpu.operations import (
    ONE,
    ZERO,
    bits_float,
    greater,
    lesser,
    magnitude,
    round_signed,
    truncate,
)
from lowbit.kernels.cpu.runs import SMALLEST
from lowbit.kernels.layout import ceil_div

FAR, MOST = np.float32(FARTHEST), np.float32(127)
INFINITE = np.float32(np.inf)
ROUNDED = np.float32(1e-6)  # share of a vector's length: a smaller component outside the others is rounding
TINY = 1e-12  # smallest pivot, so that its root and quotients are finite
DEPENDENT = 0.05  # share of a direction's energy outside the earlier ones; with less, products lose too many digits
SHORTEST = 2.0**-40  # square of a length
ON_ITS_AXIS = 1e-12  # share of a direction's length that is not on its own axis; with less, nothing is to reflect


def renew(
    x: Tensor, basis: Basis, payload: Tensor, new: Basis, number: int, training: bool, geo: TransformGeometry
) -> Tensor:
    """See `basis`; x must be contiguous, and the payload zeros, as in a message that yields no directions."""
    at, rows, channels, rank, count = geo.layout.offsets, geo.rows, geo.channels, geo.directions, geo.renewed
    slots, lengths, codes = (payload.data_ptr() + at[n] for n in ("slots", "lengths", "directions"))
    x, kept = x.float(), basis.directions_KC
    products = torch.mm(kept, x.t())
    most = _most(x.data_ptr(), x.numel())
    scale = float(ONE / most) if SMALLEST <= most <= FAR else 0.0  # 0 also for NaN
    fresh = torch.empty(count, channels, dtype=torch.float32, device="cpu")
    if scale:
        share, coefficients = torch.empty_like(basis.inverse_KK), torch.mm(basis.inverse_KK, products)
        _replaced(
            coefficients.data_ptr(), basis.inverse_KK.data_ptr(), share.data_ptr(), slots, rank, rows, count, scale
        )
        others = kept.data_ptr(), share.data_ptr(), rank, channels
        _outside(fresh.copy_(start(count, channels, x.device)).data_ptr(), count, *others, ONE)
        for stride in strides(rows):
            _multiply(fresh, x, stride, scale)
            _outside(fresh.data_ptr(), count, *others, np.float32(scale))
        _put_directions(fresh.data_ptr(), lengths, codes, count, channels)
    else:
        geo.layout.section(payload, "slots", torch.int16).fill_(-1)
    header = geo.layout.section(payload, "header", torch.int32)
    follow(payload, kept, basis.digest, header, new.directions_KC, new.digest, number, training, geo)
    if scale:
        into = products.data_ptr()
        over_rows(
            lambda i, j: _products(x.data_ptr(), i, j, rows, channels, fresh.data_ptr(), count, slots, into),
            rows, x.nbytes,
        )  # fmt: skip
    return products.t()


def _multiply(directions: Tensor, x: Tensor, stride: int, scale: float) -> None:
    """Replace directions D (M, C) by scale D x' x, for every `stride`th token."""
    (count, channels), before = directions.shape, directions.clone()

    def work(first: int, last: int, sums: int) -> None:
        begin = x.data_ptr() + 4 * channels * stride * first
        _multiplied(begin, stride, last - first, channels, before.data_ptr(), count, np.float32(scale), sums)

    sum_over_rows(work, ceil_div(len(x), stride), x.nbytes // stride, directions.data_ptr(), count * channels)


def follow(
    payload: Tensor, directions: Tensor, digest: Tensor, header: Tensor, next_directions: Tensor, next_digest: Tensor,
    number: int, training: bool, geo: TransformGeometry,
) -> None:  # fmt: skip
    """The reference's numbers."""
    at, start = geo.layout.offsets, payload.data_ptr()
    _follow(
        start + at["slots"], start + at["lengths"], start + at["directions"], geo.renewed, geo.directions,
        geo.channels, directions.data_ptr(), digest.data_ptr(), header.data_ptr(),
        next_directions.data_ptr(), next_digest.data_ptr(), number % (1 << 31), training,
    )  # fmt: skip


@kernel
def _most(x, count) -> Any:
    """Largest magnitude, or NaN if there is one, whose bits are above all others."""
    return bits_float(largest_bits(x, count))


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
def _multiplied(x, stride, rows, channels, directions, count, scale, sums) -> None:
    for j in range(count * channels):
        put_float(sums, j, ZERO)
    for r in range(0, rows, 4):
        at = _four(x, 4 * channels * stride, r, rows)
        for m in range(count):
            along = _dots(directions + 4 * m * channels, at, channels)
            _add_all(sums + 4 * m * channels, at, scale, along, rows - r, channels)


@kernel
def _products(x, first, last, rows, channels, directions, count, slots, products) -> None:
    for r in range(first, last, 4):
        at = _four(x, 4 * channels, r, last)
        for m in range(count):
            along = _dots(directions + 4 * m * channels, at, channels)
            line = np.int64(get_half(slots, m)) * rows + r
            for i in range(min(4, last - r)):
                put_float(products, line + i, along[i])


@helper
def _four(x, pitch, first, end) -> Any:
    """Addresses of four lines from `first` on; the last one stands for those beyond the end."""
    last, line = x + pitch * (end - 1), x + pitch * first
    return line, min(line + pitch, last), min(line + 2 * pitch, last), min(line + 3 * pitch, last)


@summing
def _dots(x, lines, count) -> Any:
    """Products of x with four lines: several at once, because a processor adds faster than it loads."""
    a, b, c, d = lines
    first = second = third = fourth = ZERO
    for j in range(count):
        value = get_float(x, j)
        first += value * get_float(a, j)
        second += value * get_float(b, j)
        third += value * get_float(c, j)
        fourth += value * get_float(d, j)
    return first, second, third, fourth


@summing
def _add_all(x, lines, scale, factors, used, count) -> None:
    """Add to x the first `used` of four lines, at most, each times the scale and its factor."""
    (a, b, c, d), (f, g, h, i) = lines, factors
    f, g, h, i = (
        f * scale,
        g * scale if used > 1 else ZERO,
        h * scale if used > 2 else ZERO,
        i * scale if used > 3 else ZERO,
    )
    for j in range(count):
        first, second = f * get_float(a, j) + g * get_float(b, j), h * get_float(c, j) + i * get_float(d, j)
        put_float(x, j, get_float(x, j) + (first + second))


@kernel
def _outside(new, count, kept, share, rank, channels, scale) -> None:
    """Scale vectors, subtract what lies in the span of the kept directions, and orthonormalise the rest.

    Zeros are replaced by any directions.
    """
    along, part = np.empty(rank + 3, np.float32), np.empty(rank + 3, np.float32)
    for m in range(count):
        line = new + 4 * m * channels
        for j in range(channels):
            value = get_float(line, j) * scale
            put_float(line, j, value if magnitude(value) < INFINITE else ZERO)
        for k in range(0, rank, 4):
            along[k], along[k + 1], along[k + 2], along[k + 3] = _dots(
                line, _four(kept, 4 * channels, k, rank), channels
            )
        part[:] = ZERO
        for k in range(rank):
            for i in range(rank):
                part[i] += along[k] * get_float(share, k * rank + i)
        for k in range(0, rank, 4):
            factors = part[k], part[k + 1], part[k + 2], part[k + 3]
            _add_all(line, _four(kept, 4 * channels, k, rank), -ONE, factors, rank - k, channels)
    axis = 0  # an axis that failed once lies in the span of the directions so far, and would fail again
    for m in range(count):
        line = new + 4 * m * channels
        length = norm_of(line, channels)
        while True:
            for _ in range(2):  # the second pass removes what rounding leaves in the first
                for n in range(m):
                    other = new + 4 * n * channels
                    add_times(line, other, -dot(line, other, channels), channels)
            left = norm_of(line, channels)
            if left > ROUNDED * length and left > SMALLEST:
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
def _follow(
    slots, lengths, codes, count, rank, channels,
    directions, digest, header, next_directions, next_digest, number, training,
) -> None:  # fmt: skip
    # The digest (see `basis.Renewal`): sum of the values, with weights by position.
    total, place = np.int64(0), 0
    for m in range(count):
        total += np.int64(np.int16(get_half(slots, m))) * (place % PLACES + 1)
        place += 1
    for i in range(2 * count):
        total += np.int64(np.int16(get_half(lengths, i))) * (place % PLACES + 1)
        place += 1
    for j in range(count * channels):
        total += np.int64(np.int8(get_byte(codes, j))) * (place % PLACES + 1)
        place += 1
    own, fits = (total * WEIGHT) & 0x7FFFFFFF, True
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


class Transform(basis.Transform):
    """The transform of directions that are nearly orthogonal to each other, from their products, float64 (K, K).

    Directions of zeros must be the last ones. Others take the path of the reference.
    """

    def __init__(
        self, directions_KC: Tensor, before: basis.Transform | None = None, slots: Tensor | None = None
    ) -> None:
        super().__init__(directions_KC)
        rank, channels = directions_KC.shape
        if isinstance(before, Transform) and slots is not None:
            gram_KK = before.gram_KK.clone()
        else:
            gram_KK = torch.empty(rank, rank, dtype=torch.float64, device="cpu")
            slots = torch.arange(rank, dtype=torch.int16, device="cpu")
        _update(directions_KC.data_ptr(), rank, channels, slots.data_ptr(), len(slots), gram_KK.data_ptr())
        self.gram_KK = gram_KK
        # A, M^-1 and S L' for the directions that exist.
        parts, scratch = torch.empty(3, rank, rank, dtype=torch.float32, device="cpu"), Room(8 * (4 * rank + 1) * rank)
        count = _factored(gram_KK.data_ptr(), directions_KC.data_ptr(), rank, channels, parts.data_ptr(), *scratch.at)
        self._simple = count >= 0
        parts = parts[:, :count, :count] if 0 <= count < rank else parts
        self._first_NN, self._second_NN, self._triangle_NN = parts

    def coefficients(self, x_RC: Tensor, products_RK: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not self._simple:
            return super().coefficients(x_RC, out=out)
        count = len(self._first_NN)
        if products_RK is None:
            products_RK = x_RC @ self.directions_KC.t()
        begin_RN = products_RK[:, :count] @ self._first_NN
        along_RN = (begin_RN - x_RC[:, :count]) @ self._second_NN.t()
        z_RC = torch.addmm(x_RC, along_RN, self.directions_KC[:count], alpha=-1, out=out)
        z_RC[:, :count] = begin_RN
        return z_RC

    def tokens(self, z_RC: Tensor, out: Tensor, factors_C: Tensor | None = None) -> None:
        if not self._simple:
            super().tokens(z_RC, out, factors_C)
            return
        count = len(self._first_NN)
        directions_NC, begin_RN = self.directions_KC[:count], z_RC[:, :count]
        x_RC = out if out.dtype == torch.float32 else z_RC
        if len(z_RC) < z_RC.shape[1]:
            change_RN = (z_RC @ directions_NC.t()).addmm_(begin_RN, self._triangle_NN, alpha=-1) @ self._second_NN
            torch.addmm(z_RC, change_RN @ self._first_NN.t(), directions_NC, alpha=-1, out=x_RC)
            x_RC[:, :count] += change_RN
        else:  # the same, but products with the small matrices take C rows in place of R
            into_CN = directions_NC.t() @ self._second_NN
            into_CN[:count].addmm_(self._triangle_NN, self._second_NN, alpha=-1)
            back_NC = self._first_NN.t() @ directions_NC
            back_NC.diagonal().sub_(1)
            torch.addmm(z_RC, z_RC @ into_CN, back_NC, alpha=-1, out=x_RC)
        self._give(x_RC, out, factors_C)

    def inverse(self) -> Tensor:
        if self._simple and self._first_NN.shape == self.gram_KK.shape:  # all directions exist: no ridge is needed
            return self._first_NN @ self._first_NN.t()
        gram_KK = self.gram_KK.clone()
        gram_KK.diagonal().add_(RIDGE)
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(gram_KK)[0]).float()


@kernel
def _update(directions, rank, channels, slots, count, gram) -> None:
    """Compute the products of the directions at `slots` with all; negative slots are none."""
    for m in range(count):
        i = np.int64(np.int16(get_half(slots, m)))
        if 0 <= i < rank:
            for k in range(rank):
                total = _dot(directions + 4 * i * channels, directions + 4 * k * channels, channels)
                put_double(gram, i * rank + k, total)
                put_double(gram, k * rank + i, total)


@summing
def _dot(x, y, count) -> Any:
    total = 0.0
    for j in range(count):
        total += np.float64(get_float(x, j)) * np.float64(get_float(y, j))
    return total


@kernel
def _factored(gram, directions, rank, channels, first, scratch) -> Any:
    """Compute A, M^-1 and S L'; return the number of directions, or -1 if they are not as `Transform` needs them."""
    second, triangle = first + 4 * rank**2, first + 8 * rank**2
    count = 0
    while count < rank and get_double(gram, count * (rank + 1)) > 0:
        count += 1
    for i in range(count, rank):
        if get_double(gram, i * (rank + 1)) != 0:  # also NaN
            return -1
    size = 8 * count**2
    u, m, x, y, signs = scratch, scratch + size, scratch + 2 * size, scratch + 3 * size, scratch + 4 * size
    for i in range(count):
        for k in range(count):
            put_double(u, i * count + k, get_double(gram, i * rank + k) if k >= i else 0.0)
            put_double(m, i * count + k, -np.float64(get_float(directions, k * channels + i)))
            put_double(x, i * count + k, 1.0 if k == i else 0.0)
            put_double(y, i * count + k, 1.0 if k == i else 0.0)
    for i in range(count):
        pivot, square = get_double(u, i * (count + 1)), get_double(gram, i * (rank + 1))
        if not (pivot > DEPENDENT * square and SHORTEST < square < 1 / SHORTEST):
            return -1
        _scale(u + 8 * i * count, 1 / np.sqrt(pivot), count)
        for k in range(i + 1, count):
            _add(u + 8 * k * count, u + 8 * i * count, -get_double(u, i * count + k), k, count)
    for i in range(count):
        line = m + 8 * i * count
        if np.abs(get_double(line, i)) >= get_double(u, i * (count + 1)) * (1 - ON_ITS_AXIS):
            return -1  # the reference does not reflect a direction that lies on its axis
        sign = -1.0 if get_double(line, i) <= 0 else 1.0
        put_double(signs, i, sign)
        _add(line, u + 8 * i * count, sign, i, count)
        inverse = 1 / get_double(line, i)
        for k in range(i + 1, count):
            factor = -get_double(m, k * count + i) * inverse
            _add(m + 8 * k * count, line, factor, i + 1, count)
            _add(y + 8 * k * count, y + 8 * i * count, factor, 0, i + 1)
    _solve(u, x, count)
    _solve(m, y, count)
    for i in range(count):
        for k in range(count):
            at, sign = i * count + k, get_double(signs, k)
            put_float(first, i * rank + k, np.float32(sign * get_double(x, at)))
            put_float(second, i * rank + k, np.float32(get_double(y, at)))
            put_float(triangle, i * rank + k, np.float32(get_double(signs, i) * get_double(u, at) if k >= i else 0.0))
    return count


@helper
def _solve(upper, x, count) -> None:
    """Multiply the rows of x by the inverse of an upper triangle."""
    for turn in range(count):
        i = count - 1 - turn
        line = x + 8 * i * count
        for k in range(i + 1, count):
            _add(line, x + 8 * k * count, -get_double(upper, i * count + k), 0, count)
        _scale(line, 1 / get_double(upper, i * (count + 1)), count)


@summing
def _add(x, y, factor, begin, end) -> None:
    """Add a multiple from `begin` on; the numbers before it need no right values, so that loops have no odd rests."""
    for j in range(begin & -16, end):
        put_double(x, j, get_double(x, j) + factor * get_double(y, j))


@helper
def _scale(x, factor, count) -> None:
    for j in range(count):
        put_double(x, j, get_double(x, j) * factor)
