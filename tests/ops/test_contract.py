"""Schemas, fake implementations, argument checks and the choice of a backend."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch.library import opcheck

from lowbit import ops
from lowbit.codecs import BlockFloat8, Cast, Codec, FeatureInt4, GroupInt, TAHQuant
from lowbit.ops import contract, reference
from lowbit.ops.layout import subspace_geometry

FEATURES = FeatureInt4(ranges=torch.ones(3, 70), total=torch.ones(70), features=(5, 69))
ORDER = torch.tensor([*(f for f in range(70) if f not in (5, 69)), 5, 69], dtype=torch.int32)
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
    "feature_int4_encode": lambda: (
        *(torch.randn(3, 70), bytes_of(FEATURES, 3, 70), torch.rand(70), ORDER, 2),
        torch.zeros(1, dtype=torch.int64),
    ),
    "feature_int4_decode": lambda: (
        *(encoded(FEATURES, 3, 70), torch.empty(3, 70), torch.rand(70), ORDER, 2), True,
    ),
    "feature_int4_sum": lambda: (
        [encoded(FEATURES, 3, 70) for _ in range(3)], torch.empty(3, 70), torch.rand(3, 70), ORDER, 2, 3,
    ),
    "tah_quant_encode": lambda: (torch.randn(2, 3, 70), bytes_of(TAHQuant(), 2, 3, 70), *TAH, None),
    "tah_quant_decode": lambda: (
        encoded(TAHQuant(), 2, 3, 70),
        torch.empty(2, 3, 70),
        *TAH,
        False,
        False,
    ),
    "subspace_renew": lambda: (
        *(torch.randn(6, 70), torch.randn(5, 70), torch.eye(5), torch.tensor(7), subspace()),
        *(torch.empty(6, 5), torch.empty(5), torch.empty(5, 70), torch.empty(5, 5), torch.tensor(0)),
        *(3, True, True), 3, 32, 4,
    ),
    "subspace_inverse": lambda: (torch.randn(5, 70), torch.empty(5, 5)),
    "subspace_follow": lambda: (
        *(subspace(), torch.randn(5, 70), torch.tensor(7), torch.empty(4, dtype=torch.int32)),
        *(torch.empty(5, 70), torch.tensor(0), torch.empty(5)), *(6, 3, True), 3, 32, 4,
    ),
    "subspace_coefficients_encode": lambda: (
        *(torch.randn(6, 5), torch.rand(5), subspace(), torch.empty(6, 5)), 70, 3, 32, 4,
    ),
    "subspace_coefficients_decode": lambda: (subspace(), torch.rand(5), torch.empty(6, 5), 70, 3, 32, 4),
    "subspace_rest_encode": lambda: (torch.randn(6, 70), torch.randn(6, 5), torch.randn(5, 70), subspace(), 3, 32, 4),
    "subspace_rest_decode": lambda: (
        *(subspace(), torch.randn(6, 5), torch.randn(5, 70), torch.empty(6, 70)), 3, 32, 4, False,
    ),
    "norm_encode": lambda: (
        *(torch.randn(3, 70), torch.randn(70), None, saved(3, 70), torch.empty(3, 70)),
        *NORM, 4, 64, None,
    ),
    "norm_recompute": lambda: (
        *(made(3, 70), torch.randn(70), torch.randn(70), torch.empty(3, 70)), *NORM, 4, 64,
    ),
    "norm_backward": lambda: (
        *(made(3, 70), torch.randn(70), None, torch.randn(3, 70)),
        *(torch.empty(3, 70), torch.empty(70), None, torch.empty(3, 70)), *NORM, 4, 64,
    ),
    "gated_encode": lambda: (
        *(torch.randn(3, 70), torch.randn(3, 70), saved(3, 70), saved(3, 70), torch.empty(3, 70)),
        "silu", 4, 64, None,
    ),
    "gated_recompute": lambda: (made(210), made(210), torch.empty(210), "gelu", 4, 64),
    "gated_backward": lambda: (
        *(made(210), None, torch.randn(210), torch.empty(210), None, torch.empty(210)), "relu", 4, 64,
    ),
}  # fmt: skip
NORM = 1e-6, False, 0.0


def subspace() -> torch.Tensor:
    """A payload of 6 tokens of 70 channels, with 5 directions."""
    size = subspace_geometry(6, 70, 5, 3, 32, 4).layout.nbytes
    return torch.zeros(size, dtype=torch.uint8)


def saved(*shape: int) -> torch.Tensor:
    return bytes_of(GroupInt(), *shape)


def made(*shape: int) -> torch.Tensor:
    return encoded(GroupInt(), *shape)


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
    x = torch.randn(1, 3, 200)
    for codec in (GroupInt(bits=4), TAHQuant(), TAHQuant.published(), BlockFloat8(), Cast()):
        through = torch.compile(codec.round_trip, backend="eager", fullgraph=True)
        assert torch.equal(through(x), codec.round_trip(x))


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_payload_may_begin_anywhere(backend: str, offset: int) -> None:
    x = torch.randn(2, 3, 70)
    for codec in (
        GroupInt(bits=5),
        TAHQuant(),
        BlockFloat8(),
        FEATURES,
        Cast(dtype=torch.bfloat16),
    ):
        with ops.backend(backend):
            expected = codec.encode(x)
            buffer = torch.zeros(offset + len(expected), dtype=torch.uint8)
            codec.encode(x, out=buffer[offset:])
            assert torch.equal(buffer[offset:], expected)
            assert torch.equal(codec.decode(buffer[offset:], shape=x.shape), codec.decode(expected, shape=x.shape))


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith(("norm", "gated", "subspace"))])
def test_wrong_tensors_are_refused(name: str) -> None:
    operator = getattr(ops, name)
    first, second, *rest = CASES[name]()
    x, payload = (first, second) if name.endswith("encode") else (second, first)
    payloads = payload
    payload = payloads[1] if name.endswith("sum") else payload

    def call(x: torch.Tensor, payload: torch.Tensor) -> None:
        if name.endswith("sum"):
            operator([payloads[0], payload, payloads[2]], x, *rest)
            return
        operator(*((x, payload) if name.endswith("encode") else (payload, x)), *rest)

    with pytest.raises(TypeError, match=r"dtype torch\.float64; allowed: float32"):
        call(x.double(), payload)
    with pytest.raises(ValueError, match=f"expected {len(payload)} contiguous uint8"):
        call(x, payload[:-1])
    with pytest.raises(ValueError, match="contiguous"):
        call(torch.stack([x, x], -1)[..., 0], payload)
    with pytest.raises(ValueError, match="payload is"):
        call(x, payload.view(torch.int8))


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("norm", "gated", "subspace"))])
def test_wrong_tensors_by_name_are_refused(name: str) -> None:
    given = CASES[name]()

    def call(index: int, argument: object) -> None:
        getattr(ops, name)(*given[:index], argument, *given[index + 1 :])

    schema = contract.SCHEMAS[name].split(",")
    tensors = [i for i, argument in enumerate(given) if isinstance(argument, torch.Tensor)]
    for i in tensors:
        argument = schema[i].split()[-1]
        if "payload" in argument:
            with pytest.raises(ValueError, match=f"^{argument} is .* contiguous uint8"):
                call(i, given[i][:-1])
            continue
        if not given[i].is_floating_point():
            with pytest.raises(ValueError, match=f"^{argument} is torch.float64 .*; expected"):
                call(i, given[i].double())
            continue
        with pytest.raises(TypeError, match=f"{argument} has dtype torch.float64; allowed: float"):
            call(i, given[i].double())
        wide = torch.stack([given[i], given[i]], -1)[..., 0]
        with pytest.raises(ValueError, match=f"{argument} has shape .*contiguous"):
            call(i, wide)
    for i, argument in enumerate(given):
        if argument is None and "Tensor" in schema[i] and "up" in schema[i].split()[-1]:
            with pytest.raises(ValueError, match="up is None; allowed: all of"):
                call(i, torch.empty(210))


def test_wrong_tables_of_features_are_refused() -> None:
    x, payload, inverse, order, outliers, clipped = CASES["feature_int4_encode"]()
    encode = ops.feature_int4_encode
    with pytest.raises(ValueError, match=r"scale is torch.float32 \(69,\).*float32 \(70,\)"):
        encode(x, payload, inverse[:69], order, outliers, clipped)
    with pytest.raises(ValueError, match=r"order is torch.int64 .*expected contiguous torch.int32"):
        encode(x, payload, inverse, order.long(), outliers, clipped)
    with pytest.raises(ValueError, match=r"clipped is torch.float32"):
        encode(x, payload, inverse, order, outliers, clipped.float())
    with pytest.raises(ValueError, match="outliers is 70 of 70 features"):
        encode(x, payload, inverse, order, 70, clipped)
    payloads, out, scales, order, outliers, divisor = CASES["feature_int4_sum"]()
    with pytest.raises(ValueError, match=r"scale is torch.float32 \(3, 70\).*\(2, 70\)"):
        ops.feature_int4_sum(payloads[:2], out, scales, order, outliers, divisor)
    with pytest.raises(ValueError, match="divisor 0, payloads 3; allowed"):
        ops.feature_int4_sum(payloads, out, scales, order, outliers, 0)


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
    with pytest.raises(ValueError, match="activation is 'tanh'; allowed: 'silu', 'gelu'"):
        ops.gated_recompute(payload, None, x, "tanh", 4, 64)
    with pytest.raises(ValueError, match="eps is nan; allowed: finite"):
        ops.norm_recompute(payload, None, None, x[0], torch.nan, False, 0.0, 4, 64)
    with pytest.raises(ValueError, match=r"shape \(1, 1, 64\); allowed: \(rows, channels\)"):
        ops.norm_recompute(payload, None, None, x, 1e-6, False, 0.0, 4, 64)
    with pytest.raises(ValueError, match="bits is 9"):
        ops.group_int_encode(x.view(-1), payload, 9, 64, False, None)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'tpu'; allowed: 'auto'"), ops.backend("tpu"):
        pass


def test_a_missing_backend_is_said_once_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contract, "_kernels", {})
    monkeypatch.setattr(contract, "_told", set())
    monkeypatch.setitem(sys.modules, "lowbit.ops.cpu", None)
    x = torch.randn(64)
    with caplog.at_level(logging.WARNING):
        first = GroupInt().encode(x)
        assert torch.equal(GroupInt().encode(x), first)
    assert [r.message for r in caplog.records if "slow reference" in r.message] == [caplog.records[0].message]
    with ops.backend("cpu"), pytest.raises(RuntimeError, match="backend 'cpu' needs numba"):
        GroupInt().encode(x)
