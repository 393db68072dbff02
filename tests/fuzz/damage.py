"""Hostile payloads: bytes at random, and valid payloads that are damaged where it hurts."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

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
