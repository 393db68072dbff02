"""Named sections of a payload: the position of each part of a format in its bytes.

A payload is one contiguous `uint8` tensor without a header: peers agree on the format before the first byte, so
sizes follow from the shape alone. Sections start at multiples of `ALIGNMENT` bytes, so that kernels may read them in
vectors; everything is little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16


@dataclass(frozen=True)
class Layout:
    """Sections of one payload, in the order in which they lie in memory.

    Attributes:
        offsets: first byte of each section, by name.
        sizes: length of each section in bytes, by name, without the padding that aligns the next one.
        nbytes: length of the whole payload.
    """

    offsets: dict[str, int]
    sizes: dict[str, int]
    nbytes: int

    @staticmethod
    def of(**sizes: int) -> Layout:
        """Lay sections of the given sizes (bytes) one after the other; a section of 0 bytes costs nothing."""
        offsets, end = {}, 0
        for name, size in sizes.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT if size else end
            offsets[name], end = start, start + size
        return Layout(offsets, dict(sizes), end)

    def section(self, payload: Tensor, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return the section `name` of `payload` as a 1-D view of `dtype`."""
        start = self.offsets[name]
        return payload[start : start + self.sizes[name]].view(dtype)


def ceil_div(a: int, b: int) -> int:
    """Integer division rounded up."""
    return -(-a // b)


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits; `count` is rounded up to a multiple of 8."""
    return ceil_div(count, 8) * bits


def zero_gaps(payload: Tensor, layout: Layout) -> None:
    """Clear the bytes between sections: equal tensors give equal payloads."""
    end = 0
    for name, start in layout.offsets.items():
        payload[end:start] = 0
        end = start + layout.sizes[name]
