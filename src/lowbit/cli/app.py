"""The commands: `lowbit train`, `calibrate`, `evaluate`, `bench ...`, `plan ...` and `demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from lowbit import __version__
from lowbit.cli.bench import Benchmarks, Plans
from lowbit.cli.errors import Traceback, one_line_errors
from lowbit.cli.inference import calibrate_command, evaluate_command

app = typer.Typer(
    help="Train and run models on several ranks with few bits on the wire.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(
    cls=Benchmarks,
    help="Measure speed over slow links, the codecs themselves, what they cost in loss, and memory.",
    no_args_is_help=True,
)
plan = typer.Typer(
    cls=Plans,
    help="Work out a run before it is started: the memory of its devices.",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")
app.add_typer(plan, name="plan")
app.command("calibrate")(calibrate_command())
app.command("evaluate")(evaluate_command())


@bench.callback()
def _bench() -> None:
    pass


@plan.callback()
def _plan() -> None:
    pass


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lowbit {__version__}")
        raise typer.Exit


@app.callback()
def _lowbit(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


class _Resumable(TyperCommand):
    """Takes `--resume` alone and `--resume=auto`; a word after `--resume` is an argument of its own."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--resume=true" if a == "--resume" else a for a in args])


@app.command(cls=_Resumable)
def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file; what it leaves out keeps its default.")] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Override a value, such as pipeline.forward=int4; may be repeated.",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Local processes to start: sets pipeline.ranks.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[=auto]",
            help="Go on from the newest checkpoint; =auto: begin where there is none. Sets run.resume.",
        ),
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION.KEY",
            help="Go on with another value of this, such as run.steps; may be repeated. Sets run.allow_change.",
        ),
    ] = None,
    supervise: Annotated[
        bool,
        typer.Option(
            "--supervise",
            help="Start again from the newest checkpoint when a rank, a machine or a link fails: sets run.supervise.",
        ),
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Train a causal language model: on local ranks, or as one rank under torchrun."""
    overrides = list(override or ())
    if ranks is not None:
        overrides.append(f"pipeline.ranks={ranks}")
    if resume:
        overrides.append(f"run.resume={resume}")
    if allow_change:
        overrides.append(f"run.allow_change={json.dumps(allow_change)}")
    if supervise:
        overrides.append("run.supervise=true")
    with one_line_errors(traceback):
        from lowbit.cli.show import show_summary
        from lowbit.train import load, run

        if (summary := run(load(config, overrides))) is not None:
            show_summary(summary)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for tables, picture and models.")] = Path("runs/demo"),
    traceback: Traceback = False,
) -> None:
    """Train a small Llama over a 100 Mbit/s link, in FP32 and in TAH-Quant, side by side."""
    with one_line_errors(traceback):
        from lowbit.bench.demo import run

        run(output)
