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


def random_bytes(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """Every byte at random."""
    payload[:] = rng.randbytes(len(payload))


def zeros(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """Every byte 0."""
    payload[:] = bytes(len(payload))


def ones(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """Every byte 255."""
    payload[:] = b"\xff" * len(payload)


def flips(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """One to eight bits flipped."""
    for _ in range(rng.randint(1, 8)):
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)


def run(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """A run of bytes overwritten."""
    start = rng.randrange(len(payload))
    count = min(len(payload) - start, rng.choice((1, 2, 4, 16, 64, 1024)))
    payload[start : start + count] = rng.choice((rng.randbytes(count), bytes(count), b"\xff" * count))


def splice(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """A part of the payload in the place of another: bytes of the right kind at the wrong place."""
    count = rng.randint(1, len(payload))
    source, to = (rng.randrange(len(payload) - count + 1) for _ in range(2))
    payload[to : to + count] = payload[source : source + count]


def special(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """Numbers at the limits in one section, or all over it."""
    start, stop = rng.choice(spans)
    value = rng.choice(SPECIAL)
    if rng.random() < 0.3:
        payload[start:stop] = (value * (stop - start))[: stop - start]
        return
    for _ in range(rng.randint(1, 4)):
        at = start + rng.randrange(stop - start) // len(value) * len(value)
        payload[at : min(stop, at + len(value))] = value[: stop - at]


def section(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """One section at random, the others as they were."""
    start, stop = rng.choice(spans)
    payload[start:stop] = rng.randbytes(stop - start)


def shuffled(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """One section's bytes in another order: as many flags are set, but elsewhere."""
    start, stop = rng.choice(spans)
    stop = min(stop, start + 512)
    part = list(payload[start:stop])
    rng.shuffle(part)
    payload[start:stop] = bytes(part)


def flag(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """One bit of one section: a flag more or less, a pivot one further on."""
    start, stop = rng.choice(spans)
    payload[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)


def valid(rng: random.Random, payload: bytearray, spans: Sequence[Span]) -> None:
    """No damage."""


KINDS = [random_bytes, zeros, ones, flips, run, splice, special, special, section, section, shuffled, flag, flag, valid]
WEIGHTS = [6, 1, 1, 3, 3, 3, 3, 3, 4, 4, 3, 3, 3, 1]


def damage(rng: random.Random, payload: bytes, spans: Sequence[Span]) -> tuple[str, bytes]:
    """A hostile payload of the same length, and what kind it is.

    Args:
        rng: decides everything.
        payload: a valid one. spans: its sections; those of no bytes left out.
    """
    if not payload:
        return "empty", payload
    kind = rng.choices(KINDS, WEIGHTS)[0]
    changed = bytearray(payload)
    kind(rng, changed, spans or [(0, len(payload))])
    return kind.__name__, bytes(changed)
