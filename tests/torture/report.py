"""What is said of each outcome, and a table of all."""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from collections.abc import Sequence

from tests.torture.trial import Outcome

_COLUMNS = (
    "fault", "ranks", "mode", "trials", "passed", "outcome", "error_seconds_median", "error_seconds_largest",
    "recovery_seconds_median", "recovery_seconds_largest",
)  # fmt: skip


def line(outcome: Outcome) -> str:
    text = "passed" if outcome.passed else "FAILED: " + "; ".join(outcome.wrong)
    when = f"at {outcome.began:.1f} s, step {outcome.steps}"
    return f"{outcome.trial.name} {when}: {_end(outcome)}: {text} ({outcome.seconds:.0f} s)"


def _end(outcome: Outcome) -> str:
    if outcome.finished:
        return "finished"
    seconds = "never" if outcome.to_error is None else f"after {outcome.to_error:.1f} s"
    causes = {cause for end in outcome.ends for cause in end.errors}
    return f"ended {seconds} with {' | '.join(sorted(causes)) or 'no word'}"


def table(outcomes: Sequence[Outcome]) -> str:
    """The columns of `docs/results/data/reliability.csv`."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.trial.number):
        trial = outcome.trial
        groups.setdefault((trial.fault, trial.shape.replace("x", " × "), trial.mode), []).append(outcome)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for key, group in groups.items():
        ends = Counter("went on" if outcome.finished else "ended" for outcome in group)
        ends.update(f"FAILED {kind}" for o in group for kind in {wrong.partition(":")[0] for wrong in o.wrong})
        counts = (len(group), sum(outcome.passed for outcome in group))
        words = ", ".join(f"{count} {kind}" for kind, count in ends.items())
        times = [[o.to_error for o in group], [o.to_recovery for o in group]]
        writer.writerow([*key, *counts, words, *(cell for each in times for cell in _spread(each))])
    return text.getvalue()


def _spread(values: Sequence[float | None]) -> tuple[str, str]:
    known = [value for value in values if value is not None]
    return (f"{statistics.median(known):.1f}", f"{max(known):.1f}") if known else ("", "")
