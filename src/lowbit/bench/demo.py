"""`lowbit demo`: a small Llama learns Python over a 100 Mbit/s link, with FP32 boundaries and with TAH-Quant.

Two ranks, each on a host of its own (network namespaces, see `lowbit.network`), run `lowbit train`'s own recipe: first
with PyTorch's pipeline stage in FP32, then with `LowBitStage`. Both get about the same time; what is compared is the
loss that each reaches in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.bench.pipeline import PipelineBenchmark
from lowbit.bench.progress import step_bars
from lowbit.bench.recipes import PROGRAM, as_mapping
from lowbit.bench.recipes import recipe as recipe_of
from lowbit.bench.settings import link_name
from lowbit.bench.workers import UNLIMITED, set_link, started
from lowbit.network import Link, LinkUnavailable, SlowLink
from lowbit.report import Bars, Baseline, Column, Lines, Report, Row, Table, compare, machine
from lowbit.report.charts import draw
from lowbit.train import ConfigError, TrainConfig, prepare
from lowbit.train.config import OptimizerConfig
from lowbit.train.export import generate
from lowbit.train.folder import RunFolder
from lowbit.train.metrics import read_metrics
from lowbit.train.summary import read_summary

if TYPE_CHECKING:
    from rich.console import Console

LINK = Link(100.0)
PROMPT = "def "
SETTINGS = PipelineBenchmark()
FILES = ("report.json", "demo.png")
_SMOOTHED_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One of the runs: its name in files and on the screen, what its boundaries are, and how long it trains."""

    name: str
    title: str
    boundary: str
    steps: int


# At 100 Mbit/s both take about as long: one FP32 step of this model is two seconds of network.
CONTESTANTS = (
    Contestant(name="fp32", title="FP32, stock", boundary="stock-fp32", steps=45),
    Contestant(name="tah-quant", title="TAH-Quant", boundary="tah-quant", steps=180),
)
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
CHARTS = (
    Lines(
        title=lambda rows: f"A small Llama learns Python, link: {link_name(rows[0])}", series="title", curve="curve",
        x_label="seconds of training", label="training loss, nats a token", width=5.5,
    ),
    Bars(title="Training speed", group=link_name, series="title", y="tokens_per_second", label="tokens/s", width=5.5),
)  # fmt: skip


def run(output: Path = Path("runs/demo"), *, console: Console | None = None) -> Report:
    """Train both, show both, and write `report.json`, `demo.png` and the runs' own folders to `output`.

    Returns:
        A report with a row for each run: `boundary`, what `set_link` says of the link, `steps`, `seconds` (of
        training), `tokens_per_second`, `speedup_fp32`, `bits_forward`, `bits_backward`, `bytes_per_step`, `loss`
        (training, last steps), `held_out_loss`, `seconds_to_loss` (until the training loss that both reached) and
        `curve`.

    Raises:
        TorchVersionError: this PyTorch is not known to work.
        ConfigError, OSError: the folder cannot be written to.
        ChildProcessError: a rank failed.
    """
    from rich.console import Console

    console = console or Console()
    check_output(output)
    link = choose_link(console)
    rows = []
    steps = {contestant.title: contestant.steps for contestant in CONTESTANTS}
    with started(PROGRAM, SETTINGS.pipeline.ranks, [link]) as (network, ranks), step_bars(steps, console) as step:
        about = set_link(network, link)
        for contestant in CONTESTANTS:
            config = as_mapping(recipe(contestant, output / contestant.name))
            tell = partial(_tell, step, contestant.title)
            ranks.ask("train", config=config, on_progress=tell)
            rows.append({**about, **outcome(contestant, output)})
    baseline = Baseline(field="speedup_fp32", value="tokens_per_second", to={"boundary": CONTESTANTS[0].name})
    rows = reached(compare(rows, [baseline]))
    RunFolder(output).note(*FILES)
    report = Report(command="demo", settings={"link": str(link)}, machine=machine(), rows=rows)
    report.write_json(output / "report.json")
    draw(CHARTS, report.rows, output / "demo.png")
    console.print(TABLE.render(report.rows))
    _print_outputs(console, output)
    return report


def choose_link(console: Console) -> Link:
    """The slow link; where this machine does not permit one, none, and a word about it."""
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
    """Check, before anything starts, that nothing is in the way that lowbit did not make.

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
    """The training run of a contestant: the model and the pipeline that `lowbit bench pipeline` measures.

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
    """Training loss, a mean over the last steps each time, against the seconds of training."""
    points, seconds = [], 0.0
    for i, step in enumerate(metrics):
        seconds += step["seconds"]
        recent = [m["loss"] for m in metrics[max(0, i + 1 - _SMOOTHED_STEPS) : i + 1]]
        points.append((seconds, sum(recent) / len(recent)))
    return points


def reached(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with `target_loss`, the lowest loss of a curve that all have reached, and `seconds_to_loss`, when."""
    target = max(min(loss for _, loss in row["curve"]) for row in rows)
    return [{**row, "target_loss": target, "seconds_to_loss": seconds_until(row["curve"], target)} for row in rows]


def seconds_until(curve: Sequence[tuple[float, float]], target: float) -> float | None:
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


def _tell(step: Callable[[str, str], None], title: str, metrics: Mapping[str, Any]) -> None:
    bits = f"{metrics['bits_forward'] or 0:.1f}/{metrics['bits_backward'] or 0:.1f} bits"
    step(title, f"loss {metrics['loss']:.3f}  {metrics['tokens_per_second']:,.0f} tokens/s  {bits}")


def _print_outputs(console: Console, output: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = output / CONTESTANTS[-1].name / "model"
    text = generate(model, PROMPT, tokens=100)
    console.print(f"\n{CONTESTANTS[-1].title} after {CONTESTANTS[-1].steps} steps writes:")
    console.print(text, markup=False, highlight=False, style="cyan")
    console.print(f"\nPicture: {output / 'demo.png'}\nModel: {model}", highlight=False)
