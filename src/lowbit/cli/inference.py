"""`lowbit calibrate` and `lowbit evaluate`: options are the fields of their settings, as with the benchmarks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.cli.bench import command_of
from lowbit.evaluate import CalibrationConfig, EvaluationConfig

if TYPE_CHECKING:
    from lowbit.bench import Report


def calibrate_command() -> Callable[..., None]:
    """What typer makes `lowbit calibrate` of."""

    def run(settings: Any, json: Path | None) -> Report:
        return _module("calibrate").run(settings)

    return command_of(
        CalibrationConfig,
        run,
        views="lowbit.evaluate.ranges_views",
        summary="Measure once what a model's tensor-parallel sums look like, so that they can travel in 4.2 bits.",
    )


def evaluate_command() -> Callable[..., None]:
    """What typer makes `lowbit evaluate` of."""

    def run(settings: Any, json: Path | None) -> Report:
        from rich.console import Console

        views, console = _module("views"), Console(stderr=True)
        shown = console.is_terminal and os.environ.get("RANK", "0") == "0"
        return _module("run").run(
            settings, on_rows=lambda rows: console.print(views.line_of(rows[-1])) if shown else None
        )

    return command_of(
        EvaluationConfig,
        run,
        views="lowbit.evaluate.views",
        summary="Perplexity and zero-shot scores of a model whose tensor-parallel sums travel in few bits.",
    )


def _module(name: str) -> Any:
    return importlib.import_module(f"lowbit.evaluate.{name}")
