"""Tables and JSON of measurements, the page of a run, and the runner of commands that measure.

One `Command` declares a command: settings, a function that measures, columns and baselines.
"""

from lowbit_run.report.command import (
    Baseline,
    Column,
    Command,
    Report,
    Row,
    Table,
    Value,
    check_output,
    compare,
    execute,
    machine,
    run,
    spread,
    summary,
)

__all__ = [
    "Baseline",
    "Column",
    "Command",
    "Report",
    "Row",
    "Table",
    "Value",
    "check_output",
    "compare",
    "execute",
    "machine",
    "run",
    "spread",
    "summary",
]
