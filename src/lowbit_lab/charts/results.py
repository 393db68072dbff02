"""Pages about the results of `lowbit bench`, `evaluate`, `calibrate` and `plan`: one file, or several compared."""

import base64
import functools
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lowbit.codecs.names import pair_name
from lowbit_lab.bench import COMMANDS
from lowbit_lab.charts.charts import Bars, Chart, draw, figure
from lowbit_lab.charts.style import THEMES, Palette
from lowbit_run.cli.commands import Measurement
from lowbit_run.report.command import Column, Command, Report, Row, Table, check_output, digits, distinct, flat
from lowbit_run.report.page import Page, Part, lines, try_to_write
from lowbit_run.report.training import differences, distinct_names, shown

_MOST_ROWS = 2000
_OTHERS = {
    "evaluate": "lowbit_lab.evaluate.commands:EVALUATE", "calibrate": "lowbit_lab.evaluate.commands:CALIBRATE",
    "plan memory": "lowbit_run.plan.memory", "plan pipeline": "lowbit_run.plan.pipeline",
    "doctor": "lowbit_run.doctor.command",
}  # fmt: skip
"""Modules of the commands that are not benchmarks, by name."""
_BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "__init__.py"
"""The benchmarks of developers, in a checkout; `python -m benchmarks report` finds them."""


def _series(fields: Mapping[str, str]) -> Callable[[Sequence[Row]], Sequence[Row]]:
    """Return a function that makes a row for each stage and field; fields that are 16 everywhere are left out."""

    def long(rows: Sequence[Row]) -> Sequence[Row]:
        rows = [row for row in rows if "choices" not in row]
        shown = {name: field for name, field in fields.items() if any(row[field] != 16 for row in rows)}
        return [{**row, "series": name, "y": row[field]} for row in rows for name, field in shown.items()]

    return long


_stage = "stage {stage}\n{held} held".format_map
CHARTS: dict[str, Sequence[Chart]] = {
    "plan memory": (
        Bars(
            group=_stage,
            series="series",
            y=lambda row: row["y"] / 1e6,
            label="MB",
            title="Saved activations at the peak of each stage",
            rows=_series({"plain BF16": "bf16_bytes", "this plan": "saved_bytes", "4 bits everywhere": "int4_bytes"}),
        ),
        Bars(
            group=_stage,
            series="series",
            y="y",
            label="bits",
            title="Bits by layer type",
            rows=_series({kind: kind for kind in ("norm", "mlp", "linear")}),
        ),
    ),
    "plan pipeline": (
        Bars(
            group=lambda row: "",
            series=lambda row: ", ".join(map(pair_name, row["formats"])),
            y="tokens_per_second",
            label="tokens per second",
            title="Predicted training speed by boundary format",
        ),
    ),
}
"""Charts of the library's own commands, by name, because the library itself has no charts."""


def charts_of(command: Command) -> Sequence[Chart]:
    """Return the charts of a command: its own, or those of a command of the library."""
    return command.charts or CHARTS.get(command.name, ())


_DRAWN = b"drawn by lowbit"
"""What pictures of commands say of themselves, without which they are not replaced."""


def check_picture(path: Path) -> None:
    """Check before a long run that its picture can be drawn."""
    kinds = sorted(importlib.import_module("matplotlib.backend_bases").FigureCanvasBase.filetypes)
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"picture is {str(path)!r}; allowed: a file that ends in .{', .'.join(kinds)}")
    check_output(path)
    if path.exists() and _DRAWN not in path.read_bytes():
        raise ValueError(f"{path} exists and is not marked as drawn by lowbit; choose another name or move it away")


def draw_results(command: Command, rows: Sequence[Row], path: Path) -> None:
    """Draw a command's charts into a file; one that is not a PNG, SVG or PDF is not replaced later."""
    draw(charts_of(command), rows, path, creator=_DRAWN.decode())


def read_results(file: Path) -> tuple[Report, Command | None]:
    """Return results that `--json` wrote, and the declaration of their command, if this version has it."""
    report = Report.read_json(file)
    place = _OTHERS.get(report.command) or COMMANDS.get(report.command.removeprefix("bench "))
    if place is None and report.command.startswith("benchmarks ") and _BENCHMARKS.exists():
        spec = importlib.util.find_spec("benchmarks")  # a checkout has it, and the program may not find it
        if spec is not None and spec.origin == str(_BENCHMARKS):
            commands = importlib.import_module("benchmarks").COMMANDS
            place = commands.get(report.command.removeprefix("benchmarks "))
    return report, Measurement(place).command if place else None


def write_results(command: Command, file: Path) -> None:
    """Write the page of results next to their file, or log a warning."""
    try_to_write(lambda: results_page({file: (Report.read_json(file), command)}), file.with_suffix(".html"))


def results_page(files: Mapping[Path, tuple[Report, Command | None]], problems: Sequence[str] = ()) -> Page:
    """Make a page about results by their files."""
    names = distinct_names([file.with_suffix("") for file in files])
    results = dict(zip(names, files.values(), strict=True))
    parts, problems = list[Part](), list(problems)
    several = len(results) > 1
    for name, (report, command) in results.items():
        prefix = f"{name}: " if several else ""
        own, missing = list[Part](), list[str]()
        try:
            own += _parts(report, command, missing)
        except ModuleNotFoundError as error:
            problems.append(f'{prefix}charts need {error.name}: pip install "lowbit[lab]", then lowbit report')
        if missing:
            problems.append(
                f"{prefix}some tables and charts cannot be made from these rows ({'; '.join(dict.fromkeys(missing))}): "
                "all fields are listed as well"
            )
        own += [_plain_table(report)] if missing or not own else []
        parts += [replace(part, title=prefix + part.title) for part in own]
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


def _parts(report: Report, command: Command | None, missing: list[str]) -> Iterator[Part]:
    """Yield tables and charts; what rows of another version lack is left out and added to `missing`."""
    if command is None or not report.rows:
        return
    if (speed := _speed_by_link(report.rows)) is not None:
        yield speed
    tables = (functools.partial(_tables, table) for table in command.tables)
    charts = (functools.partial(_chart, chart) for chart in charts_of(command))
    for make in (*tables, *charts):
        try:
            made = list(make(report.rows, missing))
        except ModuleNotFoundError:
            raise
        except Exception as error:
            missing.append(f"{error}")
        else:
            yield from made


def _tables(table: Table, rows: Sequence[Row], missing: list[str]) -> Iterator[Part]:
    shown = table.rows(rows) if table.rows else rows
    columns = table.columns
    if not callable(columns):
        columns = [column for column in columns if _has(column, shown, missing)]
    for title, heads, part in replace(table, columns=columns).parts(rows):
        # Only narrow terminals need the hyphens.
        head = [column.title.replace("-\n", "").replace("\n", " ") for column in heads]
        cells = [[column.cell(row) for column in heads] for row in part]
        yield Part(title=title.replace("\n", " ") or "Results", head=head, rows=cells)


def _has(column: Column, rows: Sequence[Row], missing: list[str]) -> bool:
    """Whether all rows have what a column shows."""
    try:
        for row in rows:
            column.cell(row)
    except (LookupError, TypeError, ValueError) as error:
        missing.append(f"{error}")
        return False
    return True


def _chart(chart: Chart, rows: Sequence[Row], missing: list[str]) -> Iterator[Part]:
    if chart.panels(rows):
        title, subtitle = chart.texts(rows)
        yield Part(title=title or chart.label, text=subtitle, picture=_pictures(chart, rows))


def _speed_by_link(rows: Sequence[Row]) -> Part | None:
    """Draw tokens per second over the rate of the link, if rows have several rates and differ in little else."""
    rated = [row for row in rows if row.get("tokens_per_second") and row.get("link_mbit")]
    if len({row["link_mbit"] for row in rated}) < 2:
        return None
    known = ("boundary", "format", "split", "ranks", "connections", "link_rtt_ms")
    fields = [field for field in known if len(distinct(rated, field)) > 1]
    units = {"ranks": "ranks", "connections": "connections", "link_rtt_ms": "ms"}
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rated, key=lambda row: row["link_mbit"]):
        name = ", ".join(
            f"{row[f]:g} {units[f]}" if f in units else str(row[f]) for f in fields if row.get(f) is not None
        )
        curves.setdefault(name or "speed", []).append((row["link_mbit"], row["tokens_per_second"]))
    if any(len({rate for rate, _ in curve}) < len(curve) for curve in curves.values()):
        return None  # links differ in more than their rate, such as loss
    palettes = [Palette(theme) for theme in THEMES.values()]
    colors = {name: (palettes[0][name], palettes[1][name]) for name in curves}
    chart = lines(curves, x="link, Mbit/s", y="tokens per second", log_x=True, markers=True, colors=colors)
    return Part(title="Speed against bandwidth", figure=chart)


def _plain_table(report: Report) -> Part:
    """Make a table of all fields of all rows."""
    head = list(dict.fromkeys(key for row in report.rows for key in row))
    cells = [[row.get(key) for key in head] for row in report.rows[:_MOST_ROWS]]
    rows = [[digits(v, 6) if isinstance(v, float) else shown(v)[:500] for v in line] for line in cells]
    return Part(title=f"Rows of {report.command}", head=head, rows=rows)


def _pictures(chart: Chart, rows: Sequence[Row]) -> dict[str, str]:
    """Draw the chart as in the documentation, in both themes, below the heading that the page has."""
    from matplotlib import rc_context

    addresses = {}
    for name, theme in THEMES.items():
        drawn, file = figure([chart], rows, theme, headed=False), io.BytesIO()
        with rc_context(theme.settings()):
            drawn.savefig(file, format="svg", metadata={"Date": None})
        addresses[name] = f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
    return addresses


def _machines(reports: Mapping[str, Report]) -> Part:
    fields = list(dict.fromkeys(key for report in reports.values() for key in report.machine))
    rows = [[name, *(shown(report.machine.get(field)) for field in fields)] for name, report in reports.items()]
    return Part(title="Machine and versions", head=("result", *fields), rows=rows)
