"""`lowbit demo`: a small Llama learns Python over a 100 Mbit/s link, with PyTorch's pipeline stage and with lowbit's.

Two ranks, each on its own host (network namespaces, see `lowbit_lab.network`), run `lowbit train`'s recipe three
times for about the same time: with PyTorch's stage in FP32; with `LowBitStage` in FP32, which shows what its overlap
gains; and with `LowBitStage` and `TransformQuant`, which shows what few bits gain.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lowbit import terminal
from lowbit.report import Baseline, Column, Report, Row, Table, compare, machine
from lowbit.train import ConfigError, TrainConfig, prepare
from lowbit.train.config import OptimizerConfig
from lowbit.train.export import generate
from lowbit.train.folder import RunFolder
from lowbit.train.metrics import read_metrics
from lowbit.train.summary import read_summary
from lowbit_lab.bench.curves import curve, reached
from lowbit_lab.bench.pipeline import PipelineBenchmark
from lowbit_lab.bench.progress import step_bars
from lowbit_lab.bench.recipes import PROGRAM, as_mapping
from lowbit_lab.bench.recipes import recipe as recipe_of
from lowbit_lab.bench.settings import link_name
from lowbit_lab.bench.workers import UNLIMITED, set_link, started
from lowbit_lab.charts import Lines
from lowbit_lab.charts.charts import draw
from lowbit_lab.network import Link, LinkUnavailable, SlowLink

LINK = Link(100.0)
SETTINGS = PipelineBenchmark()
FILES = ("report.json", "demo.png")


@dataclass(frozen=True)
class Contestant:
    """A run of the demo: its boundary, its name on the screen and its number of steps."""

    boundary: str
    title: str
    steps: int


# The numbers of steps make all runs take about the same time at 100 Mbit/s.
CONTESTANTS = (
    Contestant("stock-fp32", "PyTorch's stage, FP32", 22),
    Contestant("fp32", "lowbit's stage, FP32", 32),
    Contestant("transform", "lowbit's stage, TransformQuant", 76),
)
BASELINE = Baseline(field="speedup_stock_fp32", value="tokens_per_second", to={"boundary": "stock-fp32"})
TABLE = Table(
    title="The same time, side by side",
    columns=[
        Column("run", "title"),
        Column("tokens/s", "tokens_per_second", "{:,.0f}"),
        Column("speed", "speedup_stock_fp32", "{:.2f}x"),
        Column("bits\nfwd/bwd", lambda row: f"{row['bits_forward']:.2g}/{row['bits_backward']:.2g}"),
        Column("steps", "steps"),
        Column("time", "seconds", "{:.0f} s"),
        Column("held-out\nloss", "held_out_loss", "{:.3f}"),
    ],
)


def sooner(rows: Sequence[Row]) -> str:
    """Make a title: how much sooner than the first run the last one reaches the loss that all reach."""
    first, last = rows[0], rows[-1]
    return (
        f"Loss {last['target_loss']:.2f} after {last['seconds_to_loss']:.0f} s instead of "
        f"{first['seconds_to_loss']:.0f} s (link: {link_name(last)})"
    )


CHARTS = (
    Lines(
        title=sooner, subtitle="A small Llama learns Python; every run takes about the same time.", series="title",
        curve="curve", x_label="seconds of training", label="training loss, nats per token",
        note=lambda row: f"{row['tokens_per_second']:,.0f} tokens/s",
    ),
)  # fmt: skip


def run(output: Path = Path("runs/demo"), *, console: Console | None = None) -> Report:
    """Train all, compare them, and write `report.json`, `demo.png` and the runs' own folders to `output`.

    Returns:
        A report with a row for each run: `boundary`, the fields of `set_link`, `steps`, `seconds` (of training),
        `tokens_per_second`, `speedup_stock_fp32`, `bits_forward`, `bits_backward`, `bytes_per_step`, `loss` (training,
        last steps), `held_out_loss`, `seconds_to_loss` (to the training loss that all reach) and `curve`.
    """
    console = console or terminal.console()
    check_output(output)
    link = choose_link(console)
    rows = []
    steps = {contestant.title: contestant.steps for contestant in CONTESTANTS}
    with started(PROGRAM, SETTINGS.pipeline.ranks, [link]) as (network, ranks), step_bars(steps, console) as advance:
        about = set_link(network, link, ranks)
        for contestant in CONTESTANTS:

            def show_step(metrics: Mapping[str, Any], title: str = contestant.title) -> None:
                advance(title, f"loss {metrics['loss']:.2f}, {metrics['tokens_per_second']:,.0f} tok/s")

            config = recipe(contestant, output)
            ranks.ask("train", config=as_mapping(config), on_progress=show_step)
            rows.append({**about, **outcome(contestant, output)})
    RunFolder(output).note(*FILES)
    rows = reached(compare(rows, [BASELINE]))
    report = Report(command="demo", settings={"link": str(link)}, machine=machine(), rows=rows)
    report.write_json(output / "report.json")
    draw(CHARTS, rows, output / "demo.png")
    console.print(TABLE.render(rows))
    console.print(*findings(rows), sep="\n", highlight=False)
    last = CONTESTANTS[-1]
    model = output / last.boundary / "model"
    console.print(f"\n{last.title} after {last.steps} steps writes:")
    console.print(generate(model, "def ", tokens=100), markup=False, highlight=False, style="cyan")
    console.print(f"\nPicture: {output / 'demo.png'}\nModel: {model}", highlight=False)
    return report


def choose_link(console: Console) -> Link:
    """Return the slow link; if this machine does not permit one, print the reason and return an unlimited one."""
    if reason := SlowLink.available():
        console.print(
            f"{LinkUnavailable.__name__}: {reason}\nContinuing without a limit: all runs use this machine's loopback, "
            "where few bits gain nothing.",
            highlight=False,
        )
        return UNLIMITED
    console.print(f"Two hosts on this machine, joined by {LINK.title}.", highlight=False)
    return LINK


def check_output(output: Path) -> None:
    """Check before anything starts that the chart can be drawn, and that no foreign file would be replaced."""
    importlib.import_module("matplotlib")
    if foreign := RunFolder(output).foreign(FILES):
        raise ConfigError(
            f"{output} contains {', '.join(foreign)}, which lowbit has no record of making; nothing was changed; "
            "allowed: another folder, or moving these away"
        )
    for contestant in CONTESTANTS:
        prepare.check_output(recipe(contestant, output))


def recipe(contestant: Contestant, output: Path) -> TrainConfig:
    """Return the training run of a contestant: model and pipeline of `lowbit bench pipeline`, without a warm-up.

    The learning rate stays constant after its rise, so that runs of different lengths can be compared throughout. The
    text is no longer than the steps need.
    """
    return recipe_of(
        SETTINGS, contestant.boundary, data=replace(SETTINGS.data, max_bytes=2_000_000, held_out_share=0.02),
        optimizer=OptimizerConfig(lr=2e-3, lr_end=1.0, lr_warmup_steps=10),
        output=str(output / contestant.boundary), overwrite=True, steps=contestant.steps, eval_batches=4,
    )  # fmt: skip


def outcome(contestant: Contestant, output: Path) -> dict[str, Any]:
    """Return the row of a run, from the files that it wrote."""
    folder = output / contestant.boundary
    summary, metrics = read_summary(folder / "summary.json"), read_metrics(folder / "metrics.jsonl")
    names = "steps tokens_per_second bits_forward bits_backward bytes_per_step loss held_out_loss"
    row = {"boundary": contestant.boundary, "title": contestant.title}
    row |= {name: getattr(summary, name) for name in names.split()}
    return row | {"seconds": sum(step["seconds"] for step in metrics), "curve": curve(metrics)}


def findings(rows: Sequence[Row]) -> list[str]:
    """Describe what lowbit's stage gains, what few bits gain, and what they cost."""
    stock, full, few = rows
    stage, both = full["speedup_stock_fp32"], few["speedup_stock_fp32"]
    steps = min(row["steps"] for row in rows)
    seconds = [f"{row['seconds_to_loss']:.0f} s" for row in rows]
    early = [row["curve"][steps - 1][1] for row in rows]
    return [
        f"The stage: lowbit's sends the same tensors while it computes. It is {stage:.2f} times as fast as PyTorch's.",
        f"The bits: {few['bits_forward']:.1f} forward and {few['bits_backward']:.1f} backward instead of 32 make it "
        f"another {both / stage:.2f} times as fast, {both:.2f} times in all.",
        f"Training loss reaches {stock['target_loss']:.2f} after {seconds[0]} with PyTorch's stage, {seconds[1]} with "
        f"lowbit's in FP32 and {seconds[2]} with TransformQuant.",
        f"Step for step: after {steps} steps, training loss is {early[0]:.3f}, {early[1]:.3f} and {early[2]:.3f}.",
        "No run has a warm-up. `lowbit train` from scratch has one, because few bits cost most in the first steps.",
    ]
