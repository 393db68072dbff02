"""Training runs side by side, each in a process of its own, with one line of progress for all."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowbit.bench.emulated import (
    Recipe,
    activation_policy,
    codec_pair,
    formats_of,
    gradient_codec,
    train,
)

_reports: SimpleQueue | None = None  # in a worker: where its steps are told


class Job(NamedTuple):
    """One run: a regime, a boundary format and a seed; and the format of the gradients."""

    regime: str
    boundary: str
    seed: int
    backward: str

    def __str__(self) -> str:
        return f"{self.regime} {self.boundary} seed {self.seed}"


class Task(NamedTuple):
    """A job with the run it stands for, and a file for the trained weights (empty: not kept)."""

    job: Job
    recipe: Recipe
    keep: str = ""


def finish(tasks: list[Task], *, jobs: int, threads: int) -> Iterator[dict[str, Any]]:
    """Run tasks, `jobs` at a time with `threads` each, on CUDA devices in turn, and yield a row for each, as they end.

    Whoever stops iterating early stops what has not started; an error in a run is raised here.
    """
    context = multiprocessing.get_context("forkserver")  # a fork of this one may hold CUDA
    reports, numbers = context.SimpleQueue(), context.SimpleQueue()
    workers = min(jobs, max(1, len(tasks)))
    for number in range(workers):
        numbers.put(number)
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(reports, numbers, threads))
    with _progress(tasks, reports):
        try:
            futures = [pool.submit(_work, task) for task in tasks]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start(reports: SimpleQueue, numbers: SimpleQueue, threads: int) -> None:
    global _reports
    _reports = reports
    if torch.cuda.is_available():
        torch.cuda.set_device(numbers.get() % torch.cuda.device_count())
    torch.set_num_threads(threads)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """End this process when the one that started it is gone, however that ended: a run may have minutes to go."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(task: Task) -> dict[str, Any]:
    job, recipe = task.job, task.recipe
    forward, backward = codec_pair(job.boundary, job.backward)

    def tell(step: int, loss: float) -> None:
        if _reports is not None:
            _reports.put((str(job), step, loss))

    model, result = train(
        recipe,
        forward=forward,
        backward=backward,
        seed=job.seed,
        gradients=gradient_codec(job.boundary),
        activations=activation_policy(job.boundary),
        on_step=tell,
    )
    if task.keep:
        _save(model.state_dict(), Path(task.keep))
    formats = formats_of(job.boundary, job.backward)
    return {"boundary": job.boundary, **formats, "seed": job.seed, "regime": job.regime, **result}


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write so that an interrupted call leaves no half file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(weights, part)
    part.replace(path)


@contextmanager
def _progress(tasks: Iterable[Task], reports: SimpleQueue) -> Iterator[None]:
    """Show the steps of all runs together, and what ran last."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        all_steps = bar.add_task("starting", total=sum(task.recipe.steps for task in tasks))

        def listen() -> None:
            while (told := reports.get()) is not None:
                name, step, loss = told
                bar.update(all_steps, advance=1, description=f"{name}: step {step}, loss {loss:.3f}")

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            yield
        finally:
            reports.put(None)
            listener.join()
