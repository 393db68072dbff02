"""Tables, charts and JSON of measurements, and the runner of every command that measures.

A command is one declaration, `Command`: settings, a function that measures, columns, charts and baselines.
"""

from __future__ import annotations

from lowbit.report.bars import Bars, Stacks
from lowbit.report.command import Command, check_output, execute, run
from lowbit.report.curves import Heights, Lines, Points
from lowbit.report.results import Report, machine
from lowbit.report.rows import Baseline, Row, Value, compare, spread, summary
from lowbit.report.tables import Column, Table

__all__ = [
    "Bars",
    "Baseline",
    "Column",
    "Command",
    "Heights",
    "Lines",
    "Points",
    "Report",
    "Row",
    "Stacks",
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
