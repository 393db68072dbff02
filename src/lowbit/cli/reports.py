"""Commands that measure or plan: options are the fields of a section; reports are shown, written, drawn."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.cli.parser import Parser
    from lowbit.report import Command, Report


@dataclass(frozen=True)
class ReportCommand:
    """A command that makes a report.

    Attributes:
        summary: what it does, for help.
        module: with `run(settings)`.
        views: with `show(report)` for the terminal and `draw(report, path)`.
        run: how to call `run`, given the module, the settings and the JSON file; by default with the settings alone.
        settings: the module and the name of its section, "bench.race:RaceConfig"; absent: `Settings` of
            `module`.
    """

    summary: str
    module: str
    views: str
    run: Callable[[Any, Any, Path | None], Report] = lambda module, settings, file: module.run(settings)
    settings: str = ""

    def parser(self, program: str) -> Parser:
        """Of its command line."""
        from lowbit.cli.legacy import as_section
        from lowbit.cli.parser import Parser

        place, _, name = (self.settings or f"{self.module}:Settings").partition(":")
        parser = Parser(program, self.summary, as_section(getattr(importlib.import_module(f"lowbit.{place}"), name)))
        parser.add_argument("--json", metavar="FILE", type=Path, help="Write the rows, for scripts.")
        parser.add_argument("--png", metavar="FILE", type=Path, help="Draw a picture of them.")
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Measure as a command line says."""
        parser = self.parser(program)
        chosen, options = parser.resolve(words)
        json, png = options.get("json"), options.get("png")
        check_output(json)
        check_output(png, picture=True)
        report = self.run(importlib.import_module(f"lowbit.{self.module}"), chosen, json)
        if os.environ.get("RANK", "0") == "0":
            conclude(importlib.import_module(f"lowbit.{self.views}"), report, json, png)


@dataclass(frozen=True)
class Measurement:
    """A `lowbit.report.Command`, which is imported when its own help or result is asked for.

    Attributes:
        summary: what it does, for help.
        place: its module and name, such as "evaluate.commands:EVALUATE".
    """

    summary: str
    place: str

    @property
    def command(self) -> Command:
        """The declaration."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(f"lowbit.{module}"), name)

    def parser(self, program: str) -> Parser:
        """Of its command line."""
        from lowbit.cli.parser import Parser

        parser = Parser(program, self.summary, self.command.settings)
        parser.add_argument("--json", metavar="FILE", type=Path, help="Write the rows, for scripts.")
        parser.add_argument("--png", metavar="FILE", type=Path, help="Draw a picture of them.")
        return parser

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Measure as a command line says."""
        from lowbit.report import execute

        settings, options = self.parser(program).resolve(words)
        execute(self.command, settings, json=options.get("json"), png=options.get("png"))


def _run_live(views: str, *, goes_on: bool = False) -> Callable[[Any, Any, Path | None], Report]:
    """Show the rows as they come, by `table_of(rows)` of `views`; `goes_on`: with those in the JSON file."""

    def run(module: Any, settings: Any, file: Path | None) -> Report:
        from rich.console import Console
        from rich.live import Live

        table_of = importlib.import_module(f"lowbit.bench.{views}").table_of
        with Live(console=Console(stderr=True), transient=True) as live:
            more: Any = {"file": file} if goes_on else {}
            return module.run(settings, on_rows=lambda rows: live.update(table_of(rows)), **more)

    return run


BENCHMARKS = {
    "pipeline": ReportCommand(
        "Training speed over really slow links, boundary format against boundary format.",
        "bench.pipeline",
        "bench.speeds",
        _run_live("speeds"),
    ),
    "race": ReportCommand(
        "Seconds of training until each boundary format has reached the same held-out loss.",
        "bench.race",
        "bench.race",
        _run_live("race"),
    ),
    "codecs": ReportCommand(
        "What formats cost in time, in bits and in accuracy, beside a copy and eager PyTorch.",
        "bench.codecs",
        "bench.codecs_views",
    ),
    "gradients": ReportCommand(
        "Gradient averages over really slow links, format against format, alone and in training.",
        "bench.gradients",
        "bench.gradients_views",
        _run_live("gradients_views"),
    ),
    "tensor-parallel": ReportCommand(
        "Sums of partial sums over really slow links, by size of the message.",
        "bench.tensor_parallel",
        "bench.tensor_parallel_views",
        _run_live("tensor_parallel_views"),
    ),
    "convergence": ReportCommand(
        "The same training run with every boundary format, over several seeds.",
        "bench.convergence",
        "bench.losses",
        lambda module, settings, file: module.run(settings, file=file),
    ),
    "memory": ReportCommand(
        "What training needs memory for, and how much less of it low-bit activations take.",
        "bench.memory",
        "bench.memory_views",
        _run_live("memory_views", goes_on=True),
    ),
    "activations": ReportCommand(
        "How far few bits of saved activations turn a trained model's gradients.",
        "bench.activations",
        "bench.activations_views",
        _run_live("activations_views"),
    ),
    "spectrum": ReportCommand(
        "How near a model's boundaries lie to a few directions, and what each format makes of that.",
        "bench.spectrum",
        "bench.spectrum_views",
        _run_live("spectrum_views"),
    ),
}
PLANS = {
    "memory": ReportCommand(
        "How many bits saved activations get, by pipeline stage and layer type, for the memory there is.",
        "bench.plan_memory",
        "bench.plan_memory_views",
    )
}
CALIBRATE = Measurement(
    "Measure the ranges of a model's tensor-parallel sums once, so that they can be sent in 4.2 bits.",
    "evaluate.commands:CALIBRATE",
)
EVALUATE = Measurement(
    "Perplexity and zero-shot scores of a model with low-bit tensor-parallel sums.",
    "evaluate.commands:EVALUATE",
)


def conclude(views: Any, report: Report, json: Path | None, png: Path | None) -> None:
    """Show a report by `show` and `draw` of a module, and write what was asked for."""
    from rich.console import Console

    if json is not None:
        report.write_json(json)
    Console().print(views.show(report))
    if png is not None:
        views.draw(report, png)


def check_output(path: Path | None, *, picture: bool = False) -> None:
    """See before a long run that its outcome can be written.

    Raises:
        ValueError: it cannot, or it is to be a picture of a kind that matplotlib does not draw.
        ModuleNotFoundError: a picture is asked for without matplotlib.
    """
    if path is None:
        return
    if picture:
        kinds = sorted(importlib.import_module("matplotlib.backend_bases").FigureCanvasBase.filetypes)
        if path.suffix[1:].lower() not in kinds:
            raise ValueError(f"picture is {str(path)!r}; allowed: a file that ends in .{', .'.join(kinds)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            raise ValueError(f"{path} cannot be written: it is a folder or a device; allowed: a file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}."):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
