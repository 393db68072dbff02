"""`lowbit bench race`: seconds of training until each boundary format has reached the same held-out loss.

A format can be fast and learn less from each step, or the other way round; AQ-SGD above all sends every sample at full
precision at its first visit and few bits later. So what counts is the time to the same loss, when samples come again
in every epoch: fine-tuning, the regime of both papers.

What is alike for all: the weights they start from, the samples and their order, the learning rate, the stage and its
schedule, the format of the gradients, the link, and the processes in which they take turns. The clock of each runs in
its own training steps only. Held-out loss is that of the model by itself, with full precision at the boundaries.
"""

from __future__ import annotations

import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.bench import charts
from lowbit.bench.launch import UNLIMITED, Ranks, set_link, started
from lowbit.bench.pipeline import (
    OnRows,
    check_at_least,
    check_recipes,
    formats_of,
    recipe,
    step,
)
from lowbit.bench.report import Column, Report, Row, machine, table
from lowbit.bench.speeds import link_name
from lowbit.network import Link, SlowLink

if TYPE_CHECKING:
    from rich.table import Table

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The course.

    Args:
        links: a race on each: rate, and round trip if there is a distance, such as 25mbit, 100mbit/40ms, or unlimited.
        boundaries: formats of activations, by name or in full, or of both ways, such as "int4 / int6"; backward: of the
            gradients beside few-bit activations that do not name their own; absent: the default.
        ranks: processes, each on a host of its own. stages_per_rank, schedule, microbatches: of the pipeline.
        dim, layers, heads, kv_heads, ffn: of the Llama that is trained (0: as usual). batch: samples in a step;
            sequence: tokens of a sample.
        start_text: files or folders for the weights that all start from; absent: Python's standard library.
        start_steps: steps at full precision, before the race, that make these weights.
        text: files or folders to fine-tune on; absent: Python's language reference.
        samples: distinct samples, a multiple of `batch`; epochs: how often each is visited.
        lr: highest learning rate of the fine-tuning.
        evaluations: of the held-out loss in each epoch; eval_batches: batches of held-out text in each.
        device: "cpu", or "cuda": ranks take the machine's devices in turn.
        precision: of the computation: "auto", "fp32" or "bf16".
        seed: of weights and data order.
    """

    links: tuple[Link, ...] = (Link(100.0),)
    boundaries: tuple[str, ...] = ("fp32", "tah-quant", "aq-sgd")
    backward: str = ""
    ranks: int = 2
    stages_per_rank: int = 4
    schedule: str = "Interleaved1F1B"
    microbatches: int = 4
    dim: int = 128
    layers: int = 8
    heads: int = 4
    kv_heads: int = 1
    ffn: int = 128
    batch: int = 32
    sequence: int = 128
    start_text: tuple[str, ...] = ()
    start_steps: int = 200
    text: tuple[str, ...] = ()
    samples: int = 640
    epochs: int = 5
    lr: float = 2e-4
    evaluations: int = 2
    eval_batches: int = 8
    device: str = "cpu"
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(
            self,
            ranks=2,
            start_steps=1,
            batch=1,
            samples=self.batch,
            epochs=1,
            evaluations=1,
            eval_batches=1,
        )
        if self.samples % self.batch:
            raise ValueError(f"samples is {self.samples}; allowed: a multiple of batch ({self.batch})")
        if self.evaluations > self.samples // self.batch:
            raise ValueError(
                f"evaluations is {self.evaluations}; "
                f"allowed: at most the steps of an epoch ({self.samples // self.batch})"
            )
        check_recipes(self)


def run(settings: Settings, *, on_rows: OnRows | None = None) -> Report:
    """Race on every link.

    Args:
        settings: the course.
        on_rows: called with all rows so far after every turn.

    Returns:
        A report with a row for each link and boundary: `boundary`, `forward`, `backward`, what `set_link` says of the
        link, `target_loss` (the lowest held-out loss that all boundaries of the link have reached), `seconds_to_loss`
        (of training, until then), `speedup_aq_sgd` and `speedup_fp32` (their seconds over these), `best_loss`,
        `seconds` (of all training), `bits_forward` and `bits_backward` (mean over the run), `megabytes` (sent by all
        ranks), `state_bytes` (kept between steps at the end, all ranks) and `curve` (pairs of seconds and held-out
        loss).

    Raises:
        LinkUnavailable: a limited link is asked for and this machine does not permit one.
        ChildProcessError: a rank failed.
    """
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        started(settings.ranks, settings.links) as (network, ranks),
    ):
        ranks.ask("train", config=_start_recipe(settings, f"{folder}/start"))
        for place, link in enumerate(settings.links):
            about = set_link(network, link)
            with _not_timed(network):
                racers = [
                    Racer(settings, boundary, ranks, f"{folder}/{place}-{number}")
                    for number, boundary in enumerate(settings.boundaries)
                ]
            for racer in racers * (settings.epochs * settings.evaluations):
                racer.train()
                with _not_timed(network):
                    racer.evaluate()
                if on_rows:
                    on_rows(rows + finish_line(racers, about))
            rows += finish_line(racers, about)
    return Report(command="bench race", settings=settings, machine=machine(), rows=rows)


@contextmanager
def _not_timed(network: SlowLink | None) -> Iterator[None]:
    """Lift the link's limits for what the clocks leave out, so that nobody has to wait for it."""
    if network is None:
        yield
        return
    link = network.link
    network.set_link(UNLIMITED)
    yield
    network.set_link(link)


class Racer:
    """One boundary's run, with its clock.

    Args:
        settings: the course; boundary: the format; ranks: where it runs.
        folder: what the run writes to, and its name. The starting weights lie beside it.
    """

    def __init__(self, settings: Settings, boundary: str, ranks: Ranks, folder: str) -> None:
        self.boundary = boundary
        self.formats = formats_of(boundary, settings.backward)
        self.steps: list[dict[str, Any]] = []
        self.state_bytes = 0
        self._name, self._ranks = folder, ranks
        self._turns = _split(settings.samples // settings.batch, settings.evaluations)
        config = _race_recipe(settings, boundary, self._name, Path(folder).with_name("start"))
        ranks.ask("open", name=self._name, config=config, samples=settings.samples)
        self.curve: list[tuple[float, float]] = []
        self.evaluate()

    def train(self) -> None:
        """Train until the next evaluation is due."""
        turn = (len(self.curve) - 1) % len(self._turns)
        self.steps += step(self._ranks, self._name, self._turns[turn])
        self.state_bytes = sum(self._ranks.ask("state_bytes", name=self._name))

    def evaluate(self) -> None:
        """Add a point to the curve."""
        seconds = sum(step["seconds"] for step in self.steps)
        self.curve.append((seconds, self._ranks.ask("held_out_loss", name=self._name)[0]))


def finish_line(racers: Sequence[Racer], about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of one link: who was when at the lowest loss that all have reached."""
    running = [racer for racer in racers if racer.steps]
    if not running:
        return []
    target = max(min(loss for _, loss in racer.curve) for racer in running)
    seconds = {racer.boundary: seconds_until(racer.curve, target) for racer in running}
    rows = []
    for racer in running:
        mine = seconds[racer.boundary]
        row = {
            "boundary": racer.boundary,
            **racer.formats,
            **about,
            "target_loss": target,
            "seconds_to_loss": mine,
        }
        for name in ("fp32", "aq-sgd"):
            other = seconds.get(name)
            key = f"speedup_{name.replace('-', '_')}"
            row[key] = other / mine if other is not None and mine else None
        rows.append(row | _run_facts(racer))
    return rows


def seconds_until(curve: Curve, target: float) -> float | None:
    """When a curve of (seconds, loss) first is at the target or below, between its points by a straight line."""
    before: tuple[float, float] | None = None
    for seconds, loss in curve:
        if loss <= target:
            if before is None or loss == before[1]:
                return seconds
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (seconds - before[0])
        before = (seconds, loss)
    return None


def _run_facts(racer: Racer) -> dict[str, Any]:
    steps = racer.steps
    return {
        "best_loss": min(loss for _, loss in racer.curve),
        "seconds": racer.curve[-1][0],
        "bits_forward": sum(step["bits_forward"] for step in steps) / len(steps),
        "bits_backward": sum(step["bits_backward"] for step in steps) / len(steps),
        "megabytes": sum(step["bytes_sent"] for step in steps) / 1e6,
        "state_bytes": racer.state_bytes,
        "curve": list(racer.curve),
    }


def _start_recipe(settings: Settings, output: str) -> dict[str, Any]:
    """The run that makes the weights that all start from."""
    data = {"text": list(settings.start_text)}
    return recipe(settings, "fp32", data=data, run={"output": output, "steps": settings.start_steps})


def _race_recipe(settings: Settings, boundary: str, output: str, start: Path) -> dict[str, Any]:
    steps = settings.epochs * settings.samples // settings.batch
    reference = Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py")
    return recipe(
        settings,
        boundary,
        model={"pretrained": str(start / "model")},
        data={"text": list(settings.text) or [str(reference)]},
        optimizer={"lr": settings.lr, "lr_warmup_steps": min(10, steps)},
        run={"output": output, "steps": steps, "eval_batches": settings.eval_batches},
    )


def _split(count: int, parts: int) -> list[int]:
    """Whole numbers that add up to `count`, as equal as can be."""
    return [count * (i + 1) // parts - count * i // parts for i in range(parts)]


COLUMNS = (
    Column(title="link", field="link"),
    Column(title="boundary", field="boundary"),
    Column(title="loss", field="target_loss", show="{:.4f}".format),
    Column(title="reached\nafter s", field="seconds_to_loss", show="{:.1f}".format),
    Column(title="over\nfp32", field="speedup_fp32", show="{:.2f}x".format),
    Column(title="over\naq-sgd", field="speedup_aq_sgd", show="{:.2f}x".format),
    Column(title="best\nloss", field="best_loss", show="{:.4f}".format),
    Column(title="whole\nrun s", field="seconds", show="{:.1f}".format),
    Column(title="bits\nfwd", field="bits_forward", show="{:.2f}".format),
    Column(title="bits\nbwd", field="bits_backward", show="{:.2f}".format),
    Column(title="MB\nsent", field="megabytes", show="{:.1f}".format),
    Column(title="state\nMB", field="state", show="{:.1f}".format),
)


def table_of(rows: Sequence[Row]) -> Table:
    """Who reached the loss when."""
    shown = [{**row, "link": link_name(row["link"]), "state": row["state_bytes"] / 1e6} for row in rows]
    return table(shown, COLUMNS, title="Seconds of training until the same held-out loss")


def show(report: Report) -> Table:
    """The report as a table."""
    return table_of(report.rows)


def draw(report: Report, path: Path | str) -> None:
    """Held-out loss against seconds of training, a panel for each link."""
    links = list(dict.fromkeys(row["link"] for row in report.rows))
    figure = charts.new_figure(panels=len(links))
    for axes, link in zip(figure.axes, links, strict=True):
        curves = {r["boundary"]: r["curve"] for r in report.rows if r["link"] == link}
        charts.lines(
            axes,
            curves,
            x_label="seconds of training",
            label="held-out loss",
            title=link_name(link),
        )
    charts.save(figure, path)
