"""`lowbit demo`: a small Llama learns Python over a 100 Mbit/s link, with FP32 boundaries and with TAH-Quant.

Two ranks, each on a host of its own (network namespaces, see `lowbit.network`), run `lowbit train`'s own recipe: first
with PyTorch's pipeline stage in FP32, then with `LowBitStage`. Both get about the same time; what is compared is how
far each comes in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.bench import charts
from lowbit.bench.launch import UNLIMITED, Ranks
from lowbit.bench.pipeline import Settings
from lowbit.bench.pipeline import recipe as pipeline_recipe
from lowbit.bench.race import seconds_until
from lowbit.bench.report import Column, Report, machine, table
from lowbit.bench.speeds import link_name
from lowbit.network import Link, LinkUnavailable, SlowLink
from lowbit.ranks.pytorch import check_torch
from lowbit.train import prepare
from lowbit.train.config import TrainConfig
from lowbit.train.config_file import from_mapping
from lowbit.train.folder import RunFolder
from lowbit.train.generate import generate
from lowbit.train.metrics import StepMetrics, read_metrics
from lowbit.train.section import ConfigError
from lowbit.train.summary import read_summary

if TYPE_CHECKING:
    from rich.console import Console

LINK = Link(100.0)
PROMPT = "def "
SETTINGS = Settings()
FILES = ("report.json", "demo.png")
_SMOOTHED_STEPS = 8
_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One of the runs: its name on the screen and in files, what its boundaries are, and how long it trains."""

    name: str
    title: str
    boundary: str
    steps: int


# At 100 Mbit/s both take about as long: one FP32 step of this model is two seconds of network.
CONTESTANTS = (
    Contestant(name="fp32", title="FP32, stock", boundary="stock-fp32", steps=45),
    Contestant(name="tah-quant", title="TAH-Quant", boundary="tah-quant", steps=180),
)

OnMetrics = Callable[[StepMetrics], None]


def run(output: Path = Path("runs/demo"), *, console: Console | None = None) -> Report:
    """Train both, show both, and write `report.json`, `demo.png` and the runs' own folders to `output`.

    Returns:
        A report with a row for each run: `boundary`, `link` (its text), `link_mbit` (None: unlimited), `link_rtt_ms`,
        `steps`, `seconds` (of training), `tokens_per_second`, `speedup_fp32`, `bits_forward`, `bits_backward`,
        `bytes_per_step`, `loss` (training, last steps), `held_out_loss`, `seconds_to_loss` (until the training loss
        that both reached) and `curve`.

    Raises:
        TorchVersionError: this PyTorch is not known to work.
        ConfigError, OSError: the folder cannot be written to.
        ChildProcessError: a rank failed.
    """
    from rich.console import Console

    console = console or Console()
    check_torch()
    check_output(output)
    rows = []
    with open_link(console) as network:
        link = network.link if network else UNLIMITED
        about = {"link": str(link), "link_mbit": link.rate_mbit, "link_rtt_ms": link.rtt_ms}
        with _progress(console) as show:
            for contestant in CONTESTANTS:
                config = recipe(contestant, output / contestant.name)
                train(network, config, lambda metrics, c=contestant: show(c, metrics))
                rows.append({**about, **outcome(contestant, output)})
    _compare(rows)
    RunFolder(output).note(*FILES)
    report = Report(command="demo", settings=about, machine=machine(), rows=rows)
    report.write_json(output / "report.json")
    draw(report, output / "demo.png")
    console.print(table([_shown(row) for row in rows], COLUMNS, title="The same time, side by side"))
    _say_what_it_wrote(console, output)
    return report


def check_output(output: Path) -> None:
    """Check, before anything starts, that nothing is in the way that lowbit did not make.

    Raises:
        ConfigError: a file that is to be written is there, and is not lowbit's.
    """
    if foreign := RunFolder(output).foreign(FILES):
        raise ConfigError(
            f"{output} holds {', '.join(foreign)}, which lowbit has no record of making; nothing was touched; "
            "allowed: another folder, or to move these away"
        )
    for contestant in CONTESTANTS:
        prepare.check_output(recipe(contestant, output / contestant.name))


def recipe(contestant: Contestant, output: Path) -> TrainConfig:
    """The training run of a contestant: the model and the pipeline that `lowbit bench pipeline` measures.

    The learning rate stays constant after its rise, so that runs of different length can be compared all the way.
    """
    return from_mapping(
        pipeline_recipe(
            SETTINGS,
            contestant.boundary,
            optimizer={"lr": 2e-3, "lr_end": 1.0, "lr_warmup_steps": 10},
            run={
                "output": str(output),
                "overwrite": True,
                "steps": contestant.steps,
                "eval_batches": 4,
            },
        )
    )


def train(network: SlowLink | None, config: TrainConfig, on_metrics: OnMetrics) -> None:
    """Run `lowbit train` on the hosts of a link (on this machine without one) and follow its metrics.

    Raises:
        ChildProcessError: a rank failed; the message has its last words.
    """
    file, seen = Path(config.run.output) / "metrics.jsonl", 0
    RunFolder(file.parent).clear()  # so that nothing is taken for this run's that is an older one's
    with Ranks(network, config.pipeline.ranks, "lowbit.train.worker") as ranks:
        ranks.tell(json.dumps(json.loads(config.to_json())))
        ended = False
        while not ended:
            ended = ranks.ended()
            for metrics in read_metrics(file)[seen:]:
                on_metrics(StepMetrics(**metrics))
                seen += 1
            time.sleep(_POLL_SECONDS)


def outcome(contestant: Contestant, output: Path) -> dict[str, Any]:
    """What a run came to, from the files that it wrote."""
    summary = read_summary(output / contestant.name / "summary.json")
    metrics = read_metrics(output / contestant.name / "metrics.jsonl")
    names = ("steps", "tokens_per_second", "bits_forward", "bits_backward", "bytes_per_step")
    return {
        "boundary": contestant.name,
        "title": contestant.title,
        **{name: getattr(summary, name) for name in names},
        "seconds": sum(step["seconds"] for step in metrics),
        "loss": summary.loss,
        "held_out_loss": summary.held_out_loss,
        "curve": curve(metrics),
    }


def curve(metrics: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Training loss, a mean over the last steps each time, against the seconds of training."""
    points, seconds = [], 0.0
    for i, step in enumerate(metrics):
        seconds += step["seconds"]
        recent = [m["loss"] for m in metrics[max(0, i + 1 - _SMOOTHED_STEPS) : i + 1]]
        points.append((seconds, sum(recent) / len(recent)))
    return points


def draw(report: Report, path: Path) -> None:
    """Loss against wall-clock, and tokens per second."""
    figure = charts.new_figure(panels=2, width=5.5)
    left, right = figure.axes
    curves = {row["title"]: row["curve"] for row in report.rows}
    link = link_name(report.rows[0]["link"])
    title = f"A small Llama learns Python, link: {link}"
    charts.lines(left, curves, x_label="seconds of training", label="training loss", title=title)
    speeds = {row["title"]: [row["tokens_per_second"]] for row in report.rows}
    charts.bars(right, [link], speeds, label="tokens/s", title="Training speed")
    charts.save(figure, path)


COLUMNS = (
    Column(title="boundaries", field="title"),
    Column(title="tokens/s", field="tokens_per_second", show="{:,.0f}".format),
    Column(title="over\nfp32", field="speedup_fp32", show="{:.2f}x".format),
    Column(title="bits\nfwd/bwd", field="bits"),
    Column(title="MB a\nstep", field="megabytes", show="{:.1f}".format),
    Column(title="steps", field="steps"),
    Column(title="seconds", field="seconds", show="{:.0f}".format),
    Column(title="loss", field="loss", show="{:.3f}".format),
    Column(title="same\nloss at", field="seconds_to_loss", show="{:.0f} s".format),
)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    bits = f"{row['bits_forward']:.3g}/{row['bits_backward']:.3g}"
    return {**row, "megabytes": row["bytes_per_step"] / 1e6, "bits": bits}


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add what follows from both runs together."""
    target = max(min(loss for _, loss in row["curve"]) for row in rows)
    for row in rows:
        row["speedup_fp32"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        row["seconds_to_loss"] = seconds_until(row["curve"], target)


def _told(metrics: StepMetrics) -> str:
    """A step in half a line."""
    bits = f"{metrics.bits_forward or 0:.1f}/{metrics.bits_backward or 0:.1f} bits"
    return f"loss {metrics.loss:.3f}  {metrics.tokens_per_second:,.0f} tokens/s  {bits}"


def _say_what_it_wrote(console: Console, output: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = output / CONTESTANTS[-1].name / "model"
    text = generate(model, PROMPT, tokens=100)
    console.print(f"\n{CONTESTANTS[-1].title} after {CONTESTANTS[-1].steps} steps writes:")
    console.print(text, markup=False, highlight=False, style="cyan")
    console.print(f"\nPicture: {output / 'demo.png'}\nModel: {model}", highlight=False)


@contextmanager
def open_link(console: Console) -> Iterator[SlowLink | None]:
    """The slow link; where this machine does not permit one, none, and a word about it."""
    reason = SlowLink.available()
    if reason:
        console.print(
            f"{LinkUnavailable.__name__}: {reason}\nGoing on without a limit: both runs use this machine's loopback, "
            "where few bits gain nothing.",
            highlight=False,
        )
        yield None
    else:
        console.print(f"Two hosts on this machine, joined by {LINK.title}.", highlight=False)
        with SlowLink(hosts=2, rate_mbit=LINK.rate_mbit) as network:
            yield network


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[Contestant, StepMetrics], None]]:
    """A bar for each run; gives a function that moves them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[title]}"), BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        tasks = {c.name: bars.add_task("", total=c.steps, title=c.title, start=False) for c in CONTESTANTS}

        def show(contestant: Contestant, metrics: StepMetrics) -> None:
            task = tasks[contestant.name]
            if metrics.step == 0:
                bars.start_task(task)
            bars.update(task, completed=metrics.step + 1, description=_told(metrics))
            if metrics.step + 1 == contestant.steps:
                bars.stop_task(task)

        yield show
