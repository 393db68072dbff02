"""Times of operations that are to be compared: taken in turn, so that a busy moment hits all, and from cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

Operation = Callable[[int], object]
"""Does its work on one of several equal sets of buffers."""


def in_turn(
    operations: Mapping[str, Operation],
    *,
    rounds: int,
    buffers: int,
    fewer: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each operation in each round; in a round every operation has its turn.

    Args:
        operations: by name; each is called once beforehand, which is not timed.
        rounds: how many times.
        buffers: sets of buffers to go round; an operation meets the same ones again after all others.
        fewer: rounds of operations that are too slow to do as many.
    """
    for operation in operations.values():
        operation(0)
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    turn = 0
    for index in range(rounds):
        for name, operation in operations.items():
            if index >= (fewer or {}).get(name, rounds):
                continue
            turn += 1
            start = time.perf_counter()
            operation(turn % buffers)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float]) -> float:
    """Interquartile range as a share of the median; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def buffers_for(nbytes: int) -> int:
    """Sets of buffers of this size that are together twice what the last-level cache holds, at least three."""
    return max(3, -(-2 * last_level_cache() // max(1, nbytes)) + 1)


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core; 64 MiB where the system does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    found = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        found.append(int(text.rstrip("KMG")) * units.get(text[-1:], 1))
    return max(found, default=64 * 2**20)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch, and with it the codecs, use so many threads inside a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
