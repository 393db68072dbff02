"""Commands that measure: their declaration, the runner that they share, rows and tables, and results as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowbit import escape
from lowbit.escape import one_line
from lowbit.files import write
from lowbit_run.cores import usable_cores
from lowbit_run.terminal import console, filtered_again

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group
    from rich.table import Table as RichTable
    from rich.text import Text


log = escape.logger(__name__)

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


def extent(values: Sequence[float], name: str) -> dict[str, Any]:
    """Return fields for a row: the median as `name`, `{name}_low` and `{name}_high`."""
    return {name: statistics.median(values), f"{name}_low": min(values), f"{name}_high": max(values)}


def summary(values: Sequence[float], name: str) -> dict[str, Any]:
    """Return fields for a row: those of `extent`, `spread` and `rounds` (their number)."""
    return {**extent(values, name), "spread": spread(values), "rounds": len(values)}


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


_SPACE = re.compile(r"(?<=\s)(?=\S)")
_BREAK = re.compile(r"(?<=[\s_/,=(])(?=\S)|(?<=[^\W\d][.-])(?=\w)|(?<=\d[.-])(?=[^\W\d])")
"""Matches the places where a cell's text may wrap, none of them inside a number."""


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

    def _render(self, title: str, columns: list[Column], rows: Sequence[Row]) -> Iterator[_Fitted | Text]:
        """The title, which may be wider than the table, and the table."""
        from rich.text import Text

        if title:
            yield Text(title, style="table.title")
        gap = self.gap
        ends = [gap is not None and value_of(a, gap) != value_of(b, gap) for a, b in itertools.pairwise(rows)]
        yield _Fitted(
            titles=[column.title for column in columns],
            numeric=[any(isinstance(value_of(row, c.value), int | float) for row in rows) for c in columns],
            lines=[[column.cell(row) for column in columns] for row in rows],
            ends=[*ends, False],
        )


@dataclass(frozen=True, kw_only=True)
class _Fitted:
    """A table as wide as the terminal: on a narrow one, columns move together, and texts are broken between words.

    Numbers are to the right, and are not broken. If even the longest words do not fit, each row becomes a list of
    names and values.

    Args:
        numeric: columns that hold numbers. ends: whether an empty line follows a row.
    """

    titles: list[str]
    numeric: list[bool]
    lines: list[list[str]]
    ends: list[bool]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable | Text]:
        from rich import box
        from rich.table import Table as RichTable

        cells = [[title, *(line[i] for line in self.lines)] for i, title in enumerate(self.titles)]
        most = [max(len(part) for cell in column for part in cell.split("\n")) for column in cells]
        padding = int(sum(most) + 2 * len(most) <= options.max_width)
        room = options.max_width - 2 - (1 + padding) * (len(most) - 1)
        least = [
            max(len(word) for i, cell in enumerate(column) for word in _words(cell, whole=numeric and i > 0))
            for column, numeric in zip(cells, self.numeric, strict=True)
        ]
        if sum(least) > room:
            yield from self._as_lists(options.max_width)
            return
        widths = list(most)
        while sum(widths) > room:  # the widest of the columns that can be narrower
            widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
            widths[widest] -= 1
        table = RichTable(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False)
        for title, numeric, width in zip(self.titles, self.numeric, widths, strict=True):
            table.add_column(broken(title, width), justify="right" if numeric else "left", overflow="fold")
        for i, line in enumerate(self.lines):
            shown = [broken(cell, width) for cell, width in zip(line, widths, strict=True)]
            table.add_row(*shown, end_section=self.ends[i])
        yield table

    def _as_lists(self, width: int) -> Iterator[RichTable | Text]:
        from rich.table import Table as RichTable
        from rich.text import Text

        names = [title.replace("-\n", "").replace("\n", " ") for title in self.titles]
        room = max(1, width - 2 - max(map(len, names)))
        for line in self.lines:
            table = RichTable(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
            for name, cell in zip(names, line, strict=True):
                table.add_row(Text(name, style="bold"), broken(cell, room))
            yield table
            yield Text("")


def _words(text: str, *, whole: bool = False) -> list[str]:
    """Return the parts of a text that are not broken, with the mark after which a line may end."""
    return [word.rstrip() for line in text.split("\n") for word in ([line] if whole else _BREAK.split(line))]


def broken(text: str, width: int) -> str:
    """Break a text into lines of at most `width` characters: after spaces, or else after one of `_ . - / , = (`."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        parts = ([part] if len(part.rstrip()) <= width else _BREAK.split(part) for part in _SPACE.split(line))
        for word in itertools.chain.from_iterable(parts):
            if lines[-1] and len((lines[-1] + word).rstrip()) > width:
                lines.append("")
            lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


_LOG_SECONDS, _SILENT_SECONDS = 10.0, 5.0
_LOGGED = 6  # fields of a row in the log


def _no_ending(settings: Any) -> Iterable[tuple[str, str]]:
    """Return no last lines."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Command:
    """The declaration of a command: settings, measurement, and how rows are shown.

    Args:
        name: of the command, such as "bench pipeline".
        summary: one line for the help.
        examples: whole command lines for the help.
        settings: a frozen dataclass whose fields are options.
        measure: takes settings and the rows of an earlier file; repeatedly yields all rows so far.
        tables: the first is also shown during the measurement.
        charts: `lowbit_lab.charts` of the rows, one below the other in one picture.
        baselines: comparisons that are added to the rows.
        key: fields that identify a row; with a key, rows of an earlier `--json` file are kept.
        free: settings that may differ from those of that file.
        live: show rows as they come; False for a command that shows its own progress.
        ending: from the settings, what the command has written, and the next command, for its last lines.
    """

    name: str
    summary: str
    settings: type
    measure: Callable[[Any, Sequence[Row]], Iterator[Sequence[Row]]]
    tables: Sequence[Table]
    charts: Sequence[Any] = ()
    examples: tuple[str, ...] = ()
    baselines: Sequence[Baseline] = ()
    key: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    live: bool = True
    ending: Callable[[Any], Iterable[tuple[str, str]]] = _no_ending


def run(
    command: Command, settings: Any, *, file: Path | None = None, on_rows: Callable[[Sequence[Row]], None] | None = None
) -> Report:
    """Run the measurement, and return the report.

    Args:
        file: all rows are written to it as they come; a command with a `key` first reads an earlier call's rows.
        on_rows: called with all rows so far whenever there are new ones.

    Raises:
        ValueError: `file` holds rows with other settings, or the command refuses its settings.
    """
    about = machine()
    if file and file.exists() and not command.key:
        # Another file, or results of other settings, are not replaced.
        _check_settings(command, settings, Report.read_json(file, command=command.name), file)
    rows = compare(earlier_rows(command, settings, file) if file and command.key else [], command.baselines)
    for current in command.measure(settings, rows):
        rows = compare(current, command.baselines)
        if file:
            Report(command=command.name, settings=settings, machine=about, rows=rows).write_json(file)
        if on_rows:
            on_rows(rows)
    return Report(command=command.name, settings=settings, machine=about, rows=rows)


def earlier_rows(command: Command, settings: Any, file: Path) -> list[Row]:
    """Read the rows of an earlier call with the same settings; none if the file does not exist.

    Raises:
        ValueError: the file holds no report of this command, or rows of other settings or of another machine.
    """
    if not file.exists():
        return []
    earlier = Report.read_json(file, command=command.name, fields=command.key)
    _check_settings(command, settings, earlier, file)
    here = to_json(machine())
    for name in ("cpu", "cores", "simd", "gpu", "torch", "lowbit") if earlier.rows and earlier.machine else ():
        there, own = earlier.machine.get(name), here.get(name)
        if there != own:
            what = f"{file} holds rows that were measured with {name} {there!r}; here it is {own!r}"
            if name not in ("torch", "lowbit"):
                raise ValueError(f"{what}: name another file")
            log.warning("%s", what)
    return list(earlier.rows)


def _check_settings(command: Command, settings: Any, earlier: Report, file: Path) -> None:
    """Raise ValueError if an earlier call had other settings, but for those that a later one may change."""
    before = flat(earlier.settings)
    with suppress(ValueError, TypeError):  # settings that have to be given have no defaults
        before = flat(to_json(command.settings())) | before  # settings added since had their defaults
    free = {*command.free, "output", "overwrite"}
    for name, value in flat(to_json(settings)).items():
        if name.partition(".")[0] not in free and before.get(name) != value:
            raise ValueError(
                f"{file} holds rows with {name} {before.get(name)!r}; this call has {value!r}: name another file"
            )


def execute(command: Command, settings: Any, *, json: Path | None = None) -> Report:
    """Run a command on a terminal: show rows as they come and at the end, and write them.

    With several ranks (`RANK`), only rank 0 shows and writes.

    Raises:
        ValueError: `json` cannot be written, which is checked first, or the command refuses its settings.
    """
    check_output(json)
    if os.environ.get("RANK", "0") != "0":
        return run(command, settings)
    with _shown(command) if command.live else nullcontext() as show:
        report = run(command, settings, file=json, on_rows=show)
    for table in command.tables:
        console().print(table.render(report.rows))
    return report


@contextmanager
def _shown(command: Command) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Show rows as they come: the first table on a terminal, elsewhere a line with the newest one now and then."""
    from rich.live import Live
    from rich.text import Text

    beginning = f"{command.name}: measuring; rows follow as they come"

    screen = console(stderr=True)
    if screen.is_terminal:
        # No refresh: its thread would slow down the measurement.
        with Live(Text(beginning), console=screen, transient=True, auto_refresh=False) as live, filtered_again():
            live.refresh()
            yield lambda rows: live.update(command.tables[0].render(rows), refresh=True)
        return
    began, last = time.monotonic(), -math.inf

    def log(rows: Sequence[Row]) -> None:
        nonlocal last
        if rows and (now := time.monotonic()) - last >= _LOG_SECONDS:
            last = now
            count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
            sys.stderr.write(f"{command.name}: {count} after {now - began:.0f} s, the newest: {_in_words(rows[-1])}\n")
            sys.stderr.flush()

    first = threading.Timer(_SILENT_SECONDS, lambda: sys.stderr.write(f"{beginning}\n"))
    first.daemon = True
    first.start()
    try:
        yield log
    finally:
        first.cancel()


def _in_words(row: Row) -> str:
    """Return the first fields of a row, which say what was measured, with their values."""
    values = {name: digits(v, 4) if isinstance(v, float) else v for name, v in row.items()}
    named = [f"{name} {one_line(str(v))}" for name, v in values.items() if isinstance(v, str | int)]
    return ", ".join(named[:_LOGGED])


def check_output(path: Path | None) -> None:
    """Raise ValueError unless a file can be written; for use before a long run whose results go there."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # an atomic write would replace a device by a file
            raise ValueError(f"{path} cannot be written: it is a folder or a device; allowed: a file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}."):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted names."""
    items: dict[str, Any] = {}
    for name, value in values.items():
        items |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return items


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a command, such as "bench pipeline". settings: a mapping or a dataclass."""

    command: str
    settings: Any
    machine: Mapping[str, Any]
    rows: Sequence[Row]

    def write_json(self, path: Path | str) -> None:
        """Write `{"command", "settings", "machine", "rows"}`; a reader never sees half a file.

        Numbers that JSON does not have (NaN, infinities) become null.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(to_json(vars(self)), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read_json(cls, path: Path | str, *, command: str = "", fields: Collection[str] = ()) -> Report:
        """Read a report that `write_json` wrote, of this command and with at least these fields in each row, if given.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        try:
            values = json.loads(Path(path).read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}): name another file") from None
        match values:
            case {"command": str(), "settings": dict(), "machine": dict(), "rows": [*rows]} if (
                len(values) == 4
                and command in ("", values["command"])
                and all(isinstance(row, dict) and row.keys() >= set(fields) for row in rows)
            ):
                return cls(**values)
        kind = f"of `lowbit {command}`" if command else "that lowbit wrote"
        raise ValueError(f"{path} does not hold a report {kind}: name another file")


def digits(value: float, count: int = 2) -> str:
    """Format a number with `count` digits, or all of its integer part, without an exponent."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10 ** (count - 1) else f"{Decimal(f'{value:.{count}g}'):f}"


def machine() -> dict[str, Any]:
    """Describe the hardware and versions that figures depend on, without name, address or path of the machine."""
    import torch

    import lowbit

    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    about = {
        "cpu": next(names, platform.processor() or platform.machine()),
        "cores": usable_cores(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lowbit": lowbit.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    return about


def to_json(value: Any) -> Any:
    """Convert a value to JSON's own types."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__str__ is not object.__str__:  # such as a link
            return str(value)
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)
