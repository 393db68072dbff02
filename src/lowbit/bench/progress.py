"""Progress of training runs on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def step_bars(steps: Mapping[str, int], console: Console) -> Iterator[Callable[[str, str], None]]:
    """Show a bar for each name, with its number of steps; yields a function that advances one and shows a line."""
    columns = (
        TextColumn("{task.fields[name]}"), BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        tasks = {name: bars.add_task("", total=total, name=name, start=False) for name, total in steps.items()}

        def step(name: str, line: str) -> None:
            if not bars.tasks[tasks[name]].started:
                bars.start_task(tasks[name])
            bars.update(tasks[name], advance=1, description=line)

        yield step
