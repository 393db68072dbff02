"""Views of any strides, and what must hold for whoever gets one: right, or refused without a change."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class View:
    """A view of memory of its own: sizes and strides, elements before it, whether it negates what is in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    negated: bool = False

    @property
    def overlaps(self) -> bool:
        places = self._places()
        return places.unique().numel() < places.numel()

    @property
    def is_strange(self) -> bool:
        """Whether elements of one dimension lie between those of another: may be refused even if none share memory."""
        order = sorted((s, n) for n, s in zip(self.sizes, self.strides, strict=True) if n > 1)
        return any(s <= sum(t * (m - 1) for t, m in order[:i]) for i, (s, _) in enumerate(order))

    def make(self, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Memory with random numbers, and the view of it."""
        last = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)) if 0 not in self.sizes else 0
        memory = torch.randn(self.offset + last + 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
        x = memory.as_strided(self.sizes, self.strides, self.offset)
        return memory, negated(x) if self.negated else x

    def rest(self, memory: Tensor) -> Tensor:
        """The elements in memory that the view does not show."""
        return memory[~torch.isin(torch.arange(memory.numel()), self._places() + self.offset)]

    def _places(self) -> Tensor:
        """The place of each element in memory, from the first one on."""
        places = torch.zeros((), dtype=torch.int64)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            places = places[..., None] + stride * torch.arange(size)
        return places.flatten()


def negated(x: Tensor) -> Tensor:
    """A view of the same memory that shows -x, such as that of `z.conj().imag`."""
    return torch.ops.aten._neg_view(x)


def packed(x: Tensor) -> Tensor:
    """The same numbers, contiguous, in memory of their own."""
    return torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())


@st.composite
def views(draw: st.DrawFn, *, most: int = 5, dims: int = 3) -> View:
    """Permuted, sliced, expanded, zero-size and negated views, and strides that nobody thinks of."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, most, most, 0]), max_size=dims))
    if draw(st.booleans()):
        strides = [draw(st.integers(0, 7)) for _ in sizes]
    else:
        strides, step = [0] * len(sizes), 1
        for i in draw(st.permutations(range(len(sizes)))):
            strides[i] = step * draw(st.sampled_from([1, 1, 2, 3]))
            step = strides[i] * max(1, sizes[i])
        expanded = draw(st.sampled_from([None, None, None, *range(len(sizes))]))
        if expanded is not None:
            strides[expanded] = 0
    negated = draw(st.sampled_from([False, False, False, True]))
    return View(tuple(sizes), tuple(strides), draw(st.integers(0, 3)), negated)


def widened(view: View, times: int) -> View:
    """A view of so many such views, one behind the other along a new first dimension."""
    reach = sum(n * s for n, s in zip(view.sizes, view.strides, strict=True)) + 1
    return replace(view, sizes=(times, *view.sizes), strides=(reach, *view.strides))
