"""Attack decoders in processes of their own, which may crash.

A case is made of a seed and a number alone. Each format says in `hostile()`, in the examples of its folder of tests,
how it is attacked.
"""

import faulthandler
import functools
import itertools
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from lowbit import kernels
from tests.forked import CONTEXT
from tests.lowbit.codecs.examples import rooms

from .guard import Bench, Outside, guarded
from .targets import Case, Fused, Target, as_tensor, same

COMPARED = 16  # one case in so many is decoded by the reference as well
TWICE = 4  # one in so many lies at both ends of its pages, by turns
MOST_FAULTS = 10
SILENCE = 300.0  # seconds that a case may take, kernels compiled meanwhile


@dataclass(frozen=True)
class Fault:
    """A case that was not survived: which of the seed, what it is, and what went wrong or how the process ended."""

    number: int
    text: str
    why: str


@dataclass
class Outcome:
    """Payloads survived, by target; and the cases that were not."""

    survived: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)


@functools.cache
def targets(only: str = "") -> list[Target]:
    """Those whose name contains `only`; such as have more ways to go wrong several times."""
    operators = ("norm_recompute", "norm_backward", "gated_recompute", "gated_backward")
    fused = [Fused(name, *s) for name, s in itertools.product(operators, ((4, 64), (3, 8), (8, 1000)))]
    return [target for target in [*(t for room in rooms() for t in room.hostile()), *fused] if only in target.name]


def case_of(seed: int, number: int, only: str = "") -> tuple[str, Case, random.Random]:
    """Case `number` of a seed: the target's name, the attack, and the numbers at random that are left.

    Raises:
        ValueError: there is no target whose name contains `only`.
    """
    rng = random.Random((seed << 40) | number)
    chosen = targets(only)
    if not chosen:
        raise ValueError(f"only is {only!r}; allowed: a part of a target's name, such as 'TAHQuant'")
    target = rng.choice(chosen)
    return target.name, target.case(rng), rng


def attack(seed: int, numbers: range, *, seconds: float = float("inf"), only: str = "") -> Outcome:
    """Carry cases out in new processes: after one that crashed, another one continues.

    Args:
        seed: of all cases. numbers: which of them. seconds: after which it ends.
        only: of targets whose name contains this.
    """
    outcome, end = Outcome(), time.monotonic() + seconds
    while numbers and len(outcome.faults) < MOST_FAULTS and time.monotonic() < end:
        last, text = numbers.stop, "start"
        for said in carry_out(_attack, seed, numbers, end, only):
            match said:
                case ["at", last, text]:
                    pass
                case ["survived", name, payloads]:
                    outcome.survived[name] += payloads
                case ["failed", why] | why:
                    outcome.faults.append(Fault(last, text, why))
        numbers = range(last + numbers.step, numbers.stop, numbers.step)
    return outcome


def carry_out(work: Callable[..., None], *arguments: object) -> Iterator[Any]:
    """What `work(say, *arguments)` says in a process of its own; last, if it did not end well, how it ended."""
    ours, theirs = CONTEXT.Pipe(False)
    process = CONTEXT.Process(target=_carry_out, args=(theirs, work, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        while ours.poll(SILENCE):
            yield ours.recv()
        yield f"no end within {SILENCE:.0f} s"
    except EOFError:
        process.join()
        if process.exitcode:
            yield f"signal {-process.exitcode}"
    process.kill()
    process.join()


def _carry_out(to: Connection, work: Callable[..., None], *arguments: object) -> None:
    try:
        work(to.send, *arguments)
    except Exception:
        to.send(traceback.format_exc())
    os._exit(0)


def _attack(say: Callable[[Any], None], seed: int, numbers: range, until: float, only: str) -> None:
    """Try cases one after the other, until a time by `time.monotonic`."""
    faulthandler.enable()
    bench, faults = guarded(), 0
    for number in numbers:
        if time.monotonic() > until or faults == MOST_FAULTS:
            break
        torch.set_num_threads(1 + (number % 8 == 0))
        name, case, rng = case_of(seed, number, only)
        say(["at", number, case.text])
        try:
            ends = [True, False] if rng.random() < 1 / TWICE else [rng.random() < 0.5]
            attempt(bench, case, ends, compare=rng.random() < 1 / COMPARED)
            say(["survived", name, case.payloads])
        except Exception as error:
            faults += 1
            say(["failed", f"{type(error).__name__}: {error}"])


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
        bench.begin(at_end=False)
        with kernels.backend("reference"):
            expected = as_tensor(case.run(bench), case.dtype)
        different = ~same(as_tensor(found[0], case.dtype), expected)
        assert not different.any(), f"{int(different.sum())} of {len(expected)} numbers are not the reference's"
