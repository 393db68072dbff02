"""Schemas, fake implementations, argument checks and the choice of a backend."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch.library import opcheck

from lowbit import ops
from lowbit.codecs import BlockFloat8, Codec, GroupInt, TAHQuant
from lowbit.ops import contract, reference

TAH = (64, 5, 4, 0.88, "range")
CASES = {
    "group_int_encode": lambda: (
        torch.randn(100),
        bytes_of(GroupInt(bits=5), 100),
        5,
        64,
        False,
        None,
    ),
    "group_int_decode": lambda: (
        encoded(GroupInt(bits=5), 100),
        torch.empty(100),
        5,
        64,
        False,
        False,
    ),
    "block_float8_encode": lambda: (
        torch.randn(100),
        bytes_of(BlockFloat8(), 100),
        "e4m3",
        128,
        None,
        True,
    ),
    "block_float8_decode": lambda: (
        encoded(BlockFloat8(), 100),
        torch.empty(100),
        "e4m3",
        128,
        False,
    ),
    "tah_quant_encode": lambda: (torch.randn(2, 3, 70), bytes_of(TAHQuant(), 2, 3, 70), *TAH, None),
    "tah_quant_decode": lambda: (
        encoded(TAHQuant(), 2, 3, 70),
        torch.empty(2, 3, 70),
        *TAH,
        False,
        False,
    ),
}


def bytes_of(codec: Codec, *shape: int) -> torch.Tensor:
    return torch.zeros(codec.nbytes(shape), dtype=torch.uint8)


def encoded(codec: Codec, *shape: int) -> torch.Tensor:
    return codec.encode(torch.randn(shape))


def test_every_operator_has_a_case_and_an_implementation() -> None:
    assert set(CASES) == set(contract.SCHEMAS) == set(contract.CHECKS)
    assert all(hasattr(ops, name) and hasattr(reference, name) for name in CASES)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_opcheck(name: str, backend: str) -> None:
    with ops.backend(backend):
        opcheck(getattr(ops, name), CASES[name]())


def test_compiles_without_a_graph_break() -> None:
    codec = GroupInt(bits=4)

    @torch.compile(backend="eager", fullgraph=True)
    def through(x: torch.Tensor) -> torch.Tensor:
        payload = torch.empty(codec.nbytes(x.shape), dtype=torch.uint8)
        ops.group_int_encode(x, payload, 4, 64, False, None)
        y = torch.empty_like(x)
        ops.group_int_decode(payload, y, 4, 64, False, False)
        return y

    x = torch.randn(1000)
    assert torch.equal(through(x), codec.round_trip(x))


@pytest.mark.parametrize("name", CASES)
def test_wrong_tensors_are_refused(name: str) -> None:
    operator = getattr(ops, name)
    first, second, *rest = CASES[name]()
    x, payload = (first, second) if name.endswith("encode") else (second, first)

    def call(x: torch.Tensor, payload: torch.Tensor) -> None:
        operator(*((x, payload) if name.endswith("encode") else (payload, x)), *rest)

    with pytest.raises(TypeError, match=r"dtype torch\.float64; allowed: float32"):
        call(x.double(), payload)
    with pytest.raises(ValueError, match=f"expected {len(payload)} contiguous uint8"):
        call(x, payload[:-1])
    with pytest.raises(ValueError, match="contiguous"):
        call(torch.stack([x, x], -1)[..., 0], payload)
    with pytest.raises(ValueError, match="payload is"):
        call(x, payload.view(torch.int8))


def test_wrong_settings_are_refused() -> None:
    x, payload = torch.randn(1, 1, 64), torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="tile is 63"):
        ops.tah_quant_encode(x, payload, 63, 4, 3, 0.2, "tile", None)
    with pytest.raises(ValueError, match="low_bits is 5, high_bits 4"):
        ops.tah_quant_encode(x, payload, 64, 4, 5, 0.2, "tile", None)
    with pytest.raises(ValueError, match="allocation is 'row'"):
        ops.tah_quant_encode(x, payload, 64, 4, 3, 0.2, "row", None)
    with pytest.raises(ValueError, match="format is 'e3m4', block 64; allowed: 'e4m3', 'e5m2'"):
        ops.block_float8_encode(x.view(-1), payload, "e3m4", 64, None, False)
    with pytest.raises(ValueError, match="bits is 9"):
        ops.group_int_encode(x.view(-1), payload, 9, 64, False, None)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'gpu'; allowed: 'auto'"), ops.backend("gpu"):
        pass


def test_a_missing_backend_is_said_once_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contract, "_cpu_kernels", None)
    monkeypatch.setitem(sys.modules, "lowbit.ops.cpu", None)
    x = torch.randn(64)
    with caplog.at_level(logging.WARNING):
        first = GroupInt().encode(x)
        assert torch.equal(GroupInt().encode(x), first)
    assert [r.message for r in caplog.records if "slow reference" in r.message] == [
        caplog.records[0].message
    ]
    with ops.backend("cpu"), pytest.raises(RuntimeError, match="backend 'cpu' needs numba"):
        GroupInt().encode(x)
