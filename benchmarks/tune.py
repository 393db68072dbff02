"""`python -m benchmarks tune`: LoRA on questions and answers over a slow link, with each boundary format.

The model answers held-out questions before and after. All formats share starting weights, samples and their order,
learning rate, schedule, link, and processes, in which they take turns. The questions are lines of Python's standard
library; the answer is the kind of the statement, such as "assign".
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.tune_task import write_questions
from lowbit.config import NonNegative, Positive, section
from lowbit.report import Baseline, Column, Command, Row, Table
from lowbit.train.config import DataConfig, LoraConfig, ModelConfig, OptimizerConfig, PipelineConfig
from lowbit_lab.bench.recipes import MANY_STAGES, PROGRAM, THIN_MODEL, as_mapping, check_recipes, recipe, step
from lowbit_lab.bench.settings import LINK, Device, Links, Names, formats_of
from lowbit_lab.bench.workers import UNLIMITED, Workers, set_link, started
from lowbit_lab.charts.style import row_name
from lowbit_lab.network import Link

_TURN = 10  # steps of a format before it is the next one's turn


@section()
class TuneBenchmark:
    """Fine-tuning with each format."""

    links: Links = (Link(100.0),)
    """Link to emulate: a rate, with a round trip if there is a distance, such as 100mbit/40ms."""
    boundaries: Names = ("fp32", "transform", "int4 / int4")
    """Formats of activations, by name or in full, or of both ways, such as "int4 / int6"."""
    backward: str = ""
    """Format of gradients beside low-bit activations, unless `boundaries` names it. If omitted, the default of each
    format."""
    model: ModelConfig = THIN_MODEL
    """Model to train on Python's standard library and then fine-tune; with `pretrained`, the model to fine-tune."""
    data: DataConfig = DataConfig(batch=16, sequence=128)
    """Windows of both."""
    pipeline: PipelineConfig = MANY_STAGES
    """Ranks, each on a host of its own, stages and schedule."""
    start_steps: Positive = 300
    """Steps at full precision that make the starting weights."""
    questions: Positive = 3000
    """Questions, a tenth of which are held out."""
    steps: Positive = 100
    """Steps of the fine-tuning."""
    lora: LoraConfig = LoraConfig(rank=16, alpha=32.0)
    """Adapters."""
    lr: float = 1e-2
    """Highest learning rate of the fine-tuning."""
    device: Device = "cpu"
    """cuda: ranks share the GPUs of the machine."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Data type of matrix products; weights stay in float32."""
    seed: NonNegative = 0
    """Seed of weights and data order."""

    def __post_init__(self) -> None:
        check_recipes(self, self.pipeline)


def measure(settings: TuneBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Fine-tune on the first link.

    Yields:
        Rows, one for each boundary: `boundary`, `forward`, `backward`, the fields of `set_link`, `steps`,
        `seconds_per_step` (median), `hours` (of all steps, as one step takes), `speedup_fp32`, `bits_forward`,
        `bits_backward`, `megabytes` (sent by all ranks), `answers` (kinds of answers), and `held_out_loss` and
        `exact_match` with and without "_before".

    Raises:
        LinkUnavailable: a limited link is asked for and this machine does not permit one.
        ChildProcessError: a rank failed.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        started(PROGRAM, settings.pipeline.ranks, settings.links) as (network, ranks),
    ):
        kinds = write_questions(Path(folder) / "questions.jsonl", settings.questions)
        if not settings.model.pretrained:
            start = recipe(settings, "fp32", output=f"{folder}/start", steps=settings.start_steps)
            ranks.ask("train", config=as_mapping(start))
        runs = [
            Run(settings, boundary, ranks, Path(folder), number) for number, boundary in enumerate(settings.boundaries)
        ]
        about = set_link(network, settings.links[0])
        while runs[-1].left:
            for run in runs:
                run.train()
        if network is not None:
            network.set_link(UNLIMITED)
        yield [{"boundary": run.boundary, **run.formats, **about, "answers": kinds, **run.outcome()} for run in runs]


class Run:
    """One boundary's run."""

    def __init__(self, settings: TuneBenchmark, boundary: str, ranks: Workers, folder: Path, number: int) -> None:
        self.boundary, self.formats = boundary, formats_of(boundary, settings.backward)
        self.left, self._ranks, self._name = settings.steps, ranks, f"{folder}/{number}"
        self._steps: list[dict[str, Any]] = []
        questions = (str(folder / "questions.jsonl"),)
        config = recipe(
            settings, boundary,
            model=ModelConfig(pretrained=settings.model.pretrained or str(folder / "start" / "model")),
            data=replace(settings.data, format="jsonl", text=questions, held_out_share=0.1),
            optimizer=OptimizerConfig(lr=settings.lr, lr_warmup_steps=min(10, settings.steps), weight_decay=0.0),
            output=self._name, steps=settings.steps, eval_batches=0,
        )  # fmt: skip
        ranks.ask("open", name=self._name, config=as_mapping(replace(config, lora=settings.lora)), samples=0)
        self._before = self._scores()

    def train(self) -> None:
        """Take the next steps."""
        count = min(_TURN, self.left)
        self._steps += step(self._ranks, self._name, count)
        self.left -= count

    def outcome(self) -> dict[str, Any]:
        """The fields of the row that concern this run."""
        seconds = statistics.median(each["seconds"] for each in self._steps)
        bits = {
            name: statistics.fmean(each[name] for each in self._steps) for name in ("bits_forward", "bits_backward")
        }
        return {
            "steps": len(self._steps), "seconds_per_step": seconds, "hours": len(self._steps) * seconds / 3600, **bits,
            "megabytes": sum(each["bytes_sent"] for each in self._steps) / 1e6,
            **{f"{name}_before": value for name, value in self._before.items()}, **self._scores(),
        }  # fmt: skip

    def _scores(self) -> dict[str, float]:
        return self._ranks.ask("scores", name=self._name)[0]


COMMAND = Command(
    name="benchmarks tune",
    summary="Fine-tuning with LoRA over a slow link: exact match, loss and hours of each boundary format.",
    examples=("python -m benchmarks tune --boundary fp32,transform --steps 100",),
    settings=TuneBenchmark,
    measure=measure,
    baselines=[
        Baseline(field="speedup_fp32", value="seconds_per_step", to={"boundary": "fp32"}, alike=("link",), way="under")
    ],
    tables=[
        Table(
            title="Fine-tuning with LoRA on questions and answers",
            columns=[
                LINK,
                Column("boundary", "boundary", row_name),
                Column("bits\nfwd", "bits_forward", "{:.2f}"),
                Column("bits\nbwd", "bits_backward", "{:.2f}"),
                Column("exact match\nbefore", "exact_match_before", "{:.1%}"),
                Column("exact match", "exact_match", "{:.1%}"),
                Column("held-out\nloss", "held_out_loss", "{:.4f}"),
                Column("s a step", "seconds_per_step", "{:.2f}"),
                Column("hours", "hours", "{:.3f}"),
                Column("over\nfp32", "speedup_fp32", "{:.2f}x"),
                Column("MB\nsent", "megabytes", "{:.1f}"),
            ],
        )
    ],
    charts=[],
)  # fmt: skip
