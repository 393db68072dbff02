"""Records of the documentation's figures: docs/results/data/NAME.json, and what pages of results state."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit_run.report import Report, Row


class Missing(Exception):
    """A record that does not exist, or lacks rows."""


class Records:
    """Records below a folder.

    Args:
        root: holds README.md and docs/.
        pages: texts of pages by their path, which may be newer than the files.
    """

    def __init__(self, root: Path, pages: Mapping[str, str] | None = None) -> None:
        self._results, self._pages = root / "docs/results", pages or {}
        self.data = self._results / "data"
        self._reports: dict[str, Report] = {}

    def report(self, name: str) -> Report:
        """Return a record.

        Raises:
            Missing: there is none.
        """
        if name not in self._reports:
            files = [file for file in (self.data / f"{name}.json", self.data / f"speeds/{name}.json") if file.exists()]
            if not files:
                raise Missing(f"there is no record {name}.json")
            self._reports[name] = Report.read_json(files[0])
        return self._reports[name]

    def row(self, name: str, **where: Any) -> Row:
        """Return the one row of a record that has these values."""
        rows = [row for row in self.report(name).rows if all(row.get(key) == value for key, value in where.items())]
        if not rows:
            raise Missing(f"{name}.json has no row with {where}")
        if len(rows) > 1:
            raise ValueError(f"{name}.json has {len(rows)} rows with {where}")
        return rows[0]

    def value(self, name: str, field: str, **where: Any) -> Any:
        """Return a field of the one row that has these values."""
        row = self.row(name, **where)
        if field not in row:
            raise Missing(f"{name}.json has no {field}")
        return row[field]

    def stated(self, page: str, pattern: str) -> float:
        """Return the one number that a page of results states where the pattern matches."""
        name = f"docs/results/{page}.md"
        text = self._pages[name] if name in self._pages else (self._results / f"{page}.md").read_text("utf-8")
        numbers = set(re.findall(pattern, plain(text)))
        if len(numbers) != 1:
            raise ValueError(f"{page}.md states {numbers} where {pattern!r} matches")
        return float(numbers.pop().replace(",", ""))

    def cell(self, page: str, start: str, column: int) -> float:
        """Return a number in a row of a table: in so many cells after the one that begins with `start`."""
        return self.stated(page, rf"\| {re.escape(start)}[^|]*(?:\|[^|]*){{{column - 1}}}\| ?([-+]?[\d,]+\.?\d*)")


def plain(text: str) -> str:
    """Return a page without emphasis, code marks, targets of links and line breaks."""
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return " ".join(re.sub(r"\*\*|[\[\]`]", "", text).split())
