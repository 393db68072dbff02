"""Hostile payloads, and what is attacked with them without a session: decoding, adding into, summing, encoding."""

import functools
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs import Codec, GroupInt
from lowbit.kernels.layout import Layout
from tests.lowbit.codecs.examples import room_of

from .guard import BEFORE, Bench, Shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 4  # payloads that are decoded by turns in one case
SMALL: list[Shape] = [
    (7,), (64,), (1,), (1, 1), (5, 1), (1, 64), (4, 40), (3, 100), (2, 3, 200), (2, 8, 256), (1, 3, 130),
    (40, 10, 16), (300, 8), (2, 2, 2, 72), (33,), (65,),
]  # fmt: skip
"""One dimension, C = 1, ragged last tiles, one token, many."""
EMPTY: list[Shape] = [(0,), (0, 64), (3, 0)]
LARGE: list[Shape] = [(2, 64, 520), (40, 1000)]
"""More than a thread takes alone."""
SHAPES = SMALL * 24 + EMPTY * 4 + LARGE
SPECIAL = [
    *(struct.pack("<H", n) for n in (0x7F80, 0xFF80, 0x7FC0, 0x7FA0, 0x7F7F, 0x0001, 0x8000, 0x7FFF)),
    *(struct.pack("<f", v) for v in (float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-45, -0.0)),
    *(struct.pack("<i", n) for n in (0x7FA00001, -1, -(1 << 31), (1 << 31) - 1)),
    *(bytes([n]) for n in (0, 1, 0x7F, 0x80, 0x81, 0xBF, 0xC0, 0xFE, 0xFF)),
]
"""Bit patterns of Inf, NaN (quiet and signalling), the largest, denormal numbers and limits of integers."""

Span = tuple[int, int]
"""A section of a payload: its first byte, and the one behind its last."""

KINDS = {
    "random": 6, "zeros": 1, "ones": 1, "flips": 3, "run": 3, "splice": 3,
    "special": 6, "section": 8, "shuffled": 3, "flag": 6, "valid": 1,
}  # fmt: skip
"""Kinds of damage, and how frequent each is among the others."""
IN_SECTION = ("special", "section", "shuffled", "flag")


def damage(rng: random.Random, payload: bytes, spans: Sequence[Span]) -> tuple[str, bytes]:
    """A hostile payload of the same length, and what kind it is.

    Args:
        rng: decides everything.
        payload: a valid one. spans: its sections; those of no bytes left out.
    """
    if not payload:
        return "empty", payload
    size, data = len(payload), bytearray(payload)
    (kind,) = rng.choices([*KINDS], [*KINDS.values()])
    start, stop = rng.choice(spans or [(0, size)]) if kind in IN_SECTION else (0, size)
    match kind:
        case "random" | "section":
            data[start:stop] = rng.randbytes(stop - start)
        case "zeros" | "ones":
            data[:] = {"zeros": b"\0", "ones": b"\xff"}[kind] * size
        case "flips" | "flag":  # a flag more or less, or a pivot one further on
            for _ in range(rng.randint(1, 8) if kind == "flips" else 1):
                data[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
        case "run":
            at = rng.randrange(size)
            count = min(size - at, rng.choice((1, 2, 4, 16, 64, 1024)))
            data[at : at + count] = rng.choice((rng.randbytes(count), bytes(count), b"\xff" * count))
        case "splice":  # bytes of the right kind at the wrong place
            count = rng.randint(1, size)
            source, to = (rng.randrange(size - count + 1) for _ in range(2))
            data[to : to + count] = data[source : source + count]
        case "shuffled":  # as many flags are set, but elsewhere
            part = [*data[start : min(stop, start + 512)]]
            rng.shuffle(part)
            data[start : start + len(part)] = bytes(part)
        case "special":
            value = rng.choice(SPECIAL)
            if rng.random() < 0.3:
                data[start:stop] = (value * (stop - start))[: stop - start]
            else:
                for _ in range(rng.randint(1, 4)):
                    at = start + rng.randrange(stop - start) // len(value) * len(value)
                    data[at : min(stop, at + len(value))] = value[: stop - at]
    return kind, bytes(data)


@dataclass(frozen=True)
class Case:
    """One attack.

    Attributes:
        text: what is attacked, and how.
        run: carry it out at a bench; bytes that must not depend on the placement.
        dtype: of what `run` returns.
        payloads: how many hostile ones these are.
        exact: whether the reference returns the same numbers.
    """

    text: str
    run: Callable[[Bench], bytes]
    dtype: torch.dtype = torch.uint8
    payloads: int = 1
    exact: bool = True


class Target(Protocol):
    """What cases are made for, by numbers at random."""

    name: str

    def case(self, rng: random.Random) -> Case: ...


def same(a: Tensor, b: Tensor) -> Tensor:
    """Where numbers are equal; any NaN is like any other."""
    return (a == b) | (a.isnan() & b.isnan())


def as_tensor(content: bytes, dtype: torch.dtype) -> Tensor:
    return torch.tensor(np.frombuffer(content, np.uint8)).view(dtype)


def as_bytes(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def hard(rng: random.Random, shape: Shape) -> Tensor:
    """Gaussian float32 numbers of rows that differ, with outliers."""
    g = torch.Generator().manual_seed(rng.getrandbits(60))
    x = torch.randn(shape, generator=g) * torch.exp(2 * torch.randn((*shape[:-1], 1), generator=g))
    if x.numel() > 9:
        x.view(-1)[:: x.numel() // 9] *= 50
    return x


def layout_of(codec: Codec, shape: Shape) -> Layout:
    """Sections of a payload; one of all bytes where a format has none, or the tensor travels as it is."""
    (size, plain), room = codec.sized(shape), room_of(codec)
    plain = plain or not size or not hasattr(room, "layout")
    return Layout.of(all=size) if plain else room.layout(codec, shape)


def spans_of(layout: Layout) -> list[Span]:
    """Where a layout's sections lie that have bytes; those before the codes."""
    found = [(layout.offsets[n], layout.offsets[n] + size) for n, size in layout.sizes.items() if size]
    return found[:-1] or found


@functools.cache
def valid_payloads(codec: Codec, shape: Shape) -> tuple[list[bytes], list[Span]]:
    """Three valid payloads, and where their sections lie."""
    rng = random.Random(repr(shape))
    payloads = [as_bytes(codec.encode(hard(rng, shape))) for _ in range(3)]
    return payloads, spans_of(layout_of(codec, shape))


class Decoding:
    """`Codec.decode`, written or added."""

    what = ""  # how its name begins

    def __init__(self, codec: Any, shapes: Sequence[Shape], name: str = "") -> None:
        self.codec, self.name, self._shapes = codec, self.what + (name or repr(codec)), shapes

    def payload(self, rng: random.Random, shape: Shape) -> tuple[str, bytes]:
        valid, spans = valid_payloads(self.codec, shape)
        return damage(rng, rng.choice(valid), spans)

    def case(self, rng: random.Random) -> Case:
        shape, dtype, adds = rng.choice(self._shapes), rng.choice(DTYPES), rng.random() < 0.3
        kinds, payloads = zip(*(self.payload(rng, shape) for _ in range(AT_ONCE)), strict=True)
        base = as_bytes(torch.full((1,), 1.5, dtype=dtype)) if adds else None

        def run(bench: Bench) -> bytes:
            found = b""
            for payload in payloads:
                room, out = bench.out(shape, dtype, base=base)
                self.codec.decode(bench.payload(payload), shape=shape, out=out, accumulate=adds)
                found += room.content
            return found

        return Case(f"{self.name} {shape} {dtype} {kinds}{' added' if adds else ''}", run, dtype, AT_ONCE)


class Summing(Decoding):
    """`Summable.sum` over ranks, each of which is hostile."""

    what = "sum of "

    def case(self, rng: random.Random) -> Case:
        shape, dtype, divisor = rng.choice(self._shapes), rng.choice(DTYPES), rng.choice((1, 3))
        kinds, payloads = zip(*(self.payload(rng, shape) for _ in range(self.codec.ranks or 3)), strict=True)

        def run(bench: Bench) -> bytes:
            room, out = bench.out(shape, dtype)
            self.codec.sum([bench.payload(p) for p in payloads], out=out, divisor=divisor)
            return room.content

        return Case(f"{self.name} {shape} {dtype} {kinds}", run, dtype)


class AddingTo(Decoding):
    """`Summable.add`: the payload is written, too."""

    what = "add to "

    def case(self, rng: random.Random) -> Case:
        shape, dtype = rng.choice(self._shapes), rng.choice(DTYPES)
        (kind, payload), x = self.payload(rng, shape), hard(rng, shape).to(dtype)

        def run(bench: Bench) -> bytes:
            room, target = bench.written("the payload", payload, (len(payload),), torch.uint8)
            torch.default_generator.manual_seed(0)
            self.codec.add(target, bench.read_only("x", as_bytes(x), shape, dtype))
            return room.content

        return Case(f"{self.name} {shape} {dtype} {kind}", run)


class Encoding:
    """`Codec.encode` of hostile numbers: the payload lies between guards, and so does the tensor."""

    def __init__(self, codec: Codec, shapes: Sequence[Shape], name: str = "") -> None:
        self.codec, self.name, self._shapes = codec, f"encode {name or repr(codec)}", shapes

    def case(self, rng: random.Random) -> Case:
        shape, dtype, strided = rng.choice(self._shapes), rng.choice(DTYPES), rng.random() < 0.2
        wide = (*shape, 2) if strided else shape
        kind, content = hostile_numbers(rng, torch.Size(wide).numel(), dtype)
        size = self.codec.nbytes(shape)

        def run(bench: Bench) -> bytes:
            room, payload = bench.written("the payload", BEFORE[bench.at_end] * size, (size,), torch.uint8)
            x = bench.read_only("x", content, wide, dtype)
            torch.default_generator.manual_seed(0)
            self.codec.encode(x[..., 1] if strided else x, out=payload)
            return room.content

        return Case(f"{self.name} {shape} {dtype} {kind}{' strided' if strided else ''}", run)


def hostile_numbers(rng: random.Random, count: int, dtype: torch.dtype) -> tuple[str, bytes]:
    """NaN, Inf, denormal and huge numbers, and what they are called."""
    kind, size = rng.choice(("bits", "special", "one", "some")), count * dtype.itemsize
    patterns = [p for p in SPECIAL if len(p) == dtype.itemsize]
    if kind == "bits" or not count:
        return kind, rng.randbytes(size)
    if kind == "one":
        return kind, rng.choice(patterns) * count
    if kind == "special":
        return kind, b"".join(rng.choices(patterns, k=count))
    x = bytearray(as_bytes(hard(rng, (count,)).to(dtype)))
    at = rng.randrange(count) * dtype.itemsize
    x[at : at + dtype.itemsize] = rng.choice(patterns)
    return kind, bytes(x)


class Fused(Decoding):
    """Operators that decode saved activations as they compute; sums in any order, so not compared."""

    def __init__(self, operator: str, bits: int, group: int) -> None:
        shapes = [(2, 8), (3, 100), (5, 64), (2, 7)]
        super().__init__(GroupInt(bits=bits, group=group), shapes, f"{operator} {bits} bits, {group}")
        self._operator = operator

    def case(self, rng: random.Random) -> Case:
        shape, dtype = rng.choice(self._shapes), rng.choice(DTYPES)
        made = [self.payload(rng, shape) for _ in range(2)]
        gated, backward = self._operator.startswith("gated"), self._operator.endswith("backward")
        activation, centred = rng.choice(("silu", "gelu", "relu")), rng.random() < 0.5
        ones = as_bytes(torch.full((1,), 1.5, dtype=dtype))
        shapes = [shape, *[shape if gated else shape[1:]] * 2 * backward]

        def run(bench: Bench) -> bytes:
            payloads = [bench.payload(p) for _, p in made[: 1 + gated]]
            rows = bench.read_only("grad_out", ones * (shape[0] * shape[1]), shape, dtype)
            weight, bias = (bench.read_only(n, ones * shape[1], shape[1:], dtype) for n in ("weight", "bias"))
            rooms, outs = zip(*(bench.out(shape, dtype) for shape in shapes), strict=True)
            weights = [] if gated else [weight] if backward else [weight, bias]
            settings = [activation] if gated else [1e-6, centred, 0.0]
            arguments = *payloads, *weights, *[rows] * backward, *outs, *settings, self.codec.bits, self.codec.group
            getattr(torch.ops.lowbit, self._operator)(*arguments)
            return b"".join(room.content for room in rooms)

        return Case(f"{self.name} {shape} {dtype} {made[0][0]}", run, exact=False)
