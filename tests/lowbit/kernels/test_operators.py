"""Schemas, fake implementations, argument checks and the choice of a backend."""

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.library import opcheck

from lowbit import kernels
from lowbit.activations import LayerAware
from lowbit.activations.follow import name_of
from lowbit.codecs import Cast, GroupInt, TAHQuant
from lowbit.kernels import operators
from lowbit.kernels.exact import log2, smallest, uniform
from lowbit.kernels.layout import pack, pack_flags, unpack, unpack_flags
from tests.lowbit.codecs.examples import bytes_of, encoded, rooms
from tests.lowbit.codecs.feature_int.examples import FEATURES
from tests.refused import refused


def in_graphs() -> str:
    """The name of 8 bits in graphs."""
    name = name_of(LayerAware(bits=8), "linear", "")
    assert name is not None
    return name


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    **{name: case for room in rooms() for name, case in getattr(room, "OPERATORS", {}).items()},
    "saved_encode": lambda: (torch.randn(3, 70), in_graphs()),
    "saved_decode": lambda: (GroupInt(bits=8).encode(torch.randn(3, 70)), [3, 70], torch.float32, in_graphs()),
    "norm_encode": lambda: (
        *(torch.randn(3, 70), torch.randn(70), None, saved(3, 70), torch.empty(3, 70)),
        *NORM, 4, 64, None,
    ),
    "norm_recompute": lambda: (
        *(made(3, 70), torch.randn(70), torch.randn(70), torch.empty(3, 70)), *NORM, 4, 64,
    ),
    "norm_backward": lambda: (
        *(made(3, 70), torch.randn(70), torch.randn(3, 70)),
        *(torch.empty(3, 70), torch.empty(70), None), *NORM, 4, 64,
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
FIRST = [room.CODECS[0] for room in rooms() if hasattr(room, "CODECS")]


def saved(*shape: int) -> torch.Tensor:
    return bytes_of(GroupInt(), *shape)


def made(*shape: int) -> torch.Tensor:
    return encoded(GroupInt(), *shape)


def test_every_operator_has_a_case() -> None:
    names = {n.removeprefix("lowbit::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("lowbit::")}
    declared = {name for name in names if not name.startswith(("tp_", "vllm_"))}  # sums over ranks are no kernels
    assert declared == set(CASES), (
        "a format's operators have theirs in OPERATORS of tests/lowbit/codecs/<name>/examples.py"
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_opcheck(name: str, backend: str) -> None:
    with kernels.backend(backend):
        opcheck(getattr(torch.ops.lowbit, name).default, CASES[name]())


def test_compiles_without_a_graph_break() -> None:
    x = torch.randn(1, 3, 200)
    for codec in (*FIRST, TAHQuant.published()):
        through = torch.compile(codec.round_trip, backend="eager", fullgraph=True)
        assert torch.equal(through(x), codec.round_trip(x))


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_payload_may_begin_anywhere(backend: str, offset: int) -> None:
    x = torch.randn(2, 3, 70)
    for codec in (*FIRST, GroupInt(bits=5), FEATURES, Cast(dtype=torch.bfloat16)):
        with kernels.backend(backend):
            expected = codec.encode(x)
            buffer = torch.zeros(offset + len(expected), dtype=torch.uint8)
            codec.encode(x, out=buffer[offset:])
            assert torch.equal(buffer[offset:], expected)
            assert torch.equal(codec.decode(buffer[offset:], shape=x.shape), codec.decode(expected, shape=x.shape))


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("saved")])
def test_wrong_tensors_are_refused(name: str) -> None:
    operator, given = getattr(torch.ops.lowbit, name).default, CASES[name]()
    fused, rows = name.startswith(("norm", "gated")), []

    def refuse(index: int, wrong: object, error: type[Exception], message: str) -> None:
        rows.append((partial(operator, *given[:index], wrong, *given[index + 1 :]), error, message))

    for i, value in enumerate(given if fused else given[:2]):
        argument = operator._schema.arguments[i].name
        named = f"^{argument} " if fused else ""
        if isinstance(value, list):
            refuse(i, [value[0], value[1][:-1], value[2]], ValueError, f"expected {len(value[1])} contiguous uint8")
            refuse(i, [value[0], value[1].view(torch.int8), value[2]], ValueError, "payload is")
        elif value is None and argument == "up":
            refuse(i, torch.empty(210), ValueError, "up is None; allowed: all of")
        elif not isinstance(value, torch.Tensor):
            continue
        elif "payload" in argument:
            refuse(i, value[:-1], ValueError, f"{named}.*expected {len(value)} contiguous uint8")
            refuse(i, value.view(torch.int8), ValueError, f"{argument} is")
        elif not value.is_floating_point():
            refuse(i, value.double(), ValueError, f"{named}is torch.float64 .*; expected")
        else:
            refuse(i, value.double(), TypeError, r"dtype torch\.float64; allowed: float")
            refuse(i, torch.stack([value, value], -1)[..., 0], ValueError, f"{named}.*contiguous")
    refused(*rows)


def test_wrong_settings_are_refused() -> None:
    x, payload, lowbit = torch.randn(1, 1, 64), torch.zeros(64, dtype=torch.uint8), torch.ops.lowbit
    rows = [
        (lowbit.tah_quant_encode, (x, payload, 63, 4, 3, 0.2, "tile", False, None), "tile is 63"),
        (lowbit.tah_quant_encode, (x, payload, 64, 4, 5, 0.2, "tile", False, None), "low_bits is 5, high_bits 4"),
        (lowbit.tah_quant_encode, (x, payload, 64, 4, 3, 0.2, "row", False, None), "allocation is 'row'"),
        (lowbit.block_float8_encode, (x.view(-1), payload, "e3m4", 64, None, False),
         "format is 'e3m4', block 64; allowed: 'e4m3', 'e5m2'"),
        (lowbit.gated_recompute, (payload, None, x, "tanh", 4, 64), "activation is 'tanh'; allowed: 'silu', 'gelu'"),
        (lowbit.norm_recompute, (payload, None, None, x[0], torch.nan, False, 0.0, 4, 64),
         "eps is nan; allowed: finite"),
        (lowbit.norm_recompute, (payload, None, None, x, 1e-6, False, 0.0, 4, 64),
         r"shape \(1, 1, 64\); allowed: \(rows, channels\)"),
        (lowbit.group_int_encode, (x.view(-1), payload, 9, 64, False, None), "bits is 9"),
        (kernels.backend("tpu").__enter__, (), "backend is 'tpu'; allowed: 'auto'"),
    ]  # fmt: skip
    for way, index, change, message in (
        ("encode", 2, lambda scales: scales[:69], r"scales is torch.float32 \(1, 69\)"),
        ("encode", 3, lambda offset: offset[:69], r"offset is torch.float32 \(69,\)"),
        ("encode", 4, torch.Tensor.long, "order is torch.int64"),
        ("encode", 5, lambda _: 70, "outliers is 70 of 70"),
        ("encode", 6, lambda _: 9, "bits 9, .*allowed: .* 3 to 8"),
        ("decode", 0, lambda payloads: payloads[:2], r"scales is torch.float32 \(3, 70\)"),
        ("decode", 8, lambda _: 0, "divisor 0, payloads 3"),
    ):
        given = [*CASES[f"feature_int_{way}"]()]
        given[index] = change(given[index])
        rows.append((getattr(lowbit, f"feature_int_{way}"), given, message))
    refused(*((partial(operator, *given), ValueError, message) for operator, given, message in rows))


def test_a_missing_backend_is_said_once_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operators, "_modules", {})
    monkeypatch.setattr(operators, "_warned", set())
    monkeypatch.delitem(sys.modules, "lowbit.codecs.group_int.cpu", raising=False)
    monkeypatch.setitem(sys.modules, "lowbit.kernels.cpu.jit", None)
    x = torch.randn(64)
    with caplog.at_level(logging.WARNING):
        first = GroupInt().encode(x)
        assert torch.equal(GroupInt().encode(x), first)
    assert [r.message for r in caplog.records if "slow reference" in r.message] == [caplog.records[0].message]
    with kernels.backend("cpu"), pytest.raises(RuntimeError, match="backend 'cpu' needs numba"):
        GroupInt().encode(x)


def test_log2_is_within_its_bound() -> None:
    x = torch.logspace(-30, 30, 5001, base=2.0).float()
    assert (log2(x) - x.double().log2()).abs().max() < 4e-6
    assert log2(torch.tensor(8.0)) == 3


def test_smallest_takes_the_first_of_equals() -> None:
    key = torch.tensor([[2.0, 1.0, 1.0, float("inf"), 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert smallest(key, torch.tensor([2, 2])).tolist() == [
        [False, True, True, False, False],
        [True, True, False, False, False],
    ]
    assert not smallest(key, torch.tensor([0, 0])).any()
    assert smallest(key, torch.tensor([5, 5])).all()


def test_uniform_numbers_are_uniform_and_differ_by_seed() -> None:
    u = uniform(100_000, 1, torch.device("cpu"))
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    # Six deviations of the mean and of the lag-one correlation of that many uniform numbers.
    assert abs(u.mean() - 0.5) < 6 * (1 / 12 / 100_000) ** 0.5
    assert abs(((u[1:] - 0.5) * (u[:-1] - 0.5)).mean()) < 6 / 12 / 100_000**0.5
    assert not torch.equal(u, uniform(100_000, 2, torch.device("cpu")))


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
