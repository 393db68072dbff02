"""`lowbit bench spectrum`: the accuracy of formats on a model's tensors.

The model of a checkpoint runs on a text, forward and backward, without training. The tensors that would cross each
boundary go through the sessions of every format, message after message, as in a pipeline. Each format's bits are
compared with the rate-distortion bound of the same messages at the same error.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.codecs import Codec, parse
from lowbit.codecs.base import Session
from lowbit_lab.bench.codecs import ends_of
from lowbit_lab.bench.settings import AtLeastTwo, check_plain, check_stages
from lowbit_lab.bench.training import capture, spread_evenly
from lowbit_lab.charts import Lines
from lowbit_run.config import Positive, section
from lowbit_run.report import Column, Command, Row, Table
from lowbit_run.train.config import DataConfig, ModelConfig
from lowbit_run.train.data import load_data
from lowbit_run.train.model import build_model, count_layers, vocabulary

DIRECTIONS = ("forward", "backward")
BOUND = "bound"
BOUND_DECIBELS = range(0, 65, 5)  # points at which rows show the bound


@section()
class SpectrumBenchmark:
    """A model, a text, and formats to try."""

    checkpoint: str
    """Local folder with a causal language model in Hugging Face format."""
    text: str
    """File, folder or glob pattern to run the model on."""
    stages: AtLeastTwo = 4
    """Pipeline stages that the model is split into, at most one for each layer."""
    codecs: tuple[str, ...] = ("int8", "int4", "tah-quant", "tah-quant-published", "transform", "transform-backward")
    """Formats to compare, by name or in full."""
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
            check_plain("codecs", name, parse(name))


def spectrum(x: Tensor) -> Tensor:
    """Mean squares of tokens (..., C) along their principal directions: (C,) float64; NaN if any is not finite."""
    tokens = x.reshape(-1, x.shape[-1]).double()
    count, channels = tokens.shape
    if not bool(tokens.isfinite().all()):
        return torch.full((channels,), math.nan, dtype=torch.float64)
    size = tokens.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    tokens = tokens / size
    products = tokens.t() @ tokens if channels <= count else tokens @ tokens.t()
    energies = torch.linalg.eigvalsh(products).clamp(min=0) * (size.square() / count)
    return torch.cat([energies, energies.new_zeros(channels - len(energies))])


def norms(x: Tensor) -> Tensor:
    """Norms of tokens (..., C), (..., 1) float64; 1 for tokens of zeros."""
    norm = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
    return torch.where(norm > 0, norm, 1.0)


def rate(spectra: Sequence[Tensor], error: float) -> float | None:
    """Return the least bits per element of messages with these spectra: the rate-distortion bound.

    It is that of Gaussian sources with the messages' second moments, by reverse water-filling: there is one level, a
    component above it takes 1/2 log2(variance / level) bits, the others none, and the errors, min(variance, level), add
    up to the requested one. A format that uses only second moments cannot go below it. One that uses more, such as the
    norm of each token, can. The bits that describe the spectrum and its directions to a receiver are not counted, so
    the bound of messages with few tokens compared with their channels is lower than what a format can reach.

    Args:
        spectra: of messages with equally many tokens.
        error: mean squared error of the elements of all messages. The bound distributes it among them in the best way.

    Returns:
        0 if sending nothing has no larger error; None for an error of 0, which no finite rate reaches, or NaN.
    """
    variances = torch.cat(list(spectra)).sort().values
    count = len(variances)
    mean = float(variances.mean())
    if math.isnan(mean) or math.isnan(error):
        return None
    if error >= mean:
        return 0.0
    if error <= 0:
        return None
    # If the n smallest variances are below the level, their components have these variances as errors, and the others
    # share the rest. For every n that is too small, the level is above the next variance.
    below = torch.cat([variances.new_zeros(1), variances.cumsum(0)[:-1]])
    levels = (error * count - below) / torch.arange(count, 0, -1, dtype=torch.float64)
    n = min(int((levels > variances).sum()), count - 1)
    return float((variances[n:] / levels[n]).log2().sum()) / (2 * count)


def rate_at(spectra: Sequence[Tensor], decibels: float) -> float | None:
    """Return `rate` for an error this many decibels below the messages."""
    return rate(spectra, float(torch.cat(list(spectra)).mean()) * 10 ** (-decibels / 10))


@dataclass
class _Trial:
    """A format at one boundary, in one direction, with sums of squares and of squared errors of counted messages.

    `total` is of the messages, `by_token` of these with each token divided by its own norm.
    """

    name: str
    codec: Codec
    ends: tuple[Session, Session]
    total: list[float] = field(default_factory=lambda: [0.0, 0.0])
    by_token: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def carry(self, x: Tensor, counted: bool) -> None:
        sender, receiver = self.ends
        y = receiver.decode(sender.encode(x))
        if counted:
            error, norm = x.double() - y.double(), norms(x)
            for sums, scale in ((self.total, 1.0), (self.by_token, norm)):
                sums[0] += float((x.double() / scale).square().sum())
                sums[1] += float((error / scale).square().sum())


@dataclass
class _Boundary:
    """The messages that cross a boundary in one direction, and the trials with them."""

    index: int
    direction: str
    spectra: list[Tensor] = field(default_factory=list)
    token_spectra: list[Tensor] = field(default_factory=list)
    trials: list[_Trial] = field(default_factory=list)

    def carry(self, settings: SpectrumBenchmark, x: Tensor, counted: bool) -> None:
        if not self.trials:
            codecs = {name: parse(name) for name in settings.codecs}
            self.trials = [_Trial(name, codec, ends_of(codec, x)) for name, codec in codecs.items()]
        if counted:
            self.spectra.append(spectrum(x))
            self.token_spectra.append(spectrum(x.double() / norms(x)))
        for trial in self.trials:
            trial.carry(x, counted)

    def rows(self, shape: Sequence[int]) -> Iterator[Row]:
        about = {"boundary": self.index, "direction": self.direction, "shape": list(shape)}
        for trial in self.trials:
            bits = trial.codec.bits_per_element(shape)
            row = {**about, "format": trial.name, "codec": str(trial.codec), "bits_per_element": bits}
            for prefix, sums, spectra in (
                ("", trial.total, self.spectra),
                ("token_", trial.by_token, self.token_spectra),
            ):
                signal, noise = sums
                least = rate(spectra, noise / (len(spectra) * math.prod(shape)))
                row |= {
                    f"{prefix}decibels": 10 * math.log10(signal / noise) if noise and signal else math.inf,
                    f"{prefix}bound": least,
                    f"{prefix}above": None if least is None else bits - least,
                }
            yield row
        for decibels in BOUND_DECIBELS:
            bits = rate_at(self.spectra, decibels)
            yield {**about, "format": BOUND, "bits_per_element": bits, "decibels": float(decibels)}


def measure(settings: SpectrumBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every format on the tensors that cross every boundary.

    Yields:
        Rows with `boundary`, `direction`, `shape` (of a message), `format` (a name), `codec`, `bits_per_element` (every
        byte counted), `decibels` (signal over noise, second half of the messages), `bound` (bits per element of the
        rate-distortion bound of these messages at this error, see `rate`; None if not defined),
        `above` (bits of the format above it); `token_decibels`, `token_bound`, `token_above`: the same for each
        token's error relative to its own norm. Rows whose format is "bound" are points of the bound.
    """
    config = ModelConfig(pretrained=settings.checkpoint)
    check_stages(settings.stages, count_layers(config))
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
        counted = message >= settings.messages // 2
        for boundary, x in zip(boundaries, tensors, strict=True):
            boundary.carry(settings, x, counted)
        if counted:
            yield [row for b, x in zip(boundaries, tensors, strict=True) for row in b.rows(x.shape)]


def outside(x: Tensor) -> Tensor:
    """Return the share of the energy of tokens (..., C) that the k best directions leave out, for k from 0 on."""
    energy = torch.linalg.svdvals(x.reshape(-1, x.shape[-1]).double()).square()
    total = energy.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return (1 - torch.cat([torch.zeros(1), energy.cumsum(0) / total])).clamp(min=0)


def _formats(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["format"] != BOUND]


def _points(rows: Sequence[Row]) -> list[Row]:
    """Return means over the boundaries, by bits.

    Points of the bound are means by decibels, in the range of the formats.
    """
    boundaries = len({row["boundary"] for row in rows})
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in _formats(rows):
        groups.setdefault((row["direction"], row["format"], row["bits_per_element"]), []).append(row)
    points = []
    for (direction, name, bits), group in sorted(groups.items(), key=lambda item: item[0][2]):
        alone = len(group) < boundaries
        about = {"direction": direction, "series": name, "bits_per_element": bits, "alone": alone}
        heights = [height for row in group if (height := row["decibels"]) is not None]  # exact formats have no error
        if not heights:
            continue
        points += [{**about, "decibels": height} for height in (heights if alone else [statistics.fmean(heights)])]
    for direction in DIRECTIONS:
        heights = [p["decibels"] for p in points if p["direction"] == direction and math.isfinite(p["decibels"])]
        for decibels in BOUND_DECIBELS if heights else ():
            own = [row["bits_per_element"] for row in rows if row["format"] == BOUND
                   and row["direction"] == direction and row["decibels"] == decibels]  # fmt: skip
            if own and None not in own and min(heights) - 5 < decibels < max(heights) + 5:
                about = {"direction": direction, "series": BOUND, "alone": False, "decibels": decibels}
                points.append({**about, "bits_per_element": statistics.fmean(own)})
    return sorted(points, key=lambda point: DIRECTIONS.index(point["direction"]))


COMMAND = Command(
    name="bench spectrum",
    summary="The accuracy of formats on a model's tensors.",
    examples=(
        "lowbit bench spectrum runs/train/model held-out.txt",
        "lowbit bench spectrum runs/train/model held-out.txt --codec int4",
    ),
    settings=SpectrumBenchmark,
    measure=measure,
    tables=[
        Table(
            rows=_formats,
            each="direction",
            title=lambda rows: (
                f"{rows[0]['direction'].capitalize()}, messages of {' x '.join(map(str, rows[0]['shape']))}; "
                "by token: bits above the bound for errors relative to each token's norm"
            ),
            columns=[
                Column("boundary", "boundary"),
                Column("format", "format"),
                Column("bits", "bits_per_element", "{:.2f}"),
                Column("dB", "decibels", "{:.1f}"),
                Column("bound,\nbits", "bound", "{:.2f}"),
                Column("above\nit", "above", "{:.2f}"),
                Column("by\ntoken", "token_above", "{:.2f}"),
            ],
        )
    ],
    charts=[
        Lines(
            rows=_points, panel="direction", series="series", x="bits_per_element", y="decibels",
            alone="alone", x_label="bits per element", label="signal over noise, dB",
            title="Precision of formats by bits, and the bound",
            subtitle="Higher and further left is better. Means over the boundaries.",
        )
    ],
)  # fmt: skip
