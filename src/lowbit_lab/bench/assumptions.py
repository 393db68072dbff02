"""`lowbit bench assumptions`: what proofs of convergence assume of a boundary format, measured while a model trains.

Such proofs, like that of the TAH-Quant paper (arXiv 2506.01352), bound the error of the format, or of the gradient
computed through it, and conclude that the squared norm of the gradient, averaged over T steps, falls as O(1/sqrt(T)).
Here a model trains with the format at every boundary of an emulated pipeline, and both are measured.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowbit.codecs import Codec, parse, parse_pair
from lowbit.codecs.names import pair_name
from lowbit.pipeline import Traffic, emulate_
from lowbit_lab.bench.codecs import ends_of
from lowbit_lab.bench.settings import AtLeastTwo, Device, Names, check_device, check_messages, check_plain, check_stages
from lowbit_lab.bench.training import TrainingRecipe, boundary_modules, prepare, spread_evenly, traffic_between
from lowbit_lab.charts import Lines
from lowbit_lab.charts.style import row_name
from lowbit_run.config import ConfigError, NonNegative, Positive, section
from lowbit_run.report import Column, Command, Row, Table
from lowbit_run.train.answers import Answers
from lowbit_run.train.config import DataConfig, ModelConfig, OptimizerConfig
from lowbit_run.train.data import Windows
from lowbit_run.train.model import count_layers
from lowbit_run.train.single_process import Loss, PlainGradients, train_single_process

EXTREMES: dict[str, Callable[[list[float]], float]] = {"lowest": min, "highest": max}
WAYS = ("forward", "backward")
Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 (samples, sequence) each."""


@section()
class AssumptionsBenchmark:
    """Formats, and the training run in which they are measured."""

    boundaries: Names = ("fp32", "int4", "tah-quant", "tah-quant-published", "transform")
    """Formats of activations, by name or in full, or of both ways, such as "int4 / int6". tah-quant is our setting of
    TAH-Quant, tah-quant-published that of the paper's v2 (bits by tile), tah-quant-published-token that of its v1 (bits
    by token)."""
    backward: str = ""
    """Format of gradients next to low-bit activations, unless `boundaries` names it. If omitted, the default of each
    format. fp32, bf16 and fp16 are used both ways."""
    seeds: tuple[NonNegative, ...] = (0,)
    """Seeds of weights and data order."""
    model: ModelConfig = ModelConfig(dim=128, layers=4)
    """Model to train."""
    data: DataConfig = DataConfig(sequence=128, batch=4)
    """Text to train on, and the size of a batch."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rates."""
    stages: AtLeastTwo = 4
    """Stages of the emulated pipeline. It has one boundary fewer."""
    steps: Positive = 150
    """Optimizer steps."""
    warmup_steps: NonNegative = 30
    """Number of first steps at full precision. Nothing is measured in them."""
    every: Positive = 10
    """Number of steps between two comparisons of the gradient with the exact one."""
    repeats: AtLeastTwo = 8
    """How often each message of these steps is sent again, to find the part of its error that never changes."""
    norm_windows: AtLeastTwo = 16
    """Windows of the text for computing the squared norm of the gradient, the same ones every time."""
    device: Device = "cpu"
    """Where to train."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of matrix products."""

    def __post_init__(self) -> None:
        if self.backward:
            parse(self.backward)
        for boundary in self.boundaries:
            codecs = parse_pair(boundary, self.backward)
            for codec in codecs:
                check_plain("boundaries", boundary, codec)
            check_messages(boundary, codecs, self.model, self.data.batch, self.data.sequence)
        if self.warmup_steps >= self.steps:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; allowed: fewer than steps ({self.steps})")


def measure(settings: AssumptionsBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Train with every format and seed that `earlier` rows lack.

    Yields:
        Rows with `boundary`, `forward` and `backward` (its formats in full) and `seed`; in each direction `bits_*`,
        `error_*` (|y - x|^2 / |x|^2 of a message x that arrives as y, mean over all), `error_*_highest`, `bias_*`
        (share of the error's energy that repeats whenever a tensor is sent) and `constant_*` (share that is the
        same for all tokens of all messages; both are None without an error); `cosine`, `projection` and
        `gradient_error` (see `aligned`; means over all comparisons), `cosine_lowest`,
        `projection_lowest`, `gradient_error_highest`; `curve` (pairs of T and the mean squared norm of the gradient
        over the first T coded steps) and `slope` (of its logarithms).
    """
    check_device(settings.device)
    check_stages(settings.stages, count_layers(settings.model))
    rows = list(earlier)
    known = [(row["boundary"], row["seed"]) for row in rows]
    yield rows
    for seed in settings.seeds:
        for boundary in settings.boundaries:
            if (boundary, seed) not in known:
                rows.append(observe(settings, boundary, seed))
                yield rows


def observe(settings: AssumptionsBenchmark, boundary: str, seed: int) -> dict[str, Any]:
    """Train once, and return the row."""
    recipe = TrainingRecipe(
        model=settings.model, data=settings.data, steps=settings.steps, device=settings.device,
        precision=settings.precision,
    )  # fmt: skip
    data, model = prepare(recipe, seed)
    codecs = parse_pair(boundary, settings.backward)
    observed = Observed(
        model, boundary_modules(model, settings.stages), codecs, warmup_steps=settings.warmup_steps,
        every=settings.every, repeats=settings.repeats, fixed=_fixed(data.train, settings.norm_windows),
    )  # fmt: skip
    train_single_process(
        model, data.train, settings.optimizer, steps=settings.steps, batch=settings.data.batch, seed=seed,
        autocast=recipe.autocast, gradients=observed,
    )  # fmt: skip
    observed.close()
    row: dict[str, Any] = {"boundary": boundary, "seed": seed, **observed.bits()}
    for way, codec in zip(WAYS, codecs, strict=True):
        row |= {way: repr(codec), **_errors(way, observed.meters[way])}
    for name, worst in (("cosine", "lowest"), ("projection", "lowest"), ("gradient_error", "highest")):
        values = [one[name] for one in observed.alignment]
        row |= {name: statistics.fmean(values), f"{name}_{worst}": EXTREMES[worst](values)}
    curve = running(observed.norms, settings.every)
    return row | {"curve": [list(point) for point in curve], "slope": slope_of(curve)}


def _fixed(windows: Windows | Answers, count: int) -> tuple[Batch, Batch]:
    """Return two batches that share no window, spread over the text."""
    ids = spread_evenly(count, len(windows))
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(windows)} windows to train on; allowed: at least 2")
    return windows.batch(ids[::2]), windows.batch(ids[1::2])


def _errors(way: str, meters: "Sequence[ErrorMeter]") -> dict[str, Any]:
    """Return errors and bias in one direction, over all boundaries."""
    errors = [error for meter in meters for error in meter.errors]
    repeated = [share for meter in meters for share in meter.repeated]
    constant = [share for meter in meters if (share := meter.constant()) is not None]
    return {
        f"error_{way}": statistics.fmean(errors) if errors else None,
        f"error_{way}_highest": max(errors, default=None),
        f"bias_{way}": statistics.fmean(repeated) if repeated else None,
        f"constant_{way}": statistics.fmean(constant) if constant else None,
    }


@dataclass
class ErrorMeter:
    """Measures the error of messages that cross one boundary in one direction.

    Args:
        codec: the format.
        repeats: how often `add(again=True)` sends a tensor.

    Attributes:
        errors: |y - x|^2 / |x|^2 of each message x that arrived as y.
        repeated: `bias_of` of the messages that were sent again.
    """

    codec: Codec
    repeats: int
    errors: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    # Sums of errors, of messages with even and with odd numbers.
    _sums: list[Tensor] = field(default_factory=lambda: [torch.zeros(()), torch.zeros(())])
    _tokens: list[int] = field(default_factory=lambda: [0, 0])
    _energy: float = 0.0

    def add(self, sent: Tensor, arrived: Tensor, *, again: bool = False) -> None:
        """Count a message (..., C); `again`: send it `repeats` times more, through separate sessions."""
        x = sent.detach().double()
        error = (arrived.detach().double() - x).reshape(-1, x.shape[-1])
        signal, noise = float(x.square().sum()), float(error.square().sum())
        if not signal:
            return
        half = len(self.errors) % 2
        self.errors.append(noise / signal)
        self._sums[half] = self._sums[half].to(error.device) + error.sum(0)
        self._tokens[half] += len(error)
        self._energy += noise
        if again and noise:
            self.repeated.append(bias_of(self.codec, sent.detach(), self.repeats))

    def constant(self) -> float | None:
        """Share of the error's energy in its mean over all tokens of all messages; None without an error.

        Means over every second message are multiplied with those of the rest, so unbiased noise gives 0 on average.
        """
        if not (all(self._tokens) and self._energy):
            return None
        first, second = (total / tokens for total, tokens in zip(self._sums, self._tokens, strict=True))
        return float(first @ second) * sum(self._tokens) / self._energy


def bias_of(codec: Codec, x: Tensor, repeats: int) -> float:
    """Return the share of the error's energy that repeats whenever a tensor is sent: 1 if all does, 0 if E[y] = x.

    The tensor goes through new sessions repeatedly. Their first message, which may choose directions, does not count.
    """
    sender, receiver = ends_of(codec, x)
    receiver.decode(sender.encode(x))
    total, energy = torch.zeros_like(x, dtype=torch.float64), 0.0
    for _ in range(repeats):
        error = receiver.decode(sender.encode(x)).double() - x.double()
        total += error
        energy += float(error.square().sum())
    return (float(total.square().sum()) - energy) / ((repeats - 1) * energy) if energy else 0.0


class Observed(PlainGradients):
    """Computes gradients of a model with low-bit boundaries and compares them with exact ones from time to time.

    Args:
        model: in training mode. It contains the codecs until `close`.
        at: names of the modules that end a stage.
        codecs: of activations and gradients.
        warmup_steps: number of first steps at full precision. Nothing is measured in them.
        every: steps from one comparison to the next; the first comparison is in the first coded step.
        repeats: how often messages of these steps are sent again.
        fixed: two batches for the squared norm of the exact gradient.

    Attributes:
        meters: by direction, one for each boundary.
        alignment: results of `aligned`, one for each comparison.
        norms: pairs of the coded steps before a comparison and the squared norm there, computed as the product of the
            exact gradients of both fixed batches: their noise is independent, so the product is unbiased.
    """

    def __init__(
        self, model: nn.Module, at: Sequence[str], codecs: tuple[Codec, Codec],
        *, warmup_steps: int, every: int, repeats: int, fixed: tuple[Batch, Batch],
    ) -> None:  # fmt: skip
        super().__init__(model)
        self._modules = [model.get_submodule(name) for name in at]
        self._warmup_steps, self._every, self._fixed = warmup_steps, every, fixed
        self._steps = 0
        self._repeating = False
        self._sent: dict[int, Tensor] = {}  # tensors sent in this direction, by boundary
        self._before = Traffic()
        self.meters = {way: [ErrorMeter(codec, repeats) for _ in at] for way, codec in zip(WAYS, codecs, strict=True)}
        self.alignment: list[dict[str, float]] = []
        self.norms: list[tuple[int, float]] = []
        self._handles = [m.register_forward_hook(self._hook(i, arrives=False)) for i, m in enumerate(self._modules)]
        self._emulation = emulate_(
            model, at=at, forward=codecs[0], backward=codecs[1], warmup_steps=warmup_steps, in_evaluation=False
        )
        self._handles += [m.register_forward_hook(self._hook(i, arrives=True)) for i, m in enumerate(self._modules)]

    def backward(self, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
        """Measure every message after the warm-up, and compare gradients every `every` steps."""
        coded = self._steps - self._warmup_steps
        if coded == 0:
            self._before = replace(self._emulation.traffic)
        self._repeating = coded >= 0 and coded % self._every == 0
        exact = torch.zeros(0)
        if self._repeating:
            exact = self._exact(loss, inputs, targets)
            first, second = (self._exact(loss, *batch) for batch in self._fixed)
            self.norms.append((coded, float(first @ second)))
        mean = super().backward(loss, inputs, targets)
        if self._repeating:
            self.alignment.append(aligned(exact, self._gradient()))
        self._emulation.step()
        self._steps += 1
        return mean

    def bits(self) -> dict[str, float]:
        """Return the bits per element in each direction after the warm-up, every byte counted."""
        sent = traffic_between(self._before, self._emulation.traffic)
        return {"bits_forward": sent.forward_bits, "bits_backward": sent.backward_bits}

    def close(self) -> None:
        """Remove codecs and hooks from the model."""
        self._emulation.remove()
        for handle in self._handles:
            handle.remove()

    def _exact(self, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradient without codecs, with the same dropout as in the computation that follows."""
        for module in self._modules:
            module.training = False  # only its own flag, not its submodules': the emulation then skips it
        try:
            with torch.random.fork_rng():
                loss(inputs, targets).backward()
        finally:
            for module in self._modules:
                module.training = True
        gradient = self._gradient()
        self.model.zero_grad()
        return gradient

    def _gradient(self) -> Tensor:
        """Copy all gradients into one vector."""
        parts = (p.grad for p in self.model.parameters() if p.grad is not None)
        return torch.cat([part.detach().double().flatten() for part in parts])

    def _hook(self, boundary: int, *, arrives: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not module.training or self._steps < self._warmup_steps:
                return
            x = output if isinstance(output, Tensor) else output[0]
            if arrives:  # count the activation, and note its gradient when that leaves
                self._count("forward", boundary, x)
                x.register_hook(lambda gradient: self._sent.update({boundary: gradient}))
            else:  # note the activation, and count its gradient when that arrives
                self._sent[boundary] = x.detach()
                x.register_hook(lambda gradient: self._count("backward", boundary, gradient))

        return hook

    def _count(self, way: str, boundary: int, arrived: Tensor) -> None:
        with torch.no_grad(), torch.autocast(arrived.device.type, enabled=False):
            self.meters[way][boundary].add(self._sent.pop(boundary), arrived, again=self._repeating)


def aligned(exact: Tensor, coded: Tensor) -> dict[str, float]:
    """Compare the gradient h that came through codecs with the exact one, g.

    Returns:
        `cosine`; `projection`, <g, h> / |g|^2; `gradient_error`, |h - g|^2 / |g|^2.
    """
    square, product = float(exact @ exact), float(exact @ coded)
    return {
        "cosine": product / (float(coded.norm()) * square**0.5),
        "projection": product / square,
        "gradient_error": float((coded - exact).square().sum()) / square,
    }


def running(norms: Sequence[tuple[int, float]], every: int) -> list[tuple[int, float]]:
    """Return running means of the squared norm from the first coded step on, each with the number of steps so far."""
    totals = itertools.accumulate(norm for _, norm in norms)
    return [(step + every, total / (i + 1)) for i, ((step, _), total) in enumerate(zip(norms, totals, strict=True))]


def slope_of(curve: Sequence[tuple[int, float]]) -> float | None:
    """Fit a straight line to logarithms and return its slope; None for fewer than three points, or one that is <= 0."""
    if len(curve) < 3 or min(value for _, value in curve) <= 0:
        return None
    xs, ys = (torch.tensor(column, dtype=torch.float64).log().tolist() for column in zip(*curve, strict=True))
    return statistics.linear_regression(xs, ys).slope


def summarized(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each boundary: means over the seeds, and extremes of lowest and highest values."""
    result = []
    for boundary in dict.fromkeys(row["boundary"] for row in rows):
        group = [row for row in rows if row["boundary"] == boundary]
        one: dict[str, Any] = {"boundary": boundary, "name": pair_name(boundary), "seeds": len(group)}
        for name, example in group[0].items():
            values = [row[name] for row in group if row[name] is not None]
            if name in ("boundary", "seed", "curve") or isinstance(example, str):
                continue
            merge = EXTREMES.get(name.rpartition("_")[2], statistics.fmean)
            one[name] = merge(values) if values else None
        one["curve"] = [
            (points[0][0], statistics.fmean(norm for _, norm in points))
            for points in zip(*(row["curve"] for row in group), strict=False)
        ]
        result.append(one)
    return result


def _directions(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each boundary format and direction."""
    return [
        {"direction": way} | {name.replace(f"_{way}", ""): value for name, value in row.items()}
        for row in summarized(rows)
        for way in WAYS
    ]


def _finding(rows: Sequence[Row]) -> str:
    slopes = {row["boundary"]: row["slope"] for row in rows if row["slope"] is not None}
    exact = slopes.pop("fp32", None)
    if exact is None or not slopes:
        return "Mean squared norm of the gradient by steps"
    low, high = min(slopes.values()), max(slopes.values())
    return f"Slope of the mean squared gradient norm: {low:+.2f} to {high:+.2f}; {exact:+.2f} with FP32"


COMMAND = Command(
    name="bench assumptions",
    summary="What proofs of convergence assume of a boundary format, measured while a model trains.",
    examples=(
        "lowbit bench assumptions --boundary int4,transform --steps 60",
        "lowbit bench assumptions --data.text train.txt --json assumptions.json",
    ),
    settings=AssumptionsBenchmark,
    measure=measure,
    key=("boundary", "seed"),
    free=("boundaries", "backward", "seeds"),
    tables=[
        Table(
            title="Error of messages, |y - x|²/|x|² (contraction: below 1), and shares of its energy that are bias",
            rows=_directions,
            gap="name",
            columns=[
                Column("boundary", "name", row_name),
                Column("direction", "direction"),
                Column("bits", "bits", "{:.2f}"),
                Column("error,\nmean", "error", "{:.2g}"),
                Column("error,\nhighest", "error_highest", "{:.2g}"),
                Column("same for\na tensor", "bias", "{:.0%}"),
                Column("same for\nall tokens", "constant", "{:z.2%}"),
            ],
        ),
        Table(
            title="Gradient h through the codecs vs. the exact one g, and slope of the mean of |g|² (proofs: -0.5)",
            rows=summarized,
            columns=[
                Column("boundary", "name", row_name),
                Column("cosine", "cosine", "{:.4f}"),
                Column("lowest", "cosine_lowest", "{:.4f}"),
                Column("<g,h>\n/|g|²", "projection", "{:.4f}"),
                Column("lowest", "projection_lowest", "{:.4f}"),
                Column("|h-g|²\n/|g|²", "gradient_error", "{:.2g}"),
                Column("highest", "gradient_error_highest", "{:.2g}"),
                Column("slope", "slope", "{:+.2f}"),
                Column("seeds", "seeds"),
            ],
        ),
    ],
    charts=[
        Lines(
            rows=summarized, series="boundary", curve="curve", x_label="steps T with low-bit boundaries",
            label="mean of |g|² over T steps", title=_finding,
            subtitle="Exact gradient at the weights of each run. Slopes are those of the logarithms.",
        )
    ],
)  # fmt: skip
