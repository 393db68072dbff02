"""The process that decodes, and may crash."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lowbit import kernels

from .catalogue import case_of
from .guard import Outside, guard_scratch
from .notes import Fault, Note, Outcome
from .targets import Bench, Case, as_tensor

COMPARED = 16  # one case in so many is decoded by the reference as well
TWICE = 4  # one in so many lies at both ends of its pages, by turns
SAVED = 1000  # cases after which what was survived is saved: a crash costs no more of the count
MOST_FAULTS = 10


def work(
    note: Note, result: Path, seed: int, numbers: Iterable[int], *, until: float = float("inf"), only: str = ""
) -> Outcome:
    """Try cases one after the other, noting each before and saving the outcome now and then.

    Args:
        seed: of all cases. numbers: which of them. until: when to stop, by `time.monotonic`.
        only: of targets whose name contains this.
    """
    bench, outcome = Bench(guard_scratch()), Outcome()
    for count, number in enumerate(numbers):
        if time.monotonic() > until or len(outcome.faults) == MOST_FAULTS:
            break
        if count % SAVED == 0:
            outcome.save(result)
        torch.set_num_threads(1 + (number % 8 == 0))
        name, case, rng = case_of(seed, number, only)
        note.write(number, case.text)
        try:
            ends = [True, False] if rng.random() < 1 / TWICE else [rng.random() < 0.5]
            attempt(bench, case, ends, compare=rng.random() < 1 / COMPARED)
            outcome.survived[name] += case.payloads
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            outcome.faults.append(Fault(number=number, text=case.text, why=why))
    outcome.save(result)
    return outcome


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
    if compare and case.expected is not None:
        with kernels.backend("reference"):
            expected = case.expected().reshape(-1)
        _check_same(as_tensor(found[0], case.dtype), expected)


def _check_same(found: Tensor, expected: Tensor) -> None:
    """Raise unless all numbers are equal, any NaN to any other."""
    different = ~((found == expected) | (found.isnan() & expected.isnan()))
    if different.any():
        at = int(different.nonzero()[0])
        raise AssertionError(
            f"{int(different.sum())} of {len(found)} numbers are not the reference's, the first at {at}: "
            f"{found[at]}, and there {expected[at]}"
        )


def main(note: str, result: str, seed: int, numbers: range, seconds: float, only: str) -> None:
    """Work in a process of its own, for so many seconds at most."""
    faulthandler.enable()
    until = time.monotonic() + seconds
    work(Note(Path(note)), Path(result), seed, numbers, until=until, only=only)
