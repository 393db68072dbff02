"""`lowbit demo`: a small Llama learns Python over a 100 Mbit/s link, with FP32 boundaries and with TAH-Quant.

Two ranks, each on a host of its own (network namespaces, see `lowbit.network`), run `lowbit train`'s recipe: first with
PyTorch's pipeline stage in FP32, then with `LowBitStage`. Both get about the same time; their losses are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lowbit.bench.pipeline import PipelineBenchmark
from lowbit.bench.progress import step_bars
from lowbit.bench.recipes import PROGRAM, as_mapping
from lowbit.bench.recipes import recipe as recipe_of
from lowbit.bench.settings import link_name
from lowbit.bench.workers import UNLIMITED, set_link, started
from lowbit.network import Link, LinkUnavailable, SlowLink
from lowbit.report import Baseline, Column, Lines, Report, Row, Table, compare, machine
from lowbit.report.charts import draw
from lowbit.train import ConfigError, TrainConfig, prepare
from lowbit.train.config import OptimizerConfig
from lowbit.train.export import generate
from lowbit.train.folder import RunFolder
from lowbit.train.metrics import read_metrics
from lowbit.train.summary import read_summary

LINK = Link(100.0)
SETTINGS = PipelineBenchmark()
FILES = ("report.json", "demo.png")
_SMOOTHED_STEPS = 8


@dataclass(frozen=True)
class Contestant:
    """One of the runs: its name in files, its name on the screen, its boundary and its number of steps."""

    name: str
    title: str
    boundary: str
    steps: int


# At 100 Mbit/s both take about as long: one FP32 step of this model is two seconds of network.
CONTESTANTS = (
    Contestant("fp32", "FP32, stock", "stock-fp32", 45),
    Contestant("tah-quant", "TAH-Quant", "tah-quant", 180),
)
BASELINE = Baseline(field="speedup_fp32", value="tokens_per_second", to={"boundary": "fp32"})
TABLE = Table(
    title="The same time, side by side",
    columns=[
        Column("boundaries", "title"),
        Column("tokens/s", "tokens_per_second", "{:,.0f}"),
        Column("over\nfp32", "speedup_fp32", "{:.2f}x"),
        Column("bits\nfwd/bwd", lambda row: f"{row['bits_forward']:.3g}/{row['bits_backward']:.3g}"),
        Column("MB a\nstep", lambda row: row["bytes_per_step"] / 1e6, "{:.1f}"),
        Column("steps", "steps"),
        Column("seconds", "seconds", "{:.0f}"),
        Column("loss", "loss", "{:.3f}"),
        Column("same\nloss at", "seconds_to_loss", "{:.0f} s"),
    ],
)


def sooner(rows: Sequence[Row]) -> str:
    """How much sooner the last run reaches the loss that all reach than the first, for a title."""
    first, last = rows[0], rows[-1]
    return (
        f"{last['title']} needs {last['seconds_to_loss']:.0f} s for the loss that {first['title']} reaches in "
        f"{first['seconds_to_loss']:.0f} s, link: {link_name(last)}"
    )


CHARTS = (
    Lines(
        title=sooner, subtitle="A small Llama learns Python; every run takes about the same time.", series="title",
        curve="curve", x_label="seconds of training", label="training loss, nats per token",
        note=lambda row: f"{row['tokens_per_second']:,.0f} tokens/s",
    ),
)  # fmt: skip


def run(output: Path = Path("runs/demo"), *, console: Console | None = None) -> Report:
    """Train both, show both, and write `report.json`, `demo.png` and the runs' own folders to `output`.

    Returns:
        A report with a row for each run: `boundary`, the fields of `set_link`, `steps`, `seconds` (of training),
        `tokens_per_second`, `speedup_fp32`, `bits_forward`, `bits_backward`, `bytes_per_step`, `loss` (training, last
        steps), `held_out_loss`, `seconds_to_loss` (until the training loss that both reached) and `curve`.

    Raises:
        TorchVersionError: this PyTorch is not known to work.
        ConfigError, OSError: the folder cannot be written to.
        ChildProcessError: a rank failed.
    """
    console = console or Console()
    check_output(output)
    link = choose_link(console)
    rows = []
    steps = {contestant.title: contestant.steps for contestant in CONTESTANTS}
    with started(PROGRAM, SETTINGS.pipeline.ranks, [link]) as (network, ranks), step_bars(steps, console) as advance:
        about = set_link(network, link)
        for contestant in CONTESTANTS:

            def show_step(metrics: Mapping[str, Any], title: str = contestant.title) -> None:
                bits = f"{metrics['bits_forward'] or 0:.1f}/{metrics['bits_backward'] or 0:.1f} bits"
                advance(title, f"loss {metrics['loss']:.3f}  {metrics['tokens_per_second']:,.0f} tokens/s  {bits}")

            config = recipe(contestant, output / contestant.name)
            ranks.ask("train", config=as_mapping(config), on_progress=show_step)
            rows.append({**about, **outcome(contestant, output)})
    RunFolder(output).note(*FILES)
    rows = reached(compare(rows, [BASELINE]))
    report = Report(command="demo", settings={"link": str(link)}, machine=machine(), rows=rows)
    report.write_json(output / "report.json")
    draw(CHARTS, rows, output / "demo.png")
    console.print(TABLE.render(rows))
    last = CONTESTANTS[-1]
    model = output / last.name / "model"
    console.print(f"\n{last.title} after {last.steps} steps writes:")
    console.print(generate(model, "def ", tokens=100), markup=False, highlight=False, style="cyan")
    console.print(f"\nPicture: {output / 'demo.png'}\nModel: {model}", highlight=False)
    return report


def choose_link(console: Console) -> Link:
    """Return the slow link, or an unlimited one, and say why, where this machine does not permit a slow one."""
    if reason := SlowLink.available():
        console.print(
            f"{LinkUnavailable.__name__}: {reason}\nGoing on without a limit: both runs use this machine's loopback, "
            "where few bits gain nothing.",
            highlight=False,
        )
        return UNLIMITED
    console.print(f"Two hosts on this machine, joined by {LINK.title}.", highlight=False)
    return LINK


def check_output(output: Path) -> None:
    """Check before anything starts that no file of somebody else would be replaced.

    Raises:
        ConfigError: a file that is to be written exists, and is not lowbit's.
    """
    if foreign := RunFolder(output).foreign(FILES):
        raise ConfigError(
            f"{output} holds {', '.join(foreign)}, which lowbit has no record of making; nothing was touched; "
            "allowed: another folder, or to move these away"
        )
    for contestant in CONTESTANTS:
        prepare.check_output(recipe(contestant, output / contestant.name))


def recipe(contestant: Contestant, output: Path) -> TrainConfig:
    """The training run of a contestant: the model and the pipeline of `lowbit bench pipeline`.

    The learning rate stays constant after its rise, so that runs of different length can be compared all the way.
    """
    return recipe_of(
        SETTINGS, contestant.boundary, optimizer=OptimizerConfig(lr=2e-3, lr_end=1.0, lr_warmup_steps=10),
        output=str(output), overwrite=True, steps=contestant.steps, eval_batches=4,
    )  # fmt: skip


def outcome(contestant: Contestant, output: Path) -> dict[str, Any]:
    """The row of a run, from the files that it wrote."""
    summary = read_summary(output / contestant.name / "summary.json")
    metrics = read_metrics(output / contestant.name / "metrics.jsonl")
    names = "steps tokens_per_second bits_forward bits_backward bytes_per_step loss held_out_loss"
    return {
        "boundary": contestant.name,
        "title": contestant.title,
        **{name: getattr(summary, name) for name in names.split()},
        "seconds": sum(step["seconds"] for step in metrics),
        "curve": curve(metrics),
    }


def curve(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Points of (seconds of training, mean training loss of the last steps)."""
    points, seconds = [], 0.0
    for i, step in enumerate(metrics):
        seconds += step["seconds"]
        recent = [m["loss"] for m in metrics[max(0, i + 1 - _SMOOTHED_STEPS) : i + 1]]
        points.append((seconds, sum(recent) / len(recent)))
    return points


def reached(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Add to rows `target_loss`, the lowest loss that all curves have reached, and `seconds_to_loss`."""
    target = max(min(loss for _, loss in row["curve"]) for row in rows)
    return [{**row, "target_loss": target, "seconds_to_loss": seconds_until(row["curve"], target)} for row in rows]


def seconds_until(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """When a curve of (seconds, loss) first reaches the target, by straight lines between its points."""
    before = curve[0]
    for seconds, loss in curve:
        if loss <= target:
            share = (before[1] - target) / (before[1] - loss) if before[1] > loss else 1.0
            return before[0] + share * (seconds - before[0])
        before = (seconds, loss)
    return None
