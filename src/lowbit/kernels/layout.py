"""Payloads: the position of each part of a format in its bytes, and how codes and flags are packed into bits.

A payload is one contiguous `uint8` tensor without a header: peers agree on the format before the first byte, so
sizes follow from the shape alone. Sections start at multiples of `ALIGNMENT` bytes, so that kernels may read them in
vectors; everything is little-endian.

Codes of b bits are split into planes of 8, 4, 2 and 1 bits (b = 7: 4 + 2 + 1), low bits first. Byte j of a plane of p
bits that is w bytes long holds, from its low bits up, elements j, j + w, j + 2 w, ...: neighbours in memory stay
neighbours in registers, so that packing vectorises.
"""

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
    def of(**sizes: int) -> "Layout":
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


def zero_gaps(payload: Tensor, layout: Layout) -> None:
    """Clear the bytes between sections: equal tensors give equal payloads."""
    end = 0
    for name, start in layout.offsets.items():
        payload[end:start] = 0
        end = start + layout.sizes[name]


def planes(bits: int) -> list[int]:
    """Widths of the bit planes that codes of `bits` bits are packed in, from the low bits up."""
    return [p for p in (8, 4, 2, 1) if bits & p]


def planes_nbytes(count: int, bits: int) -> int:
    """Bytes of the planes of `count` codes, each plane rounded up to a byte."""
    return sum(ceil_div(count * p, 8) for p in planes(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack (..., n) uint8 codes into (..., `planes_nbytes(n, bits)`) bytes of bit planes."""
    done, out = 0, []
    for p in planes(bits):
        width = ceil_div(codes.shape[-1] * p, 8)
        fields = (codes >> done) & ((1 << p) - 1)
        fields = torch.nn.functional.pad(fields, (0, width * 8 // p - codes.shape[-1]))
        shifts = torch.arange(0, 8, p, dtype=torch.uint8, device=codes.device)
        # The fields do not overlap, so their sum is a bitwise or, for which PyTorch has no reduction.
        out.append((fields.unflatten(-1, (8 // p, width)) << shifts[:, None]).sum(-2, dtype=torch.uint8))
        done += p
    return torch.cat(out, -1)


def unpack(packed: Tensor, bits: int, count: int | None = None) -> Tensor:
    """Inverse of `pack`; `count`: number of codes, unless it is a multiple of 8."""
    done, start, n = 0, 0, packed.shape[-1] * 8 // bits if count is None else count
    codes = torch.zeros(*packed.shape[:-1], n, dtype=torch.uint8, device=packed.device)
    for p in planes(bits):
        part = packed[..., start : start + ceil_div(n * p, 8)]
        shifts = torch.arange(0, 8, p, dtype=torch.uint8, device=packed.device)
        values = (part[..., None, :] >> shifts[:, None]) & ((1 << p) - 1)
        codes |= values.flatten(-2)[..., :n] << done
        done, start = done + p, start + part.shape[-1]
    return codes


def pack_groups(codes_GL: Tensor, numel: int, bits: int) -> Tensor:
    """Pack the codes of each group separately; the last group only up to `numel`, rounded up to a multiple of 8.

    Args:
        codes_GL: uint8 (groups, elements of a group, a multiple of 8); 0 after element `numel`.
    """
    full = numel // codes_GL.shape[1]
    tail = codes_GL[full:, : ceil_div(numel - full * codes_GL.shape[1], 8) * 8]
    return torch.cat([pack(codes_GL[:full], bits).view(-1), pack(tail, bits).view(-1)])


def unpack_groups(packed: Tensor, numel: int, group: int, bits: int) -> Tensor:
    """Inverse of `pack_groups`: (groups, group), 0 after element `numel`."""
    full, size = numel // group, group * bits // 8
    codes_GL = unpack(packed[: full * size].view(full, size), bits)
    if full * group == numel:
        return codes_GL
    tail = unpack(packed[full * size :], bits)
    return torch.cat([codes_GL, torch.nn.functional.pad(tail, (0, group - len(tail)))[None]])


def pack_flags(flags: Tensor) -> Tensor:
    """Pack booleans (rows, count) into little-endian bitmaps (rows, ceil(count / 8))."""
    eights = torch.nn.functional.pad(flags, (0, -flags.shape[1] % 8)).unflatten(-1, (-1, 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (eights.to(torch.uint8) << shifts).sum(-1, dtype=torch.uint8)


def unpack_flags(packed: Tensor, count: int) -> Tensor:
    """Inverse of `pack_flags`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(1)[:, :count].bool()
