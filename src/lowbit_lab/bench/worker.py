"""A process that follows a benchmark's orders.

Orders come on standard input, one JSON list `[method, arguments]` a line. Each is answered with one line of JSON on
standard output, after lines that may report progress. Output of libraries goes to standard error.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any

import torch

from lowbit.job.process_group import joined
from lowbit.train.device import threads_per_rank
from lowbit.wire.connections import congestion_control, set_congestion_control
from lowbit.wire.errors import first_line

TIMEOUT_SECONDS = 600.0
CONGESTION = "use_congestion_control"
"""The order that every process knows."""
_answers: IO[str] | None = None


def serve(make: Callable[[], Any]) -> None:
    """Run orders on the object of `make` until standard input ends; as one of several ranks, join the others first.

    If standard input ends during an order, the benchmark is gone, and this process exits.
    """
    global _answers
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_read, args=(orders, busy), daemon=True).start()
    with ExitStack() as stack:
        if "RANK" in os.environ:
            pin(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
            stack.enter_context(joined(TIMEOUT_SECONDS))
        elif torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOWBIT_WORKER"]) % torch.cuda.device_count())
        worker = make()
        while line := orders.get():
            method, arguments = json.loads(line)
            answer = follow(worker, method, arguments)
            busy.clear()
            _write(answer)


def follow(worker: Any, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run an order and return {"result": ...} or {"error": one line}; an error makes the benchmark end this process."""
    try:
        order = use_congestion_control if method == CONGESTION else getattr(worker, method)
        return {"result": order(**arguments)}
    except Exception as error:
        traceback.print_exc()
        return {"error": first_line(error)}


def use_congestion_control(name: str) -> None:
    """Change that of all connections to other hosts.

    Raises:
        RuntimeError: the kernel does not permit it.
    """
    set_congestion_control(name)
    if (used := congestion_control()) not in ("", name):
        raise RuntimeError(f"congestion control is {used!r}, and the kernel does not permit {name!r}")


def report_progress(value: Any) -> None:
    """Report progress to the benchmark."""
    if _answers is not None:
        _write({"progress": value})


def pin(rank: int, ranks: int) -> None:
    """Pin this rank to its share of the machine's cores, if there are enough of them."""
    cores = sorted(os.sched_getaffinity(0))
    threads = threads_per_rank(ranks)
    if ranks <= len(cores):
        os.sched_setaffinity(0, cores[rank * threads : (rank + 1) * threads])
    torch.set_num_threads(threads)


def _read(orders: queue.SimpleQueue[str], busy: threading.Event) -> None:
    with os.fdopen(os.dup(0)) as stdin:  # unlike sys.stdin, not closed while this may be reading
        for line in stdin:
            busy.set()
            orders.put(line)
    if busy.is_set():
        os._exit(1)
    orders.put("")


def _write(message: dict[str, Any]) -> None:
    assert _answers is not None
    _answers.write(json.dumps(message) + "\n")
    _answers.flush()
