"""The table of the outcomes, in Markdown.

python -m tests.torture.report FILE ...    # what `python -m tests.torture --json FILE` has written, together
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.torture.trial import Outcome

Row = dict[str, Any]
"""An `Outcome` as JSON, with `passed`."""

_COLUMNS = (
    "fault", "ranks", "mode", "trials", "passed", "outcome", "to the error, s: median", "largest",
    "to recovery, s: median", "largest",
)  # fmt: skip


def main() -> None:
    """Print the table of the files that the command line names, and how long their trials took."""
    files = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    if not files:
        sys.exit("error: no file; allowed: one or more that `python -m tests.torture --json` wrote")
    rows = [row for file in files for row in file["rows"]]
    print(markdown(rows))
    seconds = sum(file["seconds"] for file in files)
    passed = sum(row["passed"] for row in rows)
    print(f"\n{passed} of {len(rows)} trials passed, in {seconds / 60:.1f} minutes.")


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """In the order of the plan."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.trial.number)
    return [dataclasses.asdict(outcome) | {"passed": outcome.passed} for outcome in ordered]


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    rule = ["---" if name in (*_COLUMNS[:3], "outcome") else "---:" for name in _COLUMNS]
    lines = [_COLUMNS, rule, *_cells(rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def line(outcome: Outcome) -> str:
    """A trial in one line."""
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
    """A row for each fault, shape and mode, in the order in which they come."""
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
    """How the runs ended, and what went wrong, by kind."""
    went_on = sum(row["finished"] for row in group)
    kinds: dict[str, int] = {f"{went_on} went on": went_on, f"{len(group) - went_on} ended": len(group) - went_on}
    for row in group:
        for kind in {wrong.partition(":")[0] for wrong in row["wrong"]}:
            kinds[f"FAILED {kind}"] = kinds.get(f"FAILED {kind}", 0) + 1
    return ", ".join(kind if "FAILED" not in kind else f"{kind} {count}" for kind, count in kinds.items() if count)


if __name__ == "__main__":
    main()
