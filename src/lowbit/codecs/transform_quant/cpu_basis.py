"""The transform on the CPU: matrix products with the directions themselves, instead of reflections.

For an orthonormal basis Q (C, K) of the directions D = L Q', with D D' = L L', and for signs S, the reflections of
`basis` multiply to

    H = I - G W G',  G = Q S - E,  W = (I - S Q[:K]')^-1,

where E holds the first K columns of I. So a token x has the first coefficients x Q S = x D' A with A = L'^-1 S, and all
of them are x - B D with B = (x Q S - x[:K]) M'^-1, for the matrix M = S L' - D[:, :K]'. Elimination with M's rows, from
the first to the last, gives the signs: each pivot gets the one that makes it larger, as a Householder reflection does.
The sums that decide are float64, so that all machines find the same signs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.basis.reference import RIDGE
from lowbit.codecs.transform_quant.basis import Transform
from lowbit.kernels.cpu.jit import helper, kernel, summing
from lowbit.kernels.cpu.memory import get_double, get_float, get_half, put_double, put_float
from lowbit.kernels.exact import store

DEPENDENT = 0.05  # share of a direction's energy outside the earlier ones; with less, products lose too many digits
SHORTEST = 2.0**-40  # square of a length
ON_ITS_AXIS = 1e-12  # share of a direction's length that is not on its own axis; with less, nothing is to reflect


def transform_of(directions: Tensor, before: Transform | None = None, slots: Tensor | None = None) -> Transform:
    """See `basis`."""
    rank, channels = directions.shape
    if isinstance(before, Products) and slots is not None:
        gram = before.gram_KK.clone()
        _update(directions.data_ptr(), rank, channels, slots.data_ptr(), len(slots), gram.data_ptr())
    else:
        gram = torch.empty(rank, rank, dtype=torch.float64, device="cpu")
        every = torch.arange(rank, dtype=torch.int16, device="cpu")
        _update(directions.data_ptr(), rank, channels, every.data_ptr(), rank, gram.data_ptr())
    return Products(directions, gram)


class Products(Transform):
    """The transform of directions that are nearly orthogonal to each other, from their products, float64 (K, K).

    Directions of zeros must be the last ones. Others take the path of the reference.
    """

    def __init__(self, directions_KC: Tensor, gram_KK: Tensor) -> None:
        super().__init__(directions_KC)
        self.gram_KK = gram_KK
        rank, channels = directions_KC.shape
        first, second, triangle = torch.empty(3, rank * rank, dtype=torch.float32, device="cpu")
        scratch = torch.empty(3 * rank * rank + rank, dtype=torch.float64, device="cpu")
        count = _factored(
            gram_KK.data_ptr(), directions_KC.data_ptr(), rank, channels, first.data_ptr(), second.data_ptr(),
            triangle.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        self._simple = count >= 0
        # A, M^-1 and S L' for the directions that exist.
        self._first_NN, self._second_NN, self._triangle_NN = (
            part[: count**2].view(count, count) if count >= 0 else part for part in (first, second, triangle)
        )

    def coefficients(self, x_RC: Tensor, products_RK: Tensor | None = None) -> Tensor:
        if not self._simple:
            return super().coefficients(x_RC)
        count = len(self._first_NN)
        if products_RK is None:
            products_RK = x_RC @ self.directions_KC.t()
        begin_RN = products_RK[:, :count] @ self._first_NN
        along_RN = (begin_RN - x_RC[:, :count]) @ self._second_NN.t()
        z_RC = torch.addmm(x_RC, along_RN, self.directions_KC[:count], alpha=-1)
        z_RC[:, :count] = begin_RN
        return z_RC

    def tokens(self, z_RC: Tensor, out: Tensor, factors_C: Tensor | None = None) -> None:
        if not self._simple:
            super().tokens(z_RC, out, factors_C)
            return
        count = len(self._first_NN)
        directions_NC, begin_RN = self.directions_KC[:count], z_RC[:, :count]
        x_RC = out if out.dtype == torch.float32 else torch.empty_like(z_RC)
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
        if factors_C is not None:
            x_RC.mul_(factors_C)
        if x_RC is not out:
            store(x_RC, out, False)

    def inverse(self) -> Tensor:
        gram_KK = self.gram_KK.clone()
        gram_KK.diagonal().add_(RIDGE)
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(gram_KK)[0]).float()


@kernel
def _update(directions, rank, channels, slots, count, gram) -> None:
    """Compute the products of the directions at `slots` with all; negative slots are none."""
    for m in range(count):
        i = np.int64(np.int16(get_half(slots, m)))
        if i >= 0:
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
def _factored(gram, directions, rank, channels, first, second, triangle, scratch) -> Any:
    """Compute A, M^-1 and S L'; return the number of directions, or -1 if they are not as `Products` needs them."""
    count = 0
    while count < rank and get_double(gram, count * (rank + 1)) > 0:
        count += 1
    for i in range(count, rank):
        if get_double(gram, i * (rank + 1)) != 0:  # also NaN
            return -1
    u, m, x, signs = scratch, scratch + 8 * count**2, scratch + 16 * count**2, scratch + 24 * count**2
    for i in range(count):
        for k in range(count):
            put_double(u, i * count + k, get_double(gram, i * rank + k) if k >= i else 0.0)
            put_double(x, i * count + k, 0.0)
    for i in range(count):
        pivot, square = get_double(u, i * (count + 1)), get_double(gram, i * (rank + 1))
        if not (pivot > DEPENDENT * square and SHORTEST < square < 1 / SHORTEST):
            return -1
        _scale(u + 8 * i * count, 1 / np.sqrt(pivot), i, count)
        for k in range(i + 1, count):
            _add(u + 8 * k * count, u + 8 * i * count, -get_double(u, i * count + k), k, count)
    for i in range(count):
        for k in range(count):
            put_double(m, i * count + k, -np.float64(get_float(directions, k * channels + i)))
    for i in range(count):
        line = m + 8 * i * count
        if np.abs(get_double(line, i)) >= get_double(u, i * (count + 1)) * (1 - ON_ITS_AXIS):
            return -1  # the reference does not reflect a direction that lies on its axis
        sign = -1.0 if get_double(line, i) <= 0 else 1.0
        put_double(signs, i, sign)
        _add(line, u + 8 * i * count, sign, i, count)
        inverse = 1 / get_double(line, i)
        for k in range(i + 1, count):
            other = m + 8 * k * count
            factor = get_double(other, i) * inverse
            put_double(other, i, factor)
            _add(other, line, -factor, i + 1, count)
    for i in range(count):
        for k in range(count):
            put_float(triangle, i * count + k, np.float32(get_double(signs, i) * get_double(u, i * count + k)))
    _solve(u, x, count, True)
    for i in range(count):
        for k in range(count):
            put_float(first, i * count + k, np.float32(get_double(signs, k) * get_double(x, i * count + k)))
    for i in range(count):
        for k in range(count):
            put_double(x, i * count + k, 0.0)
    for i in range(count):
        put_double(x, i * (count + 1), 1.0)
        for k in range(i):
            _add(x + 8 * i * count, x + 8 * k * count, -get_double(m, i * count + k), 0, k + 1)
    _solve(m, x, count, False)
    for j in range(count * count):
        put_float(second, j, np.float32(get_double(x, j)))
    return count


@helper
def _solve(upper, x, count, identity) -> None:
    """Multiply the rows of x by the inverse of an upper triangle; or set x to it."""
    for turn in range(count):
        i = count - 1 - turn
        line, begin = x + 8 * i * count, i if identity else 0
        if identity:
            put_double(line, i, 1.0)
        for k in range(i + 1, count):
            _add(line, x + 8 * k * count, -get_double(upper, i * count + k), k if identity else 0, count)
        _scale(line, 1 / get_double(upper, i * (count + 1)), begin, count)


@summing
def _add(x, y, factor, begin, end) -> None:
    for j in range(begin, end):
        put_double(x, j, get_double(x, j) + factor * get_double(y, j))


@helper
def _scale(x, factor, begin, end) -> None:
    for j in range(begin, end):
        put_double(x, j, get_double(x, j) * factor)
