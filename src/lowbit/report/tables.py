"""Rows of measurements: their values, statistics, comparisons with a baseline, and tables on the terminal."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text


Row = Mapping[str, Any]
"""One measurement: values by field name."""
Value = str | Callable[[Row], Any]
"""The name of a field of a row, or a function of the row."""


def value_of(row: Row, value: Value) -> Any:
    """Return the value of a row; None if the row lacks the field."""
    return value(row) if callable(value) else row.get(value)


def distinct(rows: Sequence[Row], value: Value) -> list[Any]:
    """Return the distinct values of rows, in order of appearance."""
    return list(dict.fromkeys(value_of(row, value) for row in rows))


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range as a share of the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def summary(values: Sequence[float], name: str) -> dict[str, Any]:
    """Return fields for a row: the median as `name`, `{name}_low`, `{name}_high`, `spread` and `rounds` (count)."""
    return {
        name: statistics.median(values),
        f"{name}_low": min(values),
        f"{name}_high": max(values),
        "spread": spread(values),
        "rounds": len(values),
    }


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A comparison of each row with the baseline's row; None without such a row or without a value in either.

    Args:
        field: name of the result.
        value: the field that is compared.
        to: fields and values of the baseline's row.
        alike: fields that the baseline's row shares with the row.
        way: "over" (row / baseline), "under" (baseline / row, for times) or "minus" (row - baseline).
        unless: fields and values of rows that are not compared.
    """

    field: str
    value: str
    to: Mapping[str, Any]
    alike: tuple[str, ...] = ()
    way: Literal["over", "under", "minus"] = "over"
    unless: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def compared(self, row: Row, base: Row | None) -> float | None:
        """Compute the result for one row."""
        this, other = row.get(self.value), base.get(self.value) if base else None
        if this is None or other is None or any(row.get(name) == value for name, value in self.unless.items()):
            return None
        if self.way == "minus":
            return this - other
        above, below = (this, other) if self.way == "over" else (other, this)
        return above / below if below else None


def compare(rows: Sequence[Row], baselines: Sequence[Baseline]) -> list[dict[str, Any]]:
    """Return the rows with the comparisons added."""
    compared = [dict(row) for row in rows]
    for baseline in baselines:
        bases = {
            tuple(row.get(name) for name in baseline.alike): row
            for row in reversed(rows)
            if all(row.get(name) == wanted for name, wanted in baseline.to.items())
        }
        for row in compared:
            base = bases.get(tuple(row.get(name) for name in baseline.alike))
            row[baseline.field] = baseline.compared(row, base)
    return compared


TERMINAL = 80  # characters that a table should fit into


@dataclass(frozen=True)
class Column:
    """A column of a table. show: a format string or a function for the value; None is shown as a dash."""

    title: str
    value: Value
    show: str | Callable[[Any], str] = "{}"

    def cell(self, row: Row) -> str:
        """Return the text for one row."""
        value = value_of(row, self.value)
        if value is None:
            return "–"
        return self.show.format(value) if isinstance(self.show, str) else self.show(value)


@dataclass(frozen=True, kw_only=True)
class Table:
    """One or several tables of rows; columns without values and tables without rows are left out.

    Args:
        columns: of the table, or a function that makes them from the rows.
        title: text above the table, or a function that makes it from the rows.
        rows: selects or summarizes rows before anything else.
        each: value that gets a table of its own for each different result.
        gap: value whose changes leave an empty line.
    """

    columns: Sequence[Column] | Callable[[Sequence[Row]], Sequence[Column]]
    title: str | Callable[[Sequence[Row]], str] = ""
    rows: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    each: Value | None = None
    gap: Value | None = None

    def parts(self, rows: Sequence[Row]) -> Iterator[tuple[str, list[Column], Sequence[Row]]]:
        """Title, columns and rows of each table."""
        rows, each = self.rows(rows) if self.rows else rows, self.each or (lambda row: "")
        for value in distinct(rows, each):
            part = [row for row in rows if value_of(row, each) == value]
            columns = self.columns(part) if callable(self.columns) else self.columns
            columns = [c for c in columns if any(value_of(row, c.value) is not None for row in part)]
            yield self.title(part) if callable(self.title) else self.title, columns, part

    def render(self, rows: Sequence[Row]) -> Group:
        """Make the tables for the terminal."""
        from rich.console import Group

        return Group(*(line for part in self.parts(rows) for line in self._render(*part)))

    def _render(self, title: str, columns: list[Column], rows: Sequence[Row]) -> Iterator[RichTable | Text]:
        """The title, which may be wider than the table, and the table; numbers to the right.

        On a narrow terminal, columns move together and text is wrapped; numbers are not.
        """
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        if title:
            yield Text(title, style="table.title")
        lines = [[column.cell(row) for column in columns] for row in rows]
        widths = [
            max(map(len, (*column.title.split("\n"), *(line[i] for line in lines)))) + 2
            for i, column in enumerate(columns)
        ]
        padding = (0, int(sum(widths) < TERMINAL), 0, 0)
        table = RichTable(header_style="bold", box=box.SIMPLE_HEAD, padding=padding, pad_edge=False)
        for column in columns:
            numeric = any(isinstance(value_of(row, column.value), int | float) for row in rows)
            justify = "right" if numeric else "left"
            table.add_column(column.title, justify=justify, no_wrap=numeric, overflow="fold")
        for line in lines:
            table.add_row(*line)
        if self.gap is not None:
            for i, (row, following) in enumerate(itertools.pairwise(rows)):
                table.rows[i].end_section = value_of(row, self.gap) != value_of(following, self.gap)
        yield table
