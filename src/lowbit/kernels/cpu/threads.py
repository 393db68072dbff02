"""Run ranges of rows on a pool of Python threads: kernels hold no lock, and a busy host slows them no further."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

SMALL = 1 << 16  # bytes; for less, starting threads costs more than it saves

_pool: ThreadPoolExecutor | None = None


def over_rows(work: Callable[[int, int], object], rows: int, nbytes: int) -> None:
    """Call `work(start, stop)` on disjoint ranges that cover `rows`, on `torch.get_num_threads()` threads.

    Args:
        work: must not access memory that another range accesses.
        rows: number of rows.
        nbytes: size of the tensor; a small one stays on the calling thread.
    """
    threads = min(torch.get_num_threads(), rows) if nbytes >= SMALL else 1
    if threads == 1:
        work(0, rows)
        return
    bounds = [rows * i // threads for i in range(threads + 1)]
    others = [_workers().submit(work, *b) for b in itertools.pairwise(bounds[1:])]
    try:
        work(bounds[0], bounds[1])
    finally:
        for other in others:
            other.result()


def _workers() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lowbit")
    return _pool


def _forget() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # a forked child does not inherit threads
