"""`python -m benchmarks sums`: candidates for the format of tensor-parallel sums, on a model's real partial sums.

The partial sums of every boundary and emulated rank are captured once on calibration text and once on held-out text.
All candidates code the same captures. Then the model runs with each of them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from benchmarks.sum_candidates import (
    CANDIDATES,
    FORMATS,
    INPUTS,
    MIXED,
    Format,
    distortion,
    inputs_in_8_bits,
    summed,
)
from lowbit.config import ConfigError, Positive, section
from lowbit.report import Column, Command, Row, Table
from lowbit.tensor_parallel import emulate_tensor_parallel_, model_sums
from lowbit.tensor_parallel.plan import shards
from lowbit_lab.bench.bound import spectrum
from lowbit_lab.charts import Bars
from lowbit_lab.evaluate import EvaluationConfig, Sequences, loading, neighbours, perplexity, text
from lowbit_lab.evaluate.errors import root_mean_square

Captures = dict[str, list[Tensor]]
"""By layer and rank: float32 (sequences, tokens, features)."""


@section()
class SumsBenchmark:
    """A model, texts and candidates."""

    model: str
    """Local folder with a Hugging Face model or encoder."""
    text: tuple[str, ...] = ()
    """Held-out text. If omitted, the last 5 % of Python's standard library."""
    calibration_text: tuple[str, ...] = ()
    """Text to calibrate on. If omitted, the rest of it."""
    candidates: tuple[str, ...] = CANDIDATES
    """static: the paper's; static-1.2: its ranges times 1.2; zero-point; gain: a gain for each token times a static
    scale; gain-mean: after the static mean is subtracted; gaussian: the same with the best 16 levels for a Gaussian;
    groups-64; int8: in groups of 64; gain-8: with codes of 8 bits;
    feature-int4, -int5, -int8: `lowbit.codecs.FeatureInt`; mixed: gaussian or gain-8 by boundary, up to
    `budget`; inputs: attention by the inputs of its last layer, in 8 bits, the rest as gaussian."""
    ranks: Annotated[int, Field(ge=2)] = 2
    """Emulated tensor-parallel ranks."""
    algorithm: Literal["one_shot", "two_shot"] = "one_shot"
    """All-reduce algorithm; two_shot codes the sum once more."""
    budget: Annotated[float, Field(gt=4)] = 5.0
    """Bits per value of mixed."""
    length: Annotated[int, Field(ge=8)] = 128
    """Tokens of a sequence."""
    sequences: Positive = 32
    """Sequences that are captured of either text."""
    sentences: Annotated[int, Field(ge=0)] = 1000
    """Sentences of an encoder whose neighbours are compared; 0: none."""
    windows: Annotated[int, Field(ge=0)] = 16
    """Sequences of 4 times the length that a language model predicts; 0: none."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.candidates if name not in CANDIDATES]:
            raise ConfigError(f"candidate is {unknown[0]!r}; allowed: {', '.join(CANDIDATES)}")

    def reading(self, *, held_out: bool, length: int | None = None) -> EvaluationConfig:
        """Return the settings by which the text is read."""
        texts = self.text if held_out else self.calibration_text
        return EvaluationConfig(model=self.model, text=texts, length=length or self.length, tps=(self.ranks,))


@dataclass(kw_only=True)
class Coded:
    """A candidate on all boundaries."""

    formats: Mapping[str, Format]
    inputs: frozenset[str] = frozenset()  # boundaries that send their inputs instead
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    algorithm: str = "one_shot"

    def __call__(self, layer: str, partials: Sequence[Tensor], given: Sequence[Tensor]) -> Tensor:
        """Return the sum (tokens, E) of partial sums, or of the products of coded inputs."""
        if layer not in self.inputs:
            return summed(self.formats[layer], partials, self.algorithm)
        weights = shards(self.weights[layer], len(partials), 1)
        products = [inputs_in_8_bits(x) @ w.float().t() for x, w in zip(given, weights, strict=True)]
        return sum(products[1:], products[0])

    def bits_per_value(self, ranks: int) -> float:
        """Mean over the boundaries; inputs count as what two_shot would send for the same bytes on these ranks."""
        return statistics.fmean(
            self._input_bits(layer, ranks) if layer in self.inputs else form.bits_per_value
            for layer, form in self.formats.items()
        )

    def _input_bits(self, layer: str, ranks: int) -> float:
        outputs, inputs = self.weights[layer].shape
        bits = (8 * inputs / ranks + 16) / outputs
        return bits * ranks / 2 if self.algorithm == "two_shot" else bits


class Bench:
    """The model and its captures."""

    def __init__(self, settings: SumsBenchmark) -> None:
        self.settings = settings
        device = loading.prepare(settings.reading(held_out=False))
        self.model: Any = loading.load_model(settings.model, "float32", device)
        self.encoder = loading.model_kind(settings.model) != loading.CAUSAL
        self.layers: Any = {name: summed.module for name, summed in model_sums(self.model).items()}
        self.given: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(functools.partial(self._note, name))
        self.calibration, _ = self.capture(held_out=False)
        self.held_out, self.inputs = self.capture(held_out=True)

    def _note(self, name: str, layer: object, args: tuple[Tensor, ...]) -> None:
        self.given[name] = args[0]

    def read(self, *, held_out: bool, length: int | None = None) -> tuple[Sequences, Any]:
        """Read a text as the model does."""
        reading = self.settings.reading(held_out=held_out, length=length)
        return text.read(reading, held_out=held_out, encoder=self.encoder)

    @torch.no_grad()
    def capture(self, *, held_out: bool) -> tuple[Captures, Captures]:
        """Return partial sums and the inputs of their layers."""
        sums: Captures = {name: [] for name in self.layers}
        inputs: Captures = {name: [] for name in self.layers}

        def see(layer: str, partials: Sequence[Tensor], total: Tensor) -> None:
            sums[layer].append(torch.stack([partial.float() for partial in partials]))
            parts = shards(self.given[layer], len(partials), -1)
            if "attention" in kind(layer):
                inputs[layer].append(torch.stack([part.float() for part in parts]))

        sequences, _ = self.read(held_out=held_out)
        with emulate_tensor_parallel_(self.model, self.settings.ranks, watch=see):
            for drawn in sequences.draw(self.settings.sequences, 0):
                self.model(drawn[None])
        whole = [
            {name: list(torch.cat(parts, 1)) for name, parts in captures.items() if parts}
            for captures in (sums, inputs)
        ]
        return whole[0], whole[1]

    def candidate(self, name: str) -> Coded:
        """Calibrate a candidate."""
        algorithm = self.settings.algorithm
        if name == MIXED:
            return Coded(formats=self._mixed(), algorithm=algorithm)
        build = FORMATS["gaussian" if name == INPUTS else name]
        formats = {layer: build(with_sum(parts)) for layer, parts in self.calibration.items()}
        weights = {layer: self.layers[layer].weight for layer in self.inputs}
        inputs = frozenset(self.inputs) if name == INPUTS else frozenset()
        return Coded(formats=formats, inputs=inputs, weights=weights, algorithm=algorithm)

    def _mixed(self) -> dict[str, Format]:
        """Give the boundaries with the largest error by token 8 bits, while the budget lasts."""
        few, many = self.candidate("gaussian"), self.candidate("gain-8")
        errors = {layer: self.errors(few, layer, self.calibration)[1] for layer in self.layers}
        formats = dict(few.formats)
        for layer in sorted(errors, key=errors.__getitem__, reverse=True):
            wider = {**formats, layer: many.formats[layer]}
            if statistics.fmean(form.bits_per_value for form in wider.values()) <= self.settings.budget:
                formats = wider
        return formats

    @torch.no_grad()
    def errors(self, coded: Coded, layer: str, captures: Captures | None = None) -> tuple[float, float]:
        """Return the error of the sums of a boundary, by power and with each token alike."""
        partials = [part.flatten(0, 1) for part in (captures or self.held_out)[layer]]
        given = [part.flatten(0, 1) for part in self.inputs.get(layer, [])]
        exact = sum(partials[1:], partials[0])
        error, power = (x.square().sum(1).double() for x in (coded(layer, partials, given) - exact, exact))
        used = power > 0
        return float((error.sum() / power.sum()).sqrt()), float((error[used] / power[used]).mean().sqrt())

    def quality(self) -> Callable[[Coded | None], dict[str, float]]:
        """Return a function that runs the model with a candidate; None: with exact sums."""
        settings = self.settings
        if self.encoder:
            pooling, (_, tokenizer) = neighbours.Pooling.read(settings.model), self.read(held_out=True)
            documents = text.documents(settings.reading(held_out=True), held_out=True)
            texts = neighbours.sentences(documents, settings.sentences)
            exact: list[Tensor] = []

            def compare(coded: Coded | None) -> dict[str, float]:
                with self._running(coded):
                    vectors = neighbours.embed(self.model, tokenizer.hugging_face(), texts, pooling)
                exact.append(vectors)
                agreement = neighbours.agreement(exact[0], vectors)
                return {name: agreement[name] for name in ("nearest", "nearest_10")}

            return compare if settings.sentences else lambda coded: {}
        sequences, _ = self.read(held_out=True, length=4 * settings.length)

        def predict(coded: Coded | None) -> dict[str, float]:
            with self._running(coded):
                return {"perplexity": perplexity(self.model, sequences, count=settings.windows).perplexity}

        return predict if settings.windows else lambda coded: {}

    def _running(self, coded: Coded | None) -> Any:
        """Let the model add up in a candidate's format, which overwrites each exact sum."""

        def see(layer: str, partials: Sequence[Tensor], total: Tensor) -> None:
            if coded is not None:
                rows = [partial.flatten(0, -2) for partial in partials]
                given = [x.flatten(0, -2) for x in shards(self.given[layer], len(partials), -1)]
                total.copy_(coded(layer, rows, given).view_as(total))

        return emulate_tensor_parallel_(self.model, self.settings.ranks, watch=see)

    def bound(self, bits: float, *, correlated: bool) -> dict[str, tuple[float, float]]:
        """Return the least error of Gaussian partial sums with the captures' variances, by boundary."""
        least: dict[str, tuple[float, float]] = {}
        for layer, parts in self.held_out.items():
            tokens = [part.flatten(0, 1) for part in parts]
            variances = [spectrum(x) if correlated else x.double().square().mean(0) for x in tokens]
            power = float(sum(tokens[1:], tokens[0]).double().square().mean())
            error = (sum(distortion(v, bits) for v in variances) / power) ** 0.5
            least[layer] = (error, float("nan"))
        return least


def with_sum(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the captures of all ranks, and their sum."""
    return [*parts, sum(parts[1:], parts[0])]


def kind(layer: str) -> str:
    """Return "attention" or "feed-forward"."""
    return "attention" if any(name in layer for name in ("attention", "attn")) else "feed-forward"


def measure(settings: SumsBenchmark, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Code the captures with every candidate, and run the model with it.

    Yields:
        A row for each candidate and for the bounds (one_shot only), with `candidate`, `model`, `ranks`, `bits`,
        `error` (relative root mean square of the sums over the boundaries), `token_error` (with each token alike),
        `attention` and `feed_forward` (`error` of these boundaries), `layers` (by boundary), and for encoders
        `nearest` and `nearest_10` (shares of neighbours kept), for language models `perplexity` and `kept`.
    """
    bench = Bench(settings)
    run = bench.quality()
    exact = run(None)
    rows: list[Row] = []

    def row(name: str, bits: float, errors: Mapping[str, tuple[float, float]], quality: Mapping[str, float]) -> Row:
        by_power = {layer: power for layer, (power, _) in errors.items()}
        halves = {half: [e for layer, e in by_power.items() if kind(layer) == half] for half in map(kind, by_power)}
        kept = exact["perplexity"] / quality["perplexity"] if "perplexity" in quality else None
        tokens = root_mean_square(token for _, token in errors.values())
        return {
            "candidate": name, "model": Path(settings.model).absolute().name, "ranks": settings.ranks,
            "algorithm": settings.algorithm, "bits": bits, "error": root_mean_square(by_power.values()),
            "token_error": tokens if tokens == tokens else None, "layers": by_power,
            "attention": root_mean_square(halves.get("attention", ())),
            "feed_forward": root_mean_square(halves.get("feed-forward", ())), "kept": kept, **quality,
        }  # fmt: skip

    for name in settings.candidates:
        coded = bench.candidate(name)
        errors = {layer: bench.errors(coded, layer) for layer in bench.layers}
        rows = [*rows, row(name, coded.bits_per_value(settings.ranks), errors, run(coded))]
        yield rows
    if settings.algorithm == "one_shot":
        bits = 4 + 12 / 64
        for name, correlated in (("bound, features independent", False), ("bound, features correlated", True)):
            rows = [*rows, row(name, bits, bench.bound(bits, correlated=correlated), {})]
        yield rows


def _title(rows: Sequence[Row]) -> str:
    row = rows[0]
    return f"Partial sums of {row['model']} on {row['ranks']} ranks, {row['algorithm']}: error by candidate"


COMMAND = Command(
    name="sums",
    summary="Candidates for the format of tensor-parallel sums, on a model's real partial sums, beside the bound.",
    examples=("python -m benchmarks sums my_model --text a.txt --calibration-text b.txt",),
    settings=SumsBenchmark,
    measure=measure,
    tables=(
        Table(
            title=_title,
            columns=(
                Column("candidate", "candidate"),
                Column("bits per\nvalue", "bits", "{:.4g}"),
                Column("error", "error", "{:.2%}"),
                Column("atten-\ntion", "attention", "{:.2%}"),
                Column("feed-\nforward", "feed_forward", "{:.2%}"),
                Column("tokens\nalike", "token_error", "{:.2%}"),
                Column("nearest\nkept", "nearest", "{:.1%}"),
                Column("10 nearest\nkept", "nearest_10", "{:.1%}"),
                Column("perplex-\nity kept", "kept", "{:.2%}"),
            ),
        ),
    ),
    charts=(
        Bars(
            title="Error of the sums by candidate",
            group="model",
            series="candidate",
            y=lambda row: 100 * row["error"],
            label="relative error of the sums, %",
        ),
    ),
)
