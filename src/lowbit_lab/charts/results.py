"""Pages about the results of `lowbit bench`, `evaluate`, `calibrate` and `plan`: one file, or several compared."""

import base64
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lowbit.codecs.names import pair_name
from lowbit_lab.bench import COMMANDS
from lowbit_lab.charts.charts import Bars, Chart, draw, figure
from lowbit_lab.charts.style import THEMES, Palette
from lowbit_run.cli.commands import Measurement
from lowbit_run.report.command import Command, Report, Row, check_output, digits, distinct, flat
from lowbit_run.report.page import Page, Part, lines, try_to_write
from lowbit_run.report.training import differences, distinct_names, shown

_MOST_ROWS = 2000
_OTHERS = {
    "evaluate": "lowbit_lab.evaluate.commands:EVALUATE", "calibrate": "lowbit_lab.evaluate.commands:CALIBRATE",
    "plan memory": "lowbit_run.plan.memory", "plan pipeline": "lowbit_run.plan.pipeline",
    "doctor": "lowbit_run.doctor.command",
}  # fmt: skip
"""Modules of the commands that are not benchmarks, by name."""


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


def check_picture(path: Path) -> None:
    """Check before a long run that its picture can be drawn."""
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
        own = list[Part]()
        try:
            own += _parts(report, command)
        except ModuleNotFoundError as error:
            problems.append(f'{prefix}charts need {error.name}: pip install "lowbit[lab]", then lowbit report')
        except Exception as error:  # rows of another version may lack what a table shows
            problems.append(
                f"{prefix}tables and charts cannot be made from these rows ({error}): all fields are listed instead"
            )
            own = []
        parts += [replace(part, title=prefix + part.title) for part in own or [_plain_table(report)]]
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


def _parts(report: Report, command: Command | None) -> Iterator[Part]:
    if command is None or not report.rows:
        return
    if (speed := _speed_by_link(report.rows)) is not None:
        yield speed
    for table in command.tables:
        for title, columns, rows in table.parts(report.rows):
            # Only narrow terminals need the hyphens.
            head = [column.title.replace("-\n", "").replace("\n", " ") for column in columns]
            cells = [[column.cell(row) for column in columns] for row in rows]
            yield Part(title=title.replace("\n", " ") or "Results", head=head, rows=cells)
    for chart in charts_of(command):
        if chart.panels(report.rows):
            title, subtitle = chart.texts(report.rows)
            yield Part(title=title or chart.label, text=subtitle, picture=_pictures(chart, report.rows))


def _speed_by_link(rows: Sequence[Row]) -> Part | None:
    """Draw tokens per second over the rate of the link, if rows have several rates."""
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
