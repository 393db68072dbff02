"""`python -m benchmarks auto`: formats that choose themselves beside each fixed format, on really limited links.

Every run trains from its first step, with all that `lowbit train` does. The first steps, in which `auto` chooses, are
not timed. Runs of all formats take turns, round after round.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lowbit.codecs.names import pair_name
from lowbit.config import NonNegative, Positive, section
from lowbit.report import Column, Command, Row, Table
from lowbit.train.boundaries import AUTO_FORMATS
from lowbit.train.config import AUTO, DataConfig, ModelConfig, PipelineConfig, TrainConfig
from lowbit.train.summary import read_summary
from lowbit_lab.bench.recipes import PROGRAM, THIN_MODEL, as_mapping, check_recipes, recipe
from lowbit_lab.bench.settings import LINK, Device, Links, Names
from lowbit_lab.bench.workers import UNLIMITED, Workers, set_link, started
from lowbit_lab.network import Link

_UNTIMED = 7  # first steps of a run: five before the choice, and two with the formats that it sets up


@section()
class AutoBenchmark:
    """Links, fixed formats to compare with, and a model."""

    links: Links = tuple(
        replace(link, rtt_ms=rtt) for link in (Link(25.0), Link(100.0), Link(500.0), UNLIMITED) for rtt in (0.0, 40.0)
    )
    """Links to emulate."""
    boundaries: Names = AUTO_FORMATS
    """Fixed formats, of activations or of both ways."""
    model: ModelConfig = THIN_MODEL
    """Model to train."""
    data: DataConfig = DataConfig(batch=32, sequence=128, held_out_share=0.0)
    """Text to train on, and the size of a batch."""
    pipeline: PipelineConfig = PipelineConfig(ranks=2, microbatches=8)
    """Ranks, each on a host of its own, stages and schedule. The formats are those of `boundaries`."""
    rounds: Positive = 2
    """Runs of each format on each link."""
    steps: Positive = 8
    """Timed steps of a run. Seven others come first."""
    device: Device = "cpu"
    """cuda: ranks share the GPUs of the machine."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Data type of matrix products."""
    backward: str = ""
    """Format of gradients, as for `lowbit bench pipeline`."""
    seed: NonNegative = 0
    """Seed of weights and data order."""

    def __post_init__(self) -> None:
        check_recipes(self, self.pipeline)


def measure(settings: AutoBenchmark, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Train with `auto` and with every fixed format on every link.

    Yields:
        Rows, one for each link and format: `boundary` ("auto" or the format), the fields of `set_link`,
        `seconds` (of the median step), `seconds_low`, `seconds_high`, `steps`, `formats` (what each run with `auto`
        chose, by boundary; of a fixed format, none), `predicted` (seconds of the last choice; None) and `choice` (all
        numbers of the last choice, `lowbit.train.auto.Choice`; None).
    """
    ranks_of = settings.pipeline.ranks
    rows: list[dict[str, Any]] = []
    for link in settings.links:
        # A process group can serve a few dozen runs only: each link gets ranks of its own.
        with tempfile.TemporaryDirectory() as folder, started(PROGRAM, ranks_of, [link]) as (network, ranks):
            about = set_link(network, link)
            taken: dict[str, list[dict[str, Any]]] = {name: [] for name in (AUTO, *settings.boundaries)}
            for number in range(settings.rounds):
                for index, (name, turns) in enumerate(taken.items()):
                    turns.append(_turn(ranks, config_of(settings, name, f"{folder}/{number}-{index}")))
        rows += [{"boundary": name, **about, **_row(turns)} for name, turns in taken.items()]
        yield rows


def config_of(settings: AutoBenchmark, boundary: str, output: str) -> TrainConfig:
    """The run of a format, or of `auto`."""
    steps = {"steps": _UNTIMED + settings.steps, "save_model": False, "report": False, "overwrite": True}
    if boundary != AUTO:
        return recipe(settings, boundary, output=output, **steps)
    config = recipe(settings, AUTO_FORMATS[0], output=output, **steps)
    return replace(config, pipeline=replace(config.pipeline, forward=(AUTO,), backward=()))


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """Speed of `auto` over that of the best fixed format, by link."""
    found = {}
    for link in dict.fromkeys(row["link"] for row in rows):
        seconds = {row["boundary"]: row["seconds"] for row in rows if row["link"] == link}
        found[link] = min(seconds[name] for name in seconds if name != AUTO) / seconds[AUTO]
    return found


def _turn(ranks: Workers, config: TrainConfig) -> dict[str, Any]:
    """Train; seconds of the timed steps, and the last choice."""
    steps: list[float] = []
    ranks.ask("train", config=as_mapping(config), on_progress=lambda metrics: steps.append(metrics["seconds"]))
    chosen = read_summary(Path(config.run.output) / "summary.json").formats
    return {"seconds": steps[_UNTIMED:], "chosen": chosen[-1] if chosen else None}


def _row(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [each for turn in turns for each in turn["seconds"]]
    chosen = [turn["chosen"] for turn in turns if turn["chosen"]]
    return {
        "seconds": statistics.median(seconds),
        "seconds_low": min(seconds),
        "seconds_high": max(seconds),
        "steps": len(seconds),
        "formats": [choice["formats"] for choice in chosen],
        "predicted": chosen[-1]["predicted"] if chosen else None,
        "choice": chosen[-1] if chosen else None,
    }


def _title(rows: Sequence[Row]) -> str:
    share = shares(rows)
    worst = min(share, key=lambda link: share[link])
    return f"auto has at least {share[worst]:.0%} of the speed of the best fixed format ({Link.parse(worst).title})"


def _compared(rows: Sequence[Row]) -> list[Row]:
    best = {
        link: min(r["seconds"] for r in rows if r["link"] == link and r["boundary"] != AUTO) for link in shares(rows)
    }
    predicted = {row["link"]: row["predicted"] for row in rows if row["boundary"] == AUTO}
    found: list[Row] = []
    for row in rows:
        chosen = " | ".join(dict.fromkeys(" + ".join(dict.fromkeys(map(pair_name, each))) for each in row["formats"]))
        of = predicted[row["link"]].get("these" if row["boundary"] == AUTO else row["boundary"])
        found.append({**row, "chosen": chosen, "share": best[row["link"]] / row["seconds"], "expected": of})
    return found


COMMAND = Command(
    name="auto",
    summary="Formats that choose themselves beside each fixed format, on really limited links.",
    examples=(
        "python -m benchmarks auto --json auto.json",
        "python -m benchmarks auto --link 100mbit/40ms --rounds 1",
    ),
    settings=AutoBenchmark,
    measure=measure,
    tables=(
        Table(
            title=_title,
            rows=_compared,
            gap="link",
            columns=(
                LINK,
                Column("format", lambda row: pair_name(row["boundary"])),
                Column("a step", "seconds", "{:.3f} s"),
                Column("fastest", "seconds_low", "{:.3f}"),
                Column("slowest", "seconds_high", "{:.3f}"),
                Column("pre-\ndicted", "expected", "{:.3f}"),
                Column("of the\nbest fixed", "share", "{:.0%}"),
                Column("chosen", "chosen"),
            ),
        ),
    ),
    charts=(),
)
