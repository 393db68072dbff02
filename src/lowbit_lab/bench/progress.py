"""Progress of several training runs: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lowbit.terminal import filtered_again
from lowbit.train.progress import Rhythm

_WIDE = 100  # characters of a terminal that has room for bars next to the text
_SPEED_SECONDS = 120.0
Advance = Callable[..., None]


@contextmanager
def step_bars(steps: Mapping[str, int], console: Console) -> Iterator[Advance]:
    """Show progress for each name, with its number of steps; yield a function that advances one and shows a line.

    Its arguments: the name, the line, and the number of steps if not 1.
    """
    yield from _bars(steps, console) if console.is_terminal else _lines(steps, console)


def _bars(steps: Mapping[str, int], console: Console) -> Iterator[Advance]:
    wide = [BarColumn(10), TimeElapsedColumn()] if console.width >= _WIDE else []
    columns = (
        TextColumn("{task.fields[name]}", markup=False), MofNCompleteColumn(), *wide, TimeRemainingColumn(compact=True),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=console, speed_estimate_period=_SPEED_SECONDS) as bars, filtered_again():
        tasks = {name: bars.add_task("", total=total, name=name, start=False) for name, total in steps.items()}

        def step(name: str, line: str, steps: int = 1) -> None:
            if not bars.tasks[tasks[name]].started:
                bars.start_task(tasks[name])
            bars.update(tasks[name], advance=steps, description=line)

        yield step


def _lines(steps: Mapping[str, int], console: Console) -> Iterator[Advance]:
    done, total = dict.fromkeys(steps, 0), steps
    rhythms: dict[str, Rhythm] = {}

    def step(name: str, line: str, steps: int = 1) -> None:
        done[name] += steps
        if rhythms.setdefault(name, Rhythm(total[name])).due(done[name]):
            console.print(f"{name}  {done[name]}/{total[name]}  {line}", markup=False, highlight=False, soft_wrap=True)

    yield step
