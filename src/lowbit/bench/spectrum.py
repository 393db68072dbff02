"""`lowbit bench spectrum`: how many directions suit a model's tensors, and the accuracy of formats.

The model of a checkpoint runs on a text, forward and backward, without training. The tensors that would cross each
boundary go through the sessions of every format, message after message, as in a pipeline.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from lowbit.bench.codec_speed import ends_of
from lowbit.bench.samples import capture
from lowbit.bench.training import spread_evenly
from lowbit.codecs import Codec, SubspaceQuant, parse
from lowbit.codecs.sessions import Session
from lowbit.config import ConfigError, Positive, section
from lowbit.report import Column, Command, Lines, Row, Table
from lowbit.train.config import DataConfig, ModelConfig
from lowbit.train.data import load_data
from lowbit.train.model import build_model, count_layers, vocabulary

DIRECTIONS = ("forward", "backward")
AtLeastTwo = Annotated[int, Field(ge=2)]


@section()
class SpectrumBenchmark:
    """A model, a text, and formats to try."""

    checkpoint: str
    """Local folder with a causal language model in Hugging Face format."""
    text: str
    """File, folder or glob pattern to run the model on."""
    stages: AtLeastTwo = 4
    """Pipeline stages that the model is split into, at most one for each layer."""
    directions: tuple[Positive, ...] = (8, 16, 32, 64)
    """Numbers of directions to try, besides the one that suits the first message."""
    bits: tuple[int, ...] = (3, 4)
    """Bits of the remainder, to try with each number of directions."""
    group: Positive = 64
    """Elements that share a scale in SubspaceQuant."""
    refresh: Positive | None = None
    """Messages within which SubspaceQuant renews all its directions. If omitted, its default."""
    codecs: tuple[str, ...] = ("int8", "int4", "tah-quant", "tah-quant-published")
    """Other formats to compare with, by name or in full."""
    sequence: AtLeastTwo = 256
    """Tokens of a window."""
    batch: Positive = 4
    """Windows of a message."""
    messages: AtLeastTwo = 8
    """Number of messages. The errors are those of the second half."""
    tokenizer: str = ""
    """Local folder with a Hugging Face tokenizer, or "bytes". If omitted, the model's own."""
    max_bytes: Positive = 16_000_000
    """Read at most this many bytes of text."""

    def __post_init__(self) -> None:
        for name in self.codecs:
            codec = parse(name)
            if codec.needs_key:
                raise ConfigError(f"codecs has {name!r}, which learns from epoch to epoch; allowed: others")
            if not codec.settled:
                raise ConfigError(
                    f"codecs has {name!r}, which chooses a parameter in a pipeline's warm-up; "
                    "allowed: those with all parameters set (the spectrum's own choice is measured anyway)"
                )
        if not self.bits:
            raise ConfigError("bits is empty; allowed: 2 to 8, between commas")
        for directions in (*self.directions, 1):
            for bits in self.bits:
                SubspaceQuant(directions=directions, bits=bits, group=self.group, refresh=self.refresh)


@dataclass
class _Trial:
    """A format at one boundary, in one direction."""

    name: str
    codec: Codec
    ends: tuple[Session, Session]
    fitted: bool = False
    signal: float = 0.0
    noise: float = 0.0

    def carry(self, x: Tensor, counted: bool) -> None:
        sender, receiver = self.ends
        y = receiver.decode(sender.encode(x))
        if counted:
            self.signal += float(x.double().square().sum())
            self.noise += float((x.double() - y.double()).square().sum())

    def decibels(self) -> float:
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else math.inf


@dataclass
class _Boundary:
    """What crosses a boundary in one direction, and its trials."""

    index: int
    direction: str
    outside: Tensor = field(default_factory=lambda: torch.zeros(0))
    trials: list[_Trial] = field(default_factory=list)

    def begin(self, settings: SpectrumBenchmark, x: Tensor) -> None:
        self.outside = outside(x)
        candidates: dict[tuple[int, int], bool] = {}
        shared = {"group": settings.group, "refresh": settings.refresh}
        for bits in settings.bits:
            candidates |= {(directions, bits): False for directions in settings.directions if directions <= x.shape[-1]}
            suiting = SubspaceQuant.fitted(x, bits=bits, **shared)
            candidates[suiting.geometry(x.shape).directions, bits] = True
        codecs = {name: parse(name) for name in settings.codecs}
        self.trials = [_Trial(name, codec, ends_of(codec, x)) for name, codec in codecs.items()]
        for (directions, bits), fitted in sorted(candidates.items(), key=lambda item: item[0][::-1]):
            codec = SubspaceQuant(directions=directions, bits=bits, **shared)
            self.trials.append(_Trial("subspace", codec, ends_of(codec, x), fitted))

    def rows(self, shape: Sequence[int]) -> Iterator[Row]:
        for trial in self.trials:
            directions = getattr(trial.codec, "directions", None)
            yield {
                "boundary": self.index,
                "direction": self.direction,
                "shape": list(shape),
                "format": trial.name,
                "codec": str(trial.codec),
                "directions": directions,
                "bits": getattr(trial.codec, "bits", None) if directions else None,
                "fitted": trial.fitted,
                "outside": float(self.outside[min(directions, len(self.outside) - 1)]) if directions else None,
                "bits_per_element": trial.codec.bits_per_element(shape),
                "decibels": trial.decibels(),
            }


def measure(settings: SpectrumBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every format on what crosses every boundary.

    Yields:
        Rows with `boundary`, `direction`, `shape` (of a message), `format` (a name), `codec`, `bits_per_element` (every
        byte counted) and `decibels` (signal over noise, second half of the messages); those of SubspaceQuant also
        `directions`, `bits` and `outside`: the share of the first message's energy that its best directions leave
        out; `fitted`: whether this number is `SubspaceQuant.fitted`'s.

    Raises:
        ConfigError: a model or text that cannot be used, or more stages than layers.
    """
    config = ModelConfig(pretrained=settings.checkpoint)
    if settings.stages > (layers := count_layers(config)):
        raise ConfigError(f"stages is {settings.stages}; the model has {layers} layers; allowed: at most as many")
    data = load_data(
        DataConfig(
            text=(settings.text,), tokenizer=settings.tokenizer or settings.checkpoint, sequence=settings.sequence,
            batch=settings.batch * settings.messages, max_bytes=settings.max_bytes, held_out_share=0,
        )
    )  # fmt: skip
    vocab = vocabulary(config, data.tokenizer.size)
    model = build_model(config, vocab=vocab, sequence=settings.sequence, seed=0)
    ids = spread_evenly(settings.batch * settings.messages, len(data.train))
    boundaries = [_Boundary(i, d) for d in DIRECTIONS for i in range(settings.stages - 1)]
    for message, part in enumerate(ids.split(settings.batch)):
        sent = capture(model, *data.train.batch(part), stages=settings.stages)
        tensors = [x for direction in sent for x in direction]
        for boundary, x in zip(boundaries, tensors, strict=True):
            if not message:
                boundary.begin(settings, x)
            for trial in boundary.trials:
                trial.carry(x, message >= settings.messages // 2)
        if message >= settings.messages // 2:
            yield [row for b, x in zip(boundaries, tensors, strict=True) for row in b.rows(x.shape)]


def outside(x: Tensor) -> Tensor:
    """Share of the energy of tokens (..., C) that the k best directions leave out, for k from 0 on."""
    energy = torch.linalg.svdvals(x.reshape(-1, x.shape[-1]).double()).square()
    total = energy.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return (1 - torch.cat([torch.zeros(1), energy.cumsum(0) / total])).clamp(min=0)


def _directions(row: Row) -> str | None:
    return f"{row['directions']}{'*' * row['fitted']}" if row["directions"] else None


def _name(row: Row) -> str:
    return f"{row['format']}, {row['bits']} bits" if row["directions"] else row["format"]


def _points(rows: Sequence[Row]) -> list[Row]:
    """Means over the boundaries, by bits; one that only some boundaries have, because it suits them, by itself."""
    boundaries = len({row["boundary"] for row in rows})
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["direction"], _name(row), row["bits_per_element"]), []).append(row)
    points = []
    for (direction, name, bits), group in sorted(groups.items(), key=lambda item: item[0][2]):
        alone = len(group) < boundaries
        about = {"direction": direction, "series": name, "bits_per_element": bits, "alone": alone}
        heights = [row["decibels"] for row in group]
        points += [{**about, "decibels": height} for height in (heights if alone else [statistics.fmean(heights)])]
    return sorted(points, key=lambda point: DIRECTIONS.index(point["direction"]))


COMMAND = Command(
    name="bench spectrum",
    summary="How many directions suit a model's tensors, and the accuracy of formats.",
    examples=(
        "lowbit bench spectrum runs/train/model held-out.txt",
        "lowbit bench spectrum runs/train/model held-out.txt --stages 2 --bit 3",
    ),
    settings=SpectrumBenchmark,
    measure=measure,
    tables=[
        Table(
            each="direction",
            title=lambda rows: (
                f"{rows[0]['direction'].capitalize()}, messages of {' x '.join(map(str, rows[0]['shape']))}; "
                "*: number by the spectrum"
            ),
            columns=[
                Column("boundary", "boundary"),
                Column("format", _name),
                Column("directions", _directions),
                Column("energy\noutside", "outside", "{:.2%}"),
                Column("bits", "bits_per_element", "{:.2f}"),
                Column("dB", "decibels", "{:.1f}"),
            ],
        )
    ],
    charts=[
        Lines(
            rows=_points, panel="direction", series="series", x="bits_per_element", y="decibels",
            alone="alone", x_label="bits per element", label="signal over noise, dB",
            title="Precision of formats by bits", subtitle="Higher and further left is better. Means over the "
            "boundaries; stars: a number of directions that only some boundaries have.",
        )
    ],
)  # fmt: skip
