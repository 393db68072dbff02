"""The table of what came of the trials."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tests.torture.trial import Outcome


def show(outcomes: Sequence[Outcome]) -> None:
    """A row for each fault, number of ranks and mode."""
    table = Table(title="Faults at random moments")
    for name in (
        "fault",
        "ranks",
        "mode",
        "trials",
        "passed",
        "to the error, s",
        "to recovery, s",
        "outcome",
    ):
        table.add_column(name, justify="right" if name in ("trials", "passed") else "left")
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        trial = outcome.trial
        key = trial.fault, trial.shape, "supervised" if trial.supervised else "plain"
        groups.setdefault(key, []).append(outcome)
    for key, group in groups.items():
        table.add_row(
            *key,
            str(len(group)),
            str(sum(outcome.passed for outcome in group)),
            _spread(outcome.to_error for outcome in group),
            _spread(outcome.to_recovery for outcome in group),
            _words(group),
        )
    Console(width=None if Console().is_terminal else 160).print(table)


def line(outcome: Outcome) -> str:
    """A trial in one line."""
    trial = outcome.trial
    text = "passed" if outcome.passed else "FAILED: " + "; ".join(outcome.wrong)
    return f"{trial.name} at {outcome.began:.1f} s, step {outcome.steps}: {_end(outcome)}: {text}"


def _end(outcome: Outcome) -> str:
    if outcome.finished:
        return f"finished, {outcome.restarts} restarts"
    seconds = "never" if outcome.to_error is None else f"after {outcome.to_error:.1f} s"
    causes = {cause for end in outcome.ends for cause in end.errors}
    return f"ended {seconds} with {' | '.join(sorted(causes)) or 'no word'}"


def _spread(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}, at most {max(known):.1f}" if known else ""


def _words(group: Sequence[Outcome]) -> str:
    """What went wrong, by kind; or how the runs ended."""
    kinds: dict[str, int] = {}
    for outcome in group:
        for each in {wrong.partition(":")[0] for wrong in outcome.wrong}:
            kinds[each] = kinds.get(each, 0) + 1
    if kinds:
        return ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    went_on = sum(outcome.finished for outcome in group)
    return f"{went_on} went on, {len(group) - went_on} ended and resumed"
