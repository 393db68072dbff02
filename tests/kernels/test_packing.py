from __future__ import annotations

import pytest
import torch

from lowbit.kernels.packing import pack, pack_flags, unpack, unpack_flags


def packed_one_by_one(codes: list[int], bits: int) -> list[int]:
    """The definition, bit by bit: planes of 8, 4, 2 and 1 bits, low bits first, neighbours w bytes apart."""
    out: list[int] = []
    done = 0
    for p in (8, 4, 2, 1):
        if not bits & p:
            continue
        plane = [0] * (len(codes) * p // 8)
        for i, code in enumerate(codes):
            part = code >> done & (2**p - 1)
            plane[i % len(plane)] |= part << (i // len(plane) * p)
        out, done = out + plane, done + p
    return out


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [8, 32, 64, 104])
def test_pack_is_its_definition(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (3, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits)
    assert packed.shape == (3, count * bits // 8)
    assert packed.tolist() == [packed_one_by_one(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("count", [0, 1, 8, 77])
def test_flags(count: int) -> None:
    flags = torch.rand(3, count, generator=torch.Generator().manual_seed(count)) < 0.3
    packed = pack_flags(flags)
    assert packed.shape == (3, -(-count // 8))
    assert torch.equal(unpack_flags(packed, count), flags)
    for row, bits in zip(packed, flags, strict=True):
        assert all(bool(row[i // 8] >> (i % 8) & 1) == bool(f) for i, f in enumerate(bits))
