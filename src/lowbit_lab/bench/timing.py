"""Compare times of operations: they take turns, so that a busy moment slows all of them, and caches are cold.

Also the memory of processes.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

HEAD_START = 20_000_000  # GPU cycles, about 10 ms: the host queues a round of operations in less

Operation = Callable[[int], object]
"""Works on one of several equal sets of buffers, given by its number."""


def in_turn(
    operations: Mapping[str, Operation],
    *,
    rounds: int,
    buffers: int,
    fewer: Mapping[str, int] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, list[float]]:
    """Measure the seconds of each operation in each round; in a round, every operation has its turn.

    On a GPU, times are measured between its events. It is busy until a round is queued, so no launch delays it.

    Args:
        operations: by name; each is called once beforehand, untimed.
        rounds: number of rounds.
        buffers: number of sets of buffers, which are used one after the other.
        fewer: numbers of rounds for operations that are too slow for all rounds.
        device: where the operations run.
    """
    measured = _on_gpu if torch.device(device).type == "cuda" else _here
    for operation in operations.values():
        operation(0)
    timers: dict[str, list[Callable[[], float]]] = {name: [] for name in operations}
    turn = 0
    for index in range(rounds):
        if measured is _on_gpu:
            torch.cuda._sleep(HEAD_START)
        for name, operation in operations.items():
            if index >= (fewer or {}).get(name, rounds):
                continue
            turn += 1
            timers[name].append(measured(operation, turn % buffers))
    return {name: [seconds() for seconds in rounds_of] for name, rounds_of in timers.items()}


def _here(operation: Operation, buffer: int) -> Callable[[], float]:
    start = time.perf_counter()
    operation(buffer)
    seconds = time.perf_counter() - start
    return lambda: seconds


def _on_gpu(operation: Operation, buffer: int) -> Callable[[], float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    operation(buffer)
    end.record()

    def seconds() -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000

    return seconds


def buffers_for(nbytes: int, device: torch.device | str = "cpu") -> int:
    """Return how many sets of buffers of this size fill twice the last-level cache, at least three."""
    return max(3, -(-2 * last_level_cache(device) // max(1, nbytes)) + 1)


def last_level_cache(device: torch.device | str = "cpu") -> int:
    """Return the bytes of a GPU's cache, or of the first core's largest; 64 MiB if the system does not report it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) * units.get(text[-1:], 1))
    return max(sizes, default=64 * 2**20)


def memory_of_process(pid: int | str = "self") -> dict[str, int]:
    """Return the kinds of memory that a process takes, such as "VmRSS", in bytes, as the kernel states them."""
    lines = map(str.split, Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[-1:] == ["kB"]}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Make PyTorch and the codecs use `count` threads inside a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
