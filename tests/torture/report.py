"""The table of the outcomes, in Markdown."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from tests.torture.trial import Outcome

Row = dict[str, Any]
"""An `Outcome` as JSON, with `passed`."""

_COLUMNS = (
    "fault", "ranks", "mode", "trials", "passed", "outcome", "to the error, s: median", "largest",
    "to recovery, s: median", "largest",
)  # fmt: skip


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    ordered = sorted(outcomes, key=lambda outcome: outcome.trial.number)
    return [dataclasses.asdict(outcome) | {"passed": outcome.passed} for outcome in ordered]


def markdown(rows: Sequence[Row]) -> str:
    rule = ["---" if name in (*_COLUMNS[:3], "outcome") else "---:" for name in _COLUMNS]
    lines = [_COLUMNS, rule, *_cells(rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def line(outcome: Outcome) -> str:
    trial = outcome.trial
    text = "passed" if outcome.passed else "FAILED: " + "; ".join(outcome.wrong)
    when = f"at {outcome.began:.1f} s, step {outcome.steps}"
    return f"{trial.name} {when}: {_end(outcome)}: {text} ({outcome.seconds:.0f} s)"


def _end(outcome: Outcome) -> str:
    if outcome.finished:
        return f"finished, {outcome.restarts} restarts"
    seconds = "never" if outcome.to_error is None else f"after {outcome.to_error:.1f} s"
    causes = {cause for end in outcome.ends for cause in end.errors}
    return f"ended {seconds} with {' | '.join(sorted(causes)) or 'no word'}"


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        trial = row["trial"]
        mode = "supervised" if trial["supervised"] else "plain"
        groups.setdefault((trial["fault"], trial["shape"], mode), []).append(row)
    return [
        [
            fault,
            shape.replace("x", " × "),
            mode,
            str(len(group)),
            str(sum(row["passed"] for row in group)),
            _words(group),
            *_spread(row["to_error"] for row in group),
            *_spread(row["to_recovery"] for row in group),
        ]
        for (fault, shape, mode), group in groups.items()
    ]


def _spread(values: Iterable[float | None]) -> tuple[str, str]:
    known = [value for value in values if value is not None]
    return (f"{statistics.median(known):.1f}", f"{max(known):.1f}") if known else ("", "")


def _words(group: Sequence[Row]) -> str:
    went_on = sum(row["finished"] for row in group)
    kinds: dict[str, int] = {f"{went_on} went on": went_on, f"{len(group) - went_on} ended": len(group) - went_on}
    for row in group:
        for kind in {wrong.partition(":")[0] for wrong in row["wrong"]}:
            kinds[f"FAILED {kind}"] = kinds.get(f"FAILED {kind}", 0) + 1
    return ", ".join(kind if "FAILED" not in kind else f"{kind} {count}" for kind, count in kinds.items() if count)
