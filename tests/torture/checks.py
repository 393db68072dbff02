"""Checks of a trial: ranks end in time with one clear line each, nothing is lost, and losses are bit-identical."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowbit.train.metrics import Summary
from tests.torture.attempt import Attempt, Curve
from tests.torture.faults import Fault
from tests.torture.plan import EVERY, GRACE, REJOIN_GONE, STEPS, TIMEOUT

LIMIT = TIMEOUT + GRACE
_ERROR = re.compile(r"^(?:rank \d+: )?error: (.*)$")
_HARMLESS = re.compile(r"^(warning: |step \d+|boundary \d+|no checkpoint in )|hostname of the client socket cannot")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The run without a fault, and its seconds: until the first step was written down, of each, after the last."""

    curve: Curve
    summary: Summary
    seconds: float
    start: float
    step: float
    end: float

    def differences(self, curve: Curve, summary: Summary | None) -> list[str]:
        if summary is None:
            return [f"did not finish: {len(curve)} of {STEPS} steps"]
        differences = [
            f"step {ours[0]}: loss, norm {theirs[1:]} instead of {ours[1:]}"
            for ours, theirs in zip(self.curve, curve, strict=False)
            if ours != theirs
        ][:1]
        if len(curve) != len(self.curve):
            differences.append(f"{len(curve)} lines of metrics instead of {len(self.curve)}")
        for name in ("held_out_loss", "held_out_loss_codecs"):
            theirs, ours = getattr(summary, name), getattr(self.summary, name)
            if theirs is None or theirs != ours:
                differences.append(f"{name} {theirs} instead of {ours}")
        return differences


@dataclass(kw_only=True)
class Ending:
    """How one rank ended after a fault: seconds since it could have known, and exit code; None: not by itself.

    `noise`: lines that are neither errors nor harmless, tracebacks for example.
    """

    rank: int
    seconds: float | None
    code: int | None
    errors: list[str]
    noise: list[str]


def endings(attempt: Attempt, fault: Fault) -> list[Ending]:
    found = []
    for rank in range(attempt.shape.ranks):
        if rank not in fault.silenced:
            end, lines = attempt.ends.get(rank), attempt.errors(rank)
            seconds = None if end is None else round(end.at - _could_know(attempt, fault, rank), 2)
            errors = [match[1] for line in lines if (match := _ERROR.match(line))]
            noise = [line for line in lines if not (_ERROR.match(line) or _HARMLESS.search(line)) and line.strip()]
            found.append(Ending(rank=rank, seconds=seconds, code=end and end.code, errors=errors, noise=noise))
    return found


def _could_know(attempt: Attempt, fault: Fault, rank: int) -> float:
    """When the clock of a rank starts."""
    assert fault.began is not None
    if fault.trial.fault == "stop20" and rank == fault.trial.victim:
        return fault.ended or fault.began
    if fault.trial.fault == "nan":
        return float(attempt.nan_at.read_text()) if attempt.nan_at.exists() else fault.began
    if fault.trial.fault == "disk":  # nobody knows before somebody writes
        return max(fault.began, min((end.at for end in attempt.ends.values()), default=fault.began))
    return fault.began


def complaints(attempt: Attempt, fault: Fault, ends: list[Ending]) -> list[str]:
    problems = _about_ends(ends, LIMIT)
    for end in ends:
        if end.code and end.code > 0 and len(end.errors) != 1:
            problems.append(f"words: rank {end.rank} said {len(end.errors)} error lines")
        if end.noise:
            problems.append(f"noise: rank {end.rank} printed {len(end.noise)} more lines: {end.noise[-1][:100]}")
    if attempt.curve():  # all had met: then the cause can be known
        problems += _about_causes(attempt, fault, [end for end in ends if end.errors])
    return problems


def gave_up(ends: list[Ending]) -> list[str]:
    problems = _about_ends(ends, LIMIT + REJOIN_GONE + GRACE)
    problems += [f"crash: rank {end.rank} ended with 0" for end in ends if end.code == 0]
    for end in ends:
        last = (end.errors or ["nothing"])[-1]
        if "not all machines came back in time. The same command continues from" not in last:
            problems.append(f"words: the last of rank {end.rank}: {last[:300]}")
    return problems


def _about_ends(ends: list[Ending], limit: float) -> list[str]:
    problems = []
    for end in ends:
        if end.seconds is None:
            problems.append(f"hang: rank {end.rank} did not end by itself")
        elif end.seconds > limit:
            problems.append(f"late: rank {end.rank} ended after {end.seconds:.1f} s")
        if end.code is not None and end.code < 0:
            problems.append(f"crash: rank {end.rank} ended by signal {-end.code}")
    return problems


def _about_causes(attempt: Attempt, fault: Fault, ends: list[Ending]) -> list[str]:
    """Ranks that hear each other must give the same cause, and it must name a rank that the fault has hit."""
    problems = []
    cut = fault.trial.fault in ("cut", "cut5")
    if fault.trial.fault == "stop20":  # which wakes up when the others are gone, with what they knew
        ends = [end for end in ends if end.rank != fault.trial.victim]
    host = attempt.shape.host
    # Ranks hear each other through rank 0, which keeps the store: those without it find the cause each for itself.
    hit = {r for r in range(attempt.shape.ranks) if host(r) == 1} if cut else set()
    if fault.trial.victim == 0 and fault.trial.fault in ("kill", "stop", "stop20"):
        hit = {end.rank for end in ends}
    sides = [[e for e in ends if e.rank not in hit], *([e] for e in ends if e.rank in hit)]
    for side in filter(None, sides):
        causes = _causes(side)
        if len(causes) > 1:
            problems.append(f"causes: {len(causes)} different ones: {' | '.join(sorted(causes))[:300]}")
        if fault.trial.fault == "nan":
            guilty = ["nan", "inf"]
        elif cut:
            guilty = [f"rank {r}" for r in range(attempt.shape.ranks) if host(r) != host(side[0].rank)]
        elif fault.trial.fault == "disk":  # which the ranks of a machine share
            guilty = [f"rank {r}" for r in range(attempt.shape.ranks) if host(r) == host(fault.trial.victim)]
        else:
            guilty = [f"rank {fault.trial.victim}"]
        if blind := [c for c in causes if not any(re.search(rf"\b{g}\b", c) for g in guilty)]:
            problems.append(f"blame: {blind[0][:200]} (names none of {', '.join(guilty)})")
    return problems


def _causes(side: list[Ending]) -> set[str]:
    """The causes that ranks gave, made comparable: a failed rank omits its number, the others omit the type."""
    others = {re.sub(r"^(rank \d+ failed: )\w+: ", r"\1", end.errors[-1]) for end in side}
    own = {end.errors[-1]: f"rank {end.rank} failed: {end.errors[-1]}" for end in side}
    return others - {text for text, full in own.items() if full in others}


def lost(steps_before: int, resumed: Summary | None) -> list[str]:
    """Whether a resumed run had to start before the newest checkpoint that was complete."""
    if resumed is None:
        return []
    start, at_least = STEPS - resumed.steps_here, max(0, steps_before - 1) // EVERY * EVERY
    return [f"lost: went on from step {start}, not {at_least}"] if start < at_least else []
