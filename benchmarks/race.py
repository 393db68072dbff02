"""`python -m benchmarks race`: seconds of fine-tuning until each boundary format has reached the same held-out loss.

A format can be fast and learn less from each step, or the reverse; AQ-SGD sends every sample at full precision at its
first visit and in few bits later. So formats are compared by the time to the same loss in fine-tuning, the regime of
both papers, where samples come again in every epoch.

All formats share starting weights, samples and their order, learning rate, stages and schedule, format of gradients,
link, and processes, in which they take turns. Only a format's own training steps count towards its time.
Held-out text is evaluated with full precision at the boundaries.
"""

import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lowbit_lab.bench.runs import (
    MANY_STAGES,
    PROGRAM,
    THIN_MODEL,
    check_recipes,
    check_samples,
    merged,
    order,
    reached,
    recipe,
)
from lowbit_lab.bench.settings import LINK, Device, Links, Names, check_constant, formats_of, link_name
from lowbit_lab.bench.workers import UNLIMITED, Workers, set_link, started
from lowbit_lab.charts import Lines
from lowbit_lab.charts.style import recommended, row_name
from lowbit_lab.network import Link, SlowLink
from lowbit_run.config import ConfigError, NonNegative, Positive, section
from lowbit_run.report import Baseline, Column, Command, Row, Table
from lowbit_run.train.config import AUTO, DataConfig, ModelConfig, OptimizerConfig, PipelineConfig


@section()
class RaceBenchmark:
    """A race between formats."""

    links: Links = (Link(100.0),)
    """Links to emulate: a rate, with a round trip if there is a distance, such as 25mbit, 100mbit/40ms or unlimited."""
    backward: str = ""
    """Format of gradients next to low-bit activations, unless `boundaries` names it. If omitted, the default of each
    format. fp32, bf16 and fp16 are used both ways."""
    pipeline: PipelineConfig = MANY_STAGES
    """Ranks, each on its own host, stages and schedule."""
    device: Device = "cpu"
    """cuda: ranks share the GPUs of the machine."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Data type of matrix products; weights stay in float32. auto: bf16 where the device supports it."""
    seed: NonNegative = 0
    """Seed of weights and data order."""
    boundaries: Names = ("fp32", "tah-quant", "tah-quant-published", "aq-sgd", "transform")
    """Formats of activations, by name or in full, or of both ways, such as "int4 / int6"."""
    model: ModelConfig = THIN_MODEL
    """Model to train."""
    data: DataConfig = DataConfig(batch=32, sequence=128)
    """Text to fine-tune on. If omitted, Python's language reference."""
    start_text: tuple[str, ...] = ()
    """Files or folders to train the starting weights on. If omitted, Python's standard library."""
    start_steps: Positive = 200
    """Steps at full precision that make the starting weights."""
    samples: Positive = 640
    """Distinct samples, a multiple of the batch."""
    epochs: Positive = 5
    """Visits of each sample."""
    lr: float = 2e-4
    """Highest learning rate of the fine-tuning."""
    evaluations: Positive = 2
    """Evaluations of the held-out loss in each epoch."""
    eval_batches: Positive = 8
    """Batches of held-out text in each evaluation."""

    def __post_init__(self) -> None:
        if AUTO in self.boundaries:  # it would choose for the link without a limit, over which runs are opened
            raise ConfigError(f"boundaries has {AUTO!r}; allowed: other formats, or `lowbit bench pipeline`")
        check_recipes(self, self.pipeline)
        check_samples(self)
        check_constant("links", self.links)
        if self.evaluations > self.samples // self.data.batch:
            raise ConfigError(
                f"evaluations is {self.evaluations}; "
                f"allowed: at most the steps of an epoch ({self.samples // self.data.batch})"
            )


def measure_race(settings: RaceBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Race on every link.

    Yields:
        Rows, one for each link and boundary: `boundary`, `forward`, `backward`, the fields of `set_link`,
        `target_loss` (the lowest held-out loss that all boundaries of the link have reached), `seconds_to_loss` (of
        training), `speedup_aq_sgd` and `speedup_fp32` (their seconds over these), `best_loss`, `seconds` and
        `tokens_per_second` (of all training), `bits_forward` and `bits_backward` (mean over the run), `megabytes`
        (sent by all ranks), `state_bytes` (kept between steps at the end, all ranks) and `curve` (pairs of seconds and
        held-out loss).

    Raises:
        LinkUnavailable: a limited link is asked for and this machine does not permit one.
        ChildProcessError: a rank failed.
    """
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        started(PROGRAM, settings.pipeline.ranks, settings.links) as (network, ranks),
    ):
        text = replace(settings.data, text=settings.start_text, held_out=())
        start = recipe(settings, "fp32", data=text, output=f"{folder}/start", steps=settings.start_steps)
        ranks.ask("train", **order(start, "fp32"))
        for place, link in enumerate(settings.links):
            about = set_link(network, link, ranks)
            with _not_timed(network):
                racers = [
                    Racer(settings, boundary, ranks, f"{folder}/{place}-{number}")
                    for number, boundary in enumerate(settings.boundaries)
                ]
            for racer in racers * (settings.epochs * settings.evaluations):
                racer.advance()
                with _not_timed(network):
                    racer.evaluate()
                yield [*rows, *rows_of(racers, about)]
            rows += rows_of(racers, about)


@contextmanager
def _not_timed(network: SlowLink | None) -> Iterator[None]:
    """Lift the link's limits during work that is not timed."""
    if network is None:
        yield
        return
    link = network.link
    network.set_link(UNLIMITED)
    yield
    network.set_link(link)


class Racer:
    """One boundary's run, with a curve of its held-out loss.

    Args:
        boundary: the format.
        ranks: where it runs. folder: what it writes to; next to it are the starting weights.
    """

    def __init__(self, settings: RaceBenchmark, boundary: str, ranks: Workers, folder: str) -> None:
        self.about = {"boundary": boundary, **formats_of(boundary, settings.backward)}
        steps, parts = settings.samples // settings.data.batch, settings.evaluations
        self._turns = [steps * (i + 1) // parts - steps * i // parts for i in range(parts)]
        self.state_bytes = 0
        self.steps: list[dict[str, Any]] = []
        self.curve: list[tuple[float, float]] = []
        self._name, self._ranks = folder, ranks
        data, steps = settings.data, settings.epochs * steps
        if not (data.text or data.dataset):
            data = replace(data, text=(str(Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py")),))
        config = recipe(
            settings, boundary, model=ModelConfig(pretrained=str(Path(folder).with_name("start") / "model")), data=data,
            optimizer=OptimizerConfig(lr=settings.lr, lr_warmup_steps=min(10, steps)),
            output=folder, steps=steps, eval_batches=settings.eval_batches,
        )  # fmt: skip
        ranks.ask("open", name=folder, **order(config, boundary), samples=settings.samples)
        self.evaluate()

    def advance(self) -> None:
        """Train until the next evaluation is due."""
        count = self._turns[(len(self.curve) - 1) % len(self._turns)]
        self.steps += merged(self._ranks.ask("steps", name=self._name, count=count))
        self.state_bytes = sum(self._ranks.ask("state_bytes", name=self._name))

    def evaluate(self) -> None:
        """Add a point to the curve."""
        loss = self._ranks.ask("held_out_loss", name=self._name)[0]
        self.curve.append((sum(step["seconds"] for step in self.steps), loss))


def rows_of(racers: Sequence[Racer], link: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows of one link, with the time at which each reached the lowest loss that all have reached."""
    rows = []
    for racer in racers:
        if steps := racer.steps:
            seconds = racer.curve[-1][0]
            rows.append(
                {
                    **racer.about,
                    **link,
                    "best_loss": min(loss for _, loss in racer.curve),
                    "seconds": seconds,
                    "tokens_per_second": sum(s["tokens_per_second"] * s["seconds"] for s in steps) / seconds,
                    **{name: statistics.fmean(s[name] for s in steps) for name in ("bits_forward", "bits_backward")},
                    "megabytes": sum(s["bytes_sent"] for s in steps) / 1e6,
                    "state_bytes": racer.state_bytes,
                    "curve": list(racer.curve),
                }
            )
    return reached(rows) if rows else []


def _end(row: Row) -> str:
    return f"{row['seconds_to_loss'] / 60:.1f} minutes\n{row['tokens_per_second']:,.0f} tokens/s"


def _finding(rows: Sequence[Row]) -> str:
    """State how much sooner than FP32 the recommended format reaches the common loss, on the first link with both."""
    best = recommended([row for row in rows if row.get("speedup_fp32")], "boundary")
    if best is None:
        return "Held-out loss by seconds of training"
    ours, base = best["seconds_to_loss"] / 60, best["seconds_to_loss"] * best["speedup_fp32"] / 60
    return f"Over {link_name(best)}: loss {best['target_loss']:.2f} after {ours:.1f} minutes, FP32 after {base:.1f}"


COMMAND = Command(
    name="benchmarks race",
    summary="Seconds of training until each boundary format has reached the same held-out loss.",
    examples=(
        "python -m benchmarks race --boundary fp32,aq-sgd,transform --epochs 3",
    ),
    settings=RaceBenchmark,
    measure=measure_race,
    baselines=[
        Baseline(
            field=f"speedup_{name.replace('-', '_')}", value="seconds_to_loss", to={"boundary": name}, alike=("link",),
            way="under",
        )
        for name in ("fp32", "aq-sgd")
    ],
    tables=[
        Table(
            title="Seconds of training until the same held-out loss",
            columns=[
                LINK,
                Column("boundary", "boundary", row_name),
                Column("loss", "target_loss", "{:.4f}"),
                Column("reached\nafter s", "seconds_to_loss", "{:.1f}"),
                Column("over\nfp32", "speedup_fp32", "{:.2f}x"),
                Column("over\naq-sgd", "speedup_aq_sgd", "{:.2f}x"),
                Column("best\nloss", "best_loss", "{:.4f}"),
                Column("whole\nrun s", "seconds", "{:.1f}"),
                Column("bits\nfwd", "bits_forward", "{:.2f}"),
                Column("bits\nbwd", "bits_backward", "{:.2f}"),
                Column("MB\nsent", "megabytes", "{:.1f}"),
                Column("state\nMB", lambda row: row["state_bytes"] / 1e6, "{:.1f}"),
            ],
        )
    ],
    charts=[
        Lines(
            title=_finding, panel=link_name, series="boundary", x_label="minutes of training",
            curve=lambda row: [(seconds / 60, loss) for seconds, loss in row["curve"]],
            mark=lambda row: (row["seconds_to_loss"] / 60, row["target_loss"]),
            label="held-out loss, nats per token", note=_end, height=3.6,
            subtitle="Same model, data and steps on two ranks; only the format differs. "
            "Discs: the loss that all reach.",
        )
    ],
)  # fmt: skip
