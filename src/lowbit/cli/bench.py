"""`lowbit bench ...`, `lowbit plan ...`: options are the fields of a `Settings`; reports are shown, written, drawn."""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from lowbit.cli.errors import Traceback, one_line_errors
from lowbit.cli.options import build, parameters

if TYPE_CHECKING:
    from lowbit.bench import Report

Json = Annotated[Path | None, typer.Option("--json", help="Write the rows, for scripts.")]
Png = Annotated[Path | None, typer.Option("--png", help="Draw a picture of them.")]


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark lies, and what is special about it.

    Attributes:
        module: in `lowbit.bench`, with `Settings` and `run(settings)`.
        views: in `lowbit.bench`, with `show(report)` for the terminal and `draw(report, path)`.
        run: how to call `run`, given the module, the settings and the JSON file.
    """

    module: str
    views: str
    run: Callable[[Any, Any, Path | None], Report]


def _run_live(table_of: str, *, goes_on: bool = False) -> Callable[[Any, Any, Path | None], Report]:
    """Show the rows as they come, by `table_of(rows)` of this module; `goes_on`: with those in the JSON file."""

    def run(module: Any, settings: Any, file: Path | None) -> Report:
        from rich.console import Console
        from rich.live import Live

        views = importlib.import_module(f"lowbit.bench.{table_of}")
        with Live(console=Console(stderr=True), transient=True) as live:
            more: Any = {"file": file} if goes_on else {}
            show = lambda rows: live.update(views.table_of(rows))  # noqa: E731
            return module.run(settings, on_rows=show, **more)

    return run


BENCHMARKS = {
    "pipeline": Benchmark("pipeline", "speeds", _run_live("speeds")),
    "race": Benchmark("race", "race", _run_live("race")),
    "codecs": Benchmark("codecs", "codecs_views", lambda module, settings, file: module.run(settings)),
    "gradients": Benchmark("gradients", "gradients_views", _run_live("gradients_views")),
    "tensor-parallel": Benchmark("tensor_parallel", "tensor_parallel_views", _run_live("tensor_parallel_views")),
    "convergence": Benchmark("convergence", "losses", lambda module, settings, file: module.run(settings, file=file)),
    "memory": Benchmark("memory", "memory_views", _run_live("memory_views", goes_on=True)),
    "activations": Benchmark("activations", "activations_views", _run_live("activations_views")),
    "spectrum": Benchmark("spectrum", "spectrum_views", _run_live("spectrum_views")),
}
PLANS = {
    "memory": Benchmark("plan_memory", "plan_memory_views", lambda module, settings, file: module.run(settings)),
}


class Benchmarks(TyperGroup):
    """The commands of `lowbit bench`, each made when it is asked for, because its settings import PyTorch."""

    commands_of: ClassVar = BENCHMARKS

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, in the order of the help."""
        return list(self.commands_of)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None if there is none."""
        if cmd_name not in self.commands_of:
            return None
        with one_line_errors(traceback=False):
            command = make_command(self.commands_of[cmd_name])
        only = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        only.command(cmd_name)(command)
        return typer.main.get_command(only)


class Plans(Benchmarks):
    """The commands of `lowbit plan`."""

    commands_of: ClassVar = PLANS


def make_command(benchmark: Benchmark) -> Callable[..., None]:
    """A function with the benchmark's settings as its parameters, as typer takes it."""
    module = importlib.import_module(f"lowbit.bench.{benchmark.module}")
    return command_of(
        module.Settings,
        lambda settings, json: benchmark.run(module, settings, json),
        views=f"lowbit.bench.{benchmark.views}",
        summary=summary_line(module.__doc__ or ""),
    )


def command_of(
    settings: type,
    run: Callable[[Any, Path | None], Report],
    *,
    views: str,
    summary: str,
) -> Callable[..., None]:
    """A function with the fields of `settings` as its parameters, as typer takes it.

    Args:
        run: given the settings and the file for the rows, makes the report. views: the module that shows it.
        summary: what the help says.
    """

    def command(json: Json = None, png: Png = None, traceback: Traceback = False, **given: Any) -> None:
        with one_line_errors(traceback):
            chosen = build(settings, given)
            check_output(json)
            check_output(png, picture=True)
            report = run(chosen, json)
            if os.environ.get("RANK", "0") == "0":
                conclude(importlib.import_module(views), report, json, png)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
    signature = inspect.Signature([*parameters(settings), *(p.replace(kind=p.KEYWORD_ONLY) for p in own)])
    command.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {}
    command.__doc__ = summary
    return command


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


def summary_line(text: str) -> str:
    """What a module's first line says after the name of its command."""
    line = text.partition("\n")[0].rpartition("`: ")[2]
    return line[:1].upper() + line[1:]
