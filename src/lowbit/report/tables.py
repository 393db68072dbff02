"""Tables on the terminal, declared by their columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit.report.rows import Row, Value, distinct, value_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

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
