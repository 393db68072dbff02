"""`python -m benchmarks ranks`: how the quantization errors of ranks cancel in a sum, on a model's real partial sums.

The paper (arXiv 2411.07942) argues that the errors of ranks are independent and uniform, so that their sum follows the
Irwin-Hall distribution and concentrates around zero. The sum of n uniforms of one width has the kurtosis 3 - 1.2 / n.
This only concerns rounding. Values outside their calibrated ranges are clipped, with errors above half a step.

Inputs of row-wise layers are captured once on calibration text and once on held-out text. Their features are split into
n parts, whatever the number of heads, and each part's product with its columns of the weight is a rank's partial sum.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from lowbit.codecs import FeatureInt
from lowbit.config import ConfigError, Positive, section
from lowbit.report import Column, Command, Row, Table
from lowbit.tensor_parallel import emulate_tensor_parallel_, model_sums
from lowbit.tensor_parallel.calibration import SHARE
from lowbit.tensor_parallel.plan import shards
from lowbit_lab.evaluate import EvaluationConfig, loading, text
from lowbit_lab.evaluate.errors import root_mean_square

_ERRORS = ("error", "error_of_rank", "rounding")  # combined by their squares, all others by their mean
_ENDLESS = 2**24  # largest code without clipping: up to it, float32 has all integers
Captures = dict[str, Tensor]
"""By layer: its inputs, float32 (sequences, tokens, features)."""


class Static:
    """The published format: INT4 with a static scale for each feature and rank, the E/64 widest features in bfloat16.

    Args:
        parts: partial sums of each rank to calibrate on, float32 (sequences, tokens, E).
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        width = parts[0].shape[-1]
        self.ranges = [torch.maximum(x.amin(1).mean(0).abs(), x.amax(1).mean(0).abs()) for x in parts]
        aggregated = sum((r.square() for r in self.ranges), torch.zeros(width))
        self.rest = torch.ones(width, dtype=torch.bool)
        self.rest[aggregated.topk(width // SHARE).indices] = False

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        """Return what a receiver decodes of a rank's partial sums (tokens, E)."""
        y = x.bfloat16().float()
        y[..., self.rest] = to_grid(x[..., self.rest], self.ranges[rank][self.rest] / 7, 7)
        return y


class Ours:
    """`FeatureInt` in 4 bits, which clips where the squared error is least, as `calibrate` does."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        flat = [part.flatten(0, 1) for part in parts]

        def error(codec: FeatureInt) -> float:
            return sum(float((codec.part(r).round_trip(x) - x).square().sum()) for r, x in enumerate(flat))

        self._codec = min((FeatureInt.fit(flat, clip=clip / 100) for clip in range(100, 55, -5)), key=error)
        self.rest = torch.ones(flat[0].shape[-1], dtype=torch.bool)
        self.rest[list(self._codec.features)] = False

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        """See `Static`."""
        return self._codec.part(rank).round_trip(x)


_CODED: dict[str, type[Static | Ours]] = {"static": Static, "feature-int4": Ours}


def to_grid(x: Tensor, step: Tensor, limit: int) -> Tensor:
    """Round to multiples of `step` from -limit to limit."""
    step = step.clamp(min=1e-30)
    return (x / step).round().clamp(-limit, limit) * step


@section()
class RanksBenchmark:
    """A model, texts and numbers of ranks."""

    model: str
    """Local folder with a Hugging Face model or encoder."""
    text: tuple[str, ...] = ()
    """Held-out text. If omitted, the last 5 % of Python's standard library."""
    calibration_text: tuple[str, ...] = ()
    """Text to calibrate on. If omitted, the rest of it."""
    ranks: tuple[Positive, ...] = (1, 2, 4, 8, 16)
    """Numbers of ranks; each divides the inputs of all row-wise layers."""
    candidates: tuple[str, ...] = tuple(_CODED)
    """static: the published format; feature-int4: ours, with a gain for each token, to which the argument about uniform
    errors does not apply."""
    length: Annotated[int, Field(ge=8)] = 128
    """Tokens of a sequence."""
    sequences: Positive = 16
    """Number of sequences to capture of each text."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.candidates if name not in _CODED]:
            raise ConfigError(f"candidate is {unknown[0]!r}; allowed: {', '.join(_CODED)}")

    def reading(self, *, held_out: bool) -> EvaluationConfig:
        """Return the settings by which the text is read."""
        return EvaluationConfig(
            model=self.model, text=self.text if held_out else self.calibration_text, length=self.length, tps=(1,)
        )  # fmt: skip


class Layers:
    """The row-wise layers of a model, and their inputs."""

    def __init__(self, settings: RanksBenchmark) -> None:
        self._settings = settings
        device = loading.prepare(settings.reading(held_out=False))
        self._model: Any = loading.load_model(settings.model, "float32", device)
        self._encoder = loading.model_kind(settings.model) != loading.CAUSAL
        modules: Any = {name: summed.module for name, summed in model_sums(self._model).items()}
        self.weights: dict[str, Tensor] = {name: module.weight for name, module in modules.items()}
        self._given: dict[str, list[Tensor]] = {}
        for name, module in modules.items():
            module.register_forward_pre_hook(functools.partial(self._note, name))
        for ranks in settings.ranks:
            for name, weight in self.weights.items():
                if weight.shape[1] % ranks:
                    raise ConfigError(f"ranks is {ranks}; allowed: divisors of {weight.shape[1]}, the inputs of {name}")
        self.calibration = self._capture(held_out=False)
        self.held_out = self._capture(held_out=True)

    def _note(self, name: str, module: object, args: tuple[Tensor, ...]) -> None:
        self._given[name].append(args[0].float())

    @torch.no_grad()
    def _capture(self, *, held_out: bool) -> Captures:
        self._given = {name: [] for name in self.weights}
        sequences, _ = text.read(self._settings.reading(held_out=held_out), held_out=held_out, encoder=self._encoder)
        with emulate_tensor_parallel_(self._model, 1):
            for drawn in sequences.draw(self._settings.sequences, 0):
                self._model(drawn[None])
        return {name: torch.cat(parts) for name, parts in self._given.items()}

    @torch.no_grad()
    def partials(self, layer: str, captures: Captures, ranks: int) -> list[Tensor]:
        """Return each rank's partial sums, (sequences, tokens, E)."""
        parts = zip(shards(captures[layer], ranks, -1), shards(self.weights[layer], ranks, 1), strict=True)
        return [F.linear(x.contiguous(), weight.contiguous()) for x, weight in parts]


def kurtosis(errors: Tensor) -> float:
    """Return the fourth moment over the squared second one of errors (N, E): of each feature around its mean, averaged.

    Features without an error do not count.
    """
    centred = (errors - errors.mean(0)).double()
    variances = centred.square().mean(0)
    used = variances > 0
    return float((centred[:, used].pow(4).mean(0) / variances[used].square()).mean())


def expected(ranges: Tensor) -> float:
    """Return the kurtosis of a sum of independent uniforms as wide as these ranges (ranks, E), averaged over features.

    It is 3 - 1.2 (sum of the fourth powers) / (sum of squares)^2, which is 3 - 1.2 / n for equal ones.
    """
    squares = ranges.double().square()
    return float((3 - 1.2 * squares.square().sum(0) / squares.sum(0).square()).mean())


def measured(form: Static | Ours, partials: Sequence[Tensor]) -> dict[str, float]:
    """Code the partial sums (N, E) of all ranks, and return statistics of their errors (see `measure`)."""
    errors = [form(x, rank) - x for rank, x in enumerate(partials)]
    total, exact = (sum(parts[1:], parts[0]) for parts in (errors, partials))
    alone, powers = ([_square(x) for x in parts] for parts in (errors, partials))
    found = {
        "kurtosis": kurtosis(total[:, form.rest]),
        "error": math.sqrt(_square(total) / _square(exact)),
        "error_of_rank": math.sqrt(statistics.fmean(a / p for a, p in zip(alone, powers, strict=True))),
        "cancelled": math.sqrt(_square(total) / sum(alone)),
    }
    return found | (_rounding(form, partials) if isinstance(form, Static) else {})


def _rounding(form: Static, partials: Sequence[Tensor]) -> dict[str, float]:
    """Round the partial sums to the steps of the published format without clipping."""
    rest = form.rest
    values = [x[:, rest] for x in partials]
    ranges = [each[rest] for each in form.ranges]
    errors = [to_grid(x, each / 7, _ENDLESS) - x for x, each in zip(values, ranges, strict=True)]
    outside = [(x.abs() > each).double().mean() for x, each in zip(values, ranges, strict=True)]
    return {
        "kurtosis_of_rounding": kurtosis(sum(errors[1:], errors[0])),
        "expected_here": expected(torch.stack(ranges)),
        "rounding": math.sqrt(sum(map(_square, errors)) / _square(sum(partials[1:], partials[0]))),
        "clipped": float(torch.stack(outside).mean()),
    }


def _square(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def measure(settings: RanksBenchmark, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Code the same products, split into more and more parts.

    Yields:
        A row for each format and number of ranks, over the boundaries: `model`, `candidate`, `ranks`, `kurtosis` (of
        the error of the summed output, without outlier features), `error` (of the sum, relative), `error_of_rank` (of a
        rank's partial sums, over these), `cancelled` (error of the sum over the square root of the ranks' summed
        squared errors: 1 if they are independent, the square root of their number if they are equal), and `layers`
        (`kurtosis` by boundary). The published format adds `kurtosis_of_rounding` and `rounding` (kurtosis and error
        without clipping), `layers_of_rounding` (that kurtosis by boundary), `expected` (3 - 1.2 / ranks),
        `expected_here` (the same for the ranks' actual ranges), and `clipped` (share of the coded values outside their
        ranges).
    """
    layers = Layers(settings)
    rows: list[Row] = []
    for name in settings.candidates:
        for ranks in settings.ranks:
            each: dict[str, dict[str, float]] = {}
            for layer in layers.weights:
                form = _CODED[name](layers.partials(layer, layers.calibration, ranks))
                each[layer] = measured(form, [x.flatten(0, 1) for x in layers.partials(layer, layers.held_out, ranks)])
            means = {
                key: (root_mean_square if key in _ERRORS else statistics.fmean)(
                    [values[key] for values in each.values()]
                )
                for key in next(iter(each.values()))
            }
            row = {
                "model": Path(settings.model).absolute().name, "candidate": name, "ranks": ranks, **means,
                "layers": {layer: values["kurtosis"] for layer, values in each.items()},
                "layers_of_rounding": {layer: values.get("kurtosis_of_rounding") for layer, values in each.items()},
                "expected": 3 - 1.2 / ranks if "expected_here" in means else None,
            }  # fmt: skip
            rows = [*rows, row]
            yield rows


COMMAND = Command(
    name="ranks",
    summary="How the quantization errors of 1 to 16 ranks cancel in a sum, on a model's real partial sums.",
    examples=("python -m benchmarks ranks my_model --text a.txt --calibration-text b.txt",),
    settings=RanksBenchmark,
    measure=measure,
    tables=(
        Table(
            title=lambda rows: f"Kurtosis of the errors of sums of {rows[0]['model']}, published format",
            rows=lambda rows: [row for row in rows if row["expected"] is not None],
            columns=(
                Column("ranks", "ranks"),
                Column("of\nrounding", "kurtosis_of_rounding", "{:.3f}"),
                Column("Irwin-Hall,\nequal ranges", "expected", "{:.3f}"),
                Column("these\nranges", "expected_here", "{:.3f}"),
                Column("with values\ncut", "kurtosis", "{:.2f}"),
                Column("share\ncut", "clipped", "{:.2%}"),
            ),
        ),
        Table(
            title=lambda rows: f"Errors of the sums of {rows[0]['model']}",
            columns=(
                Column("format", "candidate"),
                Column("ranks", "ranks"),
                Column("error\nof sum", "error", "{:.2%}"),
                Column("by\nrounding", "rounding", "{:.2%}"),
                Column("of a rank's\npartial sums", "error_of_rank", "{:.2%}"),
                Column("sum over\nindependent", "cancelled", "{:.3f}"),
            ),
        ),
    ),
)
