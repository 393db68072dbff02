"""`python -m benchmarks figures`: draw the figures of the documentation again, from the recorded rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.speed_blocks import ANY, FAST, FEWER, MIDDLE, SLOW, STOCK
from lowbit_lab.bench.settings import link_name
from lowbit_lab.charts.charts import Chart, draw
from lowbit_lab.charts.style import THEMES
from lowbit_run.cli.commands import measurements
from lowbit_run.config import section
from lowbit_run.report import Command, Report, Row

if TYPE_CHECKING:
    from lowbit_run.cli.parser import Parser


@section()
class FiguresSettings:
    """Where."""

    folder: str = "docs/results"
    """Folder that has data/NAME.json, and gets figures/NAME-light.svg and figures/NAME-dark.svg."""


@dataclass(frozen=True)
class Picture:
    """A figure of the documentation: its name, its charts and their rows."""

    name: str
    charts: Sequence[Chart]
    rows: Sequence[Row]

    def write(self, folder: Path) -> list[Path]:
        """Draw it in every theme; the README's figure also as PNG, for pages that cannot show SVG."""
        files = {folder / f"{self.name}-{name}.svg": theme for name, theme in THEMES.items()}
        if self.name == README:
            files[folder / f"{self.name}.png"] = THEMES["light"]
        for file, theme in files.items():
            draw(self.charts, self.rows, file, theme=theme)
        return list(files)


class Figures:
    """`python -m benchmarks figures`."""

    summary = "Draw the figures of the documentation again, from the recorded rows."
    examples = ("python -m benchmarks figures",)

    def parser(self, program: str) -> "Parser":
        """Return the parser of its command line."""
        from lowbit_run.cli.parser import Parser

        return Parser(program, self.summary, FiguresSettings)

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Draw all figures."""
        settings, _ = self.parser(program).resolve(words)
        folder = Path(settings.folder)
        for file in sorted((folder / "data").glob("*.json")):
            for written in picture(file).write(folder / "figures"):
                print(written)  # noqa: T201


def picture(file: Path) -> Picture:
    """Return the figure of a recorded file.

    Raises:
        OSError, ValueError, KeyError: the file cannot be read, or has no rows of a known command.
    """
    report = Report.read_json(file)
    charts = command_of(report.command).charts
    if file.stem == "race":
        return Picture(README, [replace(chart, panel=None) for chart in charts], report.rows)
    if file.stem == "convergence":
        charts = [replace(chart, **MEANS) for chart in charts]
    if file.stem == "tensor-parallel":
        charts = [replace(chart, **BY_LINK) for chart in charts]
    return Picture(file.stem, charts, [row for row in report.rows if SHOWN.get(file.stem, bool)(row)])


def command_of(name: str) -> Command:
    """Return the declaration of "bench NAME" or "benchmarks NAME", whatever follows."""
    program, word = name.split()[:2]
    return measurements("benchmarks" if program == "benchmarks" else "lowbit_lab.bench")[word].command


README = "readme"
MEANS: Mapping[str, Any] = {
    "rows": None,
    "panel": "text",
    "series": "boundary",
    "low": lambda row: row["over_fp32"] - row["over_fp32_spread"],
    "high": lambda row: row["over_fp32"] + row["over_fp32_spread"],
    "subtitle": "Held-out loss minus that of FP32, 3 seeds: mean and standard deviation. Lower left is better.",
}
"""Changes of the chart of `bench convergence` for the recorded file, which holds means over the seeds."""
BY_LINK: Mapping[str, Any] = {
    "panel": "{ranks} ranks".format_map,
    "series": lambda row: "PyTorch's BF16" if row["format"] == "bf16" else link_name(row),
    "subtitle": "All-reduce of partial sums of 4096 features by message size; small sums are PyTorch's own.",
}
"""Changes of the chart of `bench tensor-parallel`: what `auto` gains, by link."""
SHOWN: Mapping[str, Callable[[Row], bool]] = {
    "pipeline": lambda row: (
        row["link"] in (SLOW, MIDDLE, FAST, ANY)
        and row["boundary"] in (*STOCK, "fp32", "bf16", "int4", "tah-quant", "transform", FEWER[1])
    ),
    "gradients": lambda row: (
        row["link"] in ("100mbit", "1gbit") and row["format"] in ("engine-fp32", "engine-bf16", "fp8", "int8", "int4")
    ),
    "tensor-parallel": lambda row: row["algorithm"] == "auto" or (row["algorithm"], row["link"]) == ("ring", "1gbit"),
}
"""Functions that select the rows of a file for its figure, if all of them would be too many."""
