"""The process that decodes, and may crash: `python -m tests.fuzz.worker`, which `attack` starts.

It prints a line of JSON before each case, and one after it: so the process that reads them knows at which case it
crashed. A case that takes too long ends it, too.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time

import torch
from torch import Tensor

from lowbit import kernels

from .catalogue import case_of
from .guard import Outside, guard_scratch
from .targets import Bench, Case, LooseBench, as_tensor

COMPARED = 16  # one case in so many is decoded by the reference as well
TWICE = 4  # one in so many lies at both ends of its pages, by turns
MOST_FAULTS = 10
SILENCE = 300.0  # seconds that a case may take, kernels compiled meanwhile


def work(seed: int, numbers: range, until: float, only: str) -> None:
    """Try cases one after the other, until a time by `time.monotonic`."""
    bench, faults = Bench(guard_scratch()), 0
    for number in numbers:
        if time.monotonic() > until or faults == MOST_FAULTS:
            break
        faulthandler.dump_traceback_later(SILENCE, exit=True)
        torch.set_num_threads(1 + (number % 8 == 0))
        name, case, rng = case_of(seed, number, only)
        _say("at", number, case.text)
        try:
            ends = [True, False] if rng.random() < 1 / TWICE else [rng.random() < 0.5]
            attempt(bench, case, ends, compare=rng.random() < 1 / COMPARED)
            _say("survived", name, case.payloads)
        except Exception as error:
            faults += 1
            _say("failed", f"{type(error).__name__}: {error}")


def _say(*values: object) -> None:
    print(json.dumps(values), flush=True)


def attempt(bench: Bench, case: Case, ends: list[bool], *, compare: bool) -> None:
    """Carry a case out at these ends of its pages; nothing outside changes, or changes the result.

    Raises:
        Outside: something outside was written, or read.
        AssertionError: the result is not the reference's.
    """
    found = []
    for at_end in ends:
        bench.begin(at_end=at_end)
        found.append(case.run(bench))
        bench.end()
    if found[0] != found[-1]:
        raise Outside("what comes of it depends on what lies beside it, or was not written")
    if compare and case.exact:
        with kernels.backend("reference"):
            expected = case.run(LooseBench())
        _check_same(as_tensor(found[0], case.dtype), as_tensor(expected, case.dtype))


def _check_same(found: Tensor, expected: Tensor) -> None:
    """Raise unless all numbers are equal, any NaN to any other."""
    different = ~((found == expected) | (found.isnan() & expected.isnan()))
    if different.any():
        at = int(different.nonzero()[0])
        raise AssertionError(
            f"{int(different.sum())} of {len(found)} numbers are not the reference's, the first at {at}: "
            f"{found[at]}, and there {expected[at]}"
        )


if __name__ == "__main__":
    faulthandler.enable()
    seed, start, stop, step = map(int, sys.argv[1:5])
    work(seed, range(start, stop, step), time.monotonic() + float(sys.argv[5]), sys.argv[6])
