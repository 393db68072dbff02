"""Pages about the results of `lowbit bench`, `evaluate`, `calibrate` and `plan`: one file, or several compared."""

from __future__ import annotations

import base64
import importlib
import io
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowbit.cli.reports import Measurement
from lowbit.report.command import Command, check_output, flat
from lowbit.report.page import Page, Part, write_page
from lowbit.report.page.figures import lines
from lowbit.report.results import Report
from lowbit.report.rows import Row, distinct, value_of
from lowbit.report.tables import Table
from lowbit.report.training import differences, distinct_names, shown
from lowbit_lab.bench import COMMANDS
from lowbit_lab.charts.charts import Chart, draw, figure
from lowbit_lab.charts.plans import CHARTS
from lowbit_lab.charts.style import THEMES, Palette

_MOST_ROWS = 2000
_OTHERS = {
    "evaluate": "lowbit_lab.evaluate.commands:EVALUATE", "calibrate": "lowbit_lab.evaluate.commands:CALIBRATE",
    "plan memory": "lowbit.plan.memory", "plan pipeline": "lowbit.plan.pipeline", "doctor": "lowbit.doctor.command",
}  # fmt: skip
"""Places of the commands that are no benchmarks, by name."""

log = logging.getLogger(__name__)


def charts_of(command: Command) -> Sequence[Chart]:
    """Return the charts of a command: its own, or those of a command of the library."""
    return command.charts or CHARTS.get(command.name, ())


def check_picture(path: Path) -> None:
    """Check before a long run that its picture can be drawn.

    Raises:
        ValueError: the file cannot be written, or is of a kind that matplotlib does not draw.
        ModuleNotFoundError: matplotlib is missing.
    """
    kinds = sorted(importlib.import_module("matplotlib.backend_bases").FigureCanvasBase.filetypes)
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"picture is {str(path)!r}; allowed: a file that ends in .{', .'.join(kinds)}")
    check_output(path)


def draw_results(command: Command, rows: Sequence[Row], path: Path) -> None:
    """Draw a command's charts into a file."""
    draw(charts_of(command), rows, path)


def read_results(file: Path) -> tuple[Report, Command | None]:
    """Return results that `--json` wrote, and the declaration of their command, if this version has it."""
    report = Report.read_json(file)
    place = _OTHERS.get(report.command) or COMMANDS.get(report.command.removeprefix("bench "))
    return report, Measurement(place).command if place else None


def write_results(command: Command, file: Path) -> None:
    """Write the page of results next to their file. What goes wrong is a warning: a measurement does not fail by it."""
    try:
        write_page(results_page({file.stem: (Report.read_json(file), command)}), file.with_suffix(".html"))
    except ModuleNotFoundError as error:
        log.warning(
            'no report.html, because %s is missing: pip install "lowbit[report]", then lowbit report', error.name
        )
    except Exception as error:
        log.warning("no report.html: %s", error)


def results_page(results: Mapping[str, tuple[Report, Command | None]], problems: Sequence[str] = ()) -> Page:
    """A page about results by name."""
    parts, problems = list[Part](), list(problems)
    several = len(results) > 1
    for name, (report, command) in results.items():
        prefix = f"{name}: " if several else ""
        try:
            own = list(_parts(report, command))
        except Exception as error:  # rows of another version may lack what a table shows
            problems.append(
                f"{prefix}tables and charts cannot be made from these rows ({error}): they follow as they are"
            )
            own = []
        parts += [_prefixed(part, prefix) for part in own or [_plain_table(report)]]
    settings = {
        name: {key: shown(v) for key, v in flat(report.settings).items()} for name, (report, _) in results.items()
    }
    if several:
        parts.append(differences(settings))
    else:
        rows = [(key, value) for each in settings.values() for key, value in each.items()]
        parts.append(Part(title="Settings", head=("setting", "value"), rows=rows, folded=True))
    parts.append(_machines({name: report for name, (report, _) in results.items()}))
    kinds = list(dict.fromkeys(f"lowbit {report.command}" for report, _ in results.values()))
    return Page(
        title=" and ".join(kinds) + (f", {len(results)} results" if several else ""), problems=problems,
        subtitle=", ".join(results), parts=[part for part in parts if part.rows or part.figure or part.picture],
    )  # fmt: skip


def paired(
    files: Sequence[Path], read: Sequence[tuple[Report, Command | None]]
) -> dict[str, tuple[Report, Command | None]]:
    """Results by short names."""
    return dict(zip(distinct_names([file.with_suffix("") for file in files]), read, strict=True))


def _parts(report: Report, command: Command | None) -> Iterator[Part]:
    if command is None or not report.rows:
        return
    if (speed := _speed_by_link(report.rows)) is not None:
        yield speed
    for table in command.tables:
        yield from _tables(table, report.rows)
    for chart in charts_of(command):
        if chart.panels(report.rows):
            yield Part(title=_text(chart, report.rows), picture=_pictures(chart, report.rows))


def _speed_by_link(rows: Sequence[Row]) -> Part | None:
    """Tokens per second over the rate of the link, where rows have several rates."""
    rated = [row for row in rows if row.get("tokens_per_second") and row.get("link_mbit")]
    if len({row["link_mbit"] for row in rated}) < 2:
        return None
    fields = [f for f in ("boundary", "format", "split", "link_rtt_ms") if len(distinct(rated, f)) > 1]
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rated, key=lambda row: row["link_mbit"]):
        name = ", ".join(
            f"{row[f]:g} ms" if f == "link_rtt_ms" else str(row[f]) for f in fields if row.get(f) is not None
        )
        curves.setdefault(name or "speed", []).append((row["link_mbit"], row["tokens_per_second"]))
    palettes = [Palette(theme) for theme in THEMES.values()]
    colors = {name: (palettes[0][name], palettes[1][name]) for name in curves}
    chart = lines(curves, x="link, Mbit/s", y="tokens per second", log_x=True, markers=True, colors=colors)
    return Part(title="Speed against bandwidth", figure=chart)


def _tables(table: Table, rows: Sequence[Row]) -> Iterator[Part]:
    rows = table.rows(rows) if table.rows else rows
    groups = [rows]
    if table.each is not None:
        groups = [[r for r in rows if value_of(r, table.each) == part] for part in distinct(rows, table.each)]
    for part in groups:
        if part:
            columns = table.columns(part) if callable(table.columns) else table.columns
            columns = [c for c in columns if any(value_of(row, c.value) is not None for row in part)]
            title = table.title(part) if callable(table.title) else table.title
            yield Part(
                title=title.replace("\n", " ") or "Results", head=[_heading(column.title) for column in columns],
                rows=[[column.cell(row) for column in columns] for row in part],
            )  # fmt: skip


def _heading(title: str) -> str:
    """A heading without the hyphens that narrow terminals need."""
    return title.replace("-\n", "").replace("\n", " ")


def _plain_table(report: Report) -> Part:
    """All fields of all rows."""
    head = list(dict.fromkeys(key for row in report.rows for key in row))
    rows = [[_cell(row.get(key)) for key in head] for row in report.rows[:_MOST_ROWS]]
    return Part(title=f"Rows of {report.command}", head=head, rows=rows)


def _cell(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return shown(value)[:500]


def _text(chart: Chart, rows: Sequence[Row]) -> str:
    title = chart.title(chart.selected(rows)) if callable(chart.title) else chart.title
    return title or chart.label


def _pictures(chart: Chart, rows: Sequence[Row]) -> dict[str, str]:
    """The chart as the documentation has it, in both themes."""
    from matplotlib import rc_context

    addresses = {}
    for name, theme in THEMES.items():
        drawn, file = figure([chart], rows, theme), io.BytesIO()
        with rc_context(theme.settings()):
            drawn.savefig(file, format="svg", metadata={"Date": None})
        addresses[name] = f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
    return addresses


def _machines(reports: Mapping[str, Report]) -> Part:
    fields = list(dict.fromkeys(key for report in reports.values() for key in report.machine))
    rows = [[name, *(shown(report.machine.get(field)) for field in fields)] for name, report in reports.items()]
    return Part(title="Machine and versions", head=("result", *fields), rows=rows)


def _prefixed(part: Part, prefix: str) -> Part:
    return replace(part, title=prefix + part.title)
