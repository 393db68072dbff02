"""Parts of the CPU's kernels that whole messages show only in large tensors, or with many threads."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from lowbit.codecs.transform_quant import cpu_basis
from lowbit.codecs.transform_quant.cpu_symbols import dither_of
from lowbit.kernels.cpu import jit, lines
from lowbit.kernels.cpu.jit import kernel
from lowbit.kernels.cpu.memory import put_int


@kernel
def _dithers(first, count, seed, out) -> None:
    for j in range(count):
        put_int(out, j, dither_of(first, j, seed))


@pytest.mark.parametrize("first", [0, 12345, 2**32 - 50, 2**32, 7 * 2**32 - 1])
def test_a_row_that_begins_before_a_multiple_of_2_to_the_32_has_the_dither_of_the_reference(first: int):
    seed, count = -123456789, 100
    out = np.empty(count, np.int32)
    _dithers(first, count, seed, out.ctypes.data)
    index = np.arange(first, first + count, dtype=np.uint64)
    low, above = index & np.uint64(0xFFFFFFFF), index >> np.uint64(32)
    h = low ^ ((np.uint64(seed & 0xFFFFFFFF) + above * np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = ((h ^ (h >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    assert (out == ((h ^ (h >> np.uint64(16))) >> np.uint64(24))).all()


@pytest.mark.parametrize(("rows", "channels", "count"), [(1, 5, 1), (3, 64, 2), (6, 17, 3), (259, 128, 4), (64, 48, 8)])
@pytest.mark.parametrize("stride", [1, 3])
def test_products_with_few_directions_are_those_of_pytorch(rows: int, channels: int, count: int, stride: int):
    x, directions = torch.randn(rows, channels), torch.randn(count, channels)
    seen, found = x[::stride], directions.clone()
    cpu_basis._multiply(found, x, stride, 0.25)
    expected = 0.25 * (directions.double() @ seen.double().t()) @ seen.double()
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    slots, products = torch.arange(count, dtype=torch.int16).flip(0), torch.zeros(count, rows)
    addresses = directions.data_ptr(), count, slots.data_ptr(), products.data_ptr()
    cpu_basis._products(x.data_ptr(), 0, rows, rows, channels, *addresses)
    assert torch.allclose(products.flip(0), directions @ x.t(), rtol=1e-4, atol=1e-5 * channels)


def test_sums_over_rows_do_not_depend_on_which_thread_ends_first(monkeypatch: pytest.MonkeyPatch):
    x, found = torch.randn(900, 32) * 10.0 ** torch.randint(-6, 6, (900, 1)), []
    ranges = [(0, 300), (300, 600), (600, 900)]
    for order in (ranges, ranges[::-1], ranges[1:] + ranges[:1]):
        monkeypatch.setattr(lines, "over_rows", lambda work, rows, nbytes, order=order: [work(*each) for each in order])
        directions = torch.ones(2, 32)
        cpu_basis._multiply(directions, x, 1, 1.0)
        found.append(directions)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert jit.over_rows is not lines.over_rows
