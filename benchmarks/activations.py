"""`python -m benchmarks activations`: error of a trained model's gradients by bits of saved activations.

The model is first trained at full precision: gradients of random weights mean little, because attention is still flat.
Then every method's gradients of the same samples are compared with PyTorch's, by layer type.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_, counted
from lowbit.activations.counting import layer_type
from lowbit.config import ConfigError, NonNegative, Positive, section
from lowbit.plan.measure import gradients, relative_error
from lowbit.report import Baseline, Column, Command, Row, Table
from lowbit.train.config import DataConfig, ModelConfig, OptimizerConfig
from lowbit.train.data import Data, load_data
from lowbit.train.model import build_model, vocabulary
from lowbit.train.single_process import model_loss, train_single_process
from lowbit_lab.bench.memory_run import modules_around
from lowbit_lab.bench.settings import Device, EachOnce, check_device
from lowbit_lab.bench.training import spread_evenly

PLAIN = "plain"
_ELSEWHERE: Any = {"norm": 16, "mlp": 16, "linear": 16}
_FOUR: Any = {"bits": 4, "attention": 16}
METHODS: dict[str, LayerAware | None] = {
    PLAIN: None,
    "default": LayerAware(),
    "norm-8": LayerAware(**_FOUR),
    "agoq": LayerAware.published(),
    "int4-uniform": LayerAware(bits=4, norm=4, attention=4),
    "int8-uniform": LayerAware(bits=8, attention=8),
    "attention-4": LayerAware(**_ELSEWHERE, attention=4),
    "attention-8": LayerAware(**_ELSEWHERE, attention=8),
    "norm-8+attention-4": LayerAware(bits=4, attention=4),
    "norm-8+attention-8": LayerAware(bits=4, attention=8),
}


@section()
class ActivationsBenchmark:
    """The model, its training, and the methods."""

    methods: Annotated[tuple[str, ...], EachOnce] = tuple(METHODS)[1:]
    """default: that of `compress_saved_`. norm-8: 4 bits, norms in 8. agoq: norms in 4 as well. int4-uniform: attention
    in 4 as well. int8-uniform: everything in 8. attention-4, attention-8: attention only. norm-8+attention-4,
    norm-8+attention-8: norm-8 and attention.
    PyTorch's own saved tensors are always measured."""
    sequences: Annotated[tuple[Annotated[int, Field(ge=2)], ...], EachOnce] = (256, 1024)
    """Tokens of a sample."""
    samples: Positive = 8
    """Held-out samples on which gradients are compared, one after the other."""
    batch: Positive = 2
    """Samples of a training step."""
    train_steps: NonNegative = 400
    """Training steps before the comparison, on samples of the longest sequence."""
    lr: float = 1e-3
    """Highest learning rate of this training."""
    device: Device = "cpu"
    """cuda: the current GPU."""
    model: ModelConfig = ModelConfig(dim=128, layers=4, heads=2)
    """Model to measure. A pretrained one is also trained for `train_steps`."""
    seed: NonNegative = 0
    """Seed of weights and samples."""
    text: tuple[str, ...] = ()
    """Files or folders to train on. If omitted, Python's standard library."""
    max_bytes: Positive = 4_000_000
    """Read at most this many bytes of text."""
    threads: Positive = 2
    """PyTorch threads."""

    def __post_init__(self) -> None:
        if unknown := set(self.methods) - set(METHODS):
            raise ConfigError(f"methods has {', '.join(sorted(unknown))}; allowed: {', '.join(METHODS)}")
        vocabulary(self.model, 256)

    def data(self, sequence: int) -> DataConfig:
        """Return the settings of the text, in samples of `sequence` tokens."""
        return DataConfig(
            text=self.text, tokenizer=self.model.pretrained or "bytes", batch=self.batch, max_bytes=self.max_bytes,
            sequence=sequence,
        )  # fmt: skip


def measure(settings: ActivationsBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Train the model, and measure.

    Yields:
        Rows, one for each sequence and method: `method`, `sequence`, `train_loss` (of the last tenth of the training
        steps; None without any), `saved_bytes` (by autograd for a sample, each storage once), `saved_vs_plain`,
        and `errors`, |g' - g| / |g| of every sample, for "all" parameters, by layer type, for each of attention's
        linear layers by name, and the "worst norm" alone. g are PyTorch's own gradients in float32.

    Raises:
        ConfigError: text, model or device that cannot be used.
    """
    check_device(settings.device)
    torch.set_num_threads(settings.threads)
    texts = {sequence: load_data(settings.data(sequence)) for sequence in settings.sequences}
    model, loss = _trained(settings, texts[max(settings.sequences)])
    rows: list[Row] = []
    for sequence, data in texts.items():
        ids = spread_evenly(settings.samples, len(data.held_out))
        batches = [data.held_out.batch(one) for one in ids.split(1)]
        exact = [gradients(model, lambda batch=batch: model_loss(model, *batch)) for batch in batches]
        for method in dict.fromkeys((PLAIN, *settings.methods)):
            rows.append({"sequence": sequence, **_measure(model, method, batches, exact), "train_loss": loss})
            yield rows


def _trained(settings: ActivationsBenchmark, data: Data) -> tuple[nn.Module, float | None]:
    """Train the model; return it in training mode, with the mean of its last losses."""
    vocab = vocabulary(settings.model, data.tokenizer.size)
    model = build_model(settings.model, vocab=vocab, sequence=max(settings.sequences), seed=settings.seed)
    nn.Module.to(model, torch.device(settings.device)).train()
    optimizer = OptimizerConfig(lr=settings.lr)
    losses = train_single_process(
        model, data.train, optimizer, steps=settings.train_steps, batch=settings.batch, seed=settings.seed
    )
    last = losses[-max(1, len(losses) // 10) :]
    return model, statistics.fmean(last) if last else None


def _measure(
    model: nn.Module, method: str, batches: Sequence[tuple[Tensor, Tensor]], exact: Sequence[dict[str, Tensor]]
) -> dict[str, Any]:
    """Measure bytes of the first sample and errors of all."""
    policy, groups = METHODS[method], _groups(model)
    compressed = compress_saved_(model, policy, report=False) if policy else None
    errors: dict[str, list[float]] = defaultdict(list)
    try:
        with counted(model) as saved:
            graph = model_loss(model, *batches[0])
        del graph
        for batch, wanted in zip(batches, exact, strict=True):
            given = gradients(model, lambda batch=batch: model_loss(model, *batch))
            for where, names in groups.items():
                errors[where].append(relative_error(given, {n: wanted[n] for n in names if n in wanted}))
            each = [relative_error(given, {n: wanted[n]}) for n in groups.get("norm", ()) if n in wanted]
            if each:
                errors["worst norm"].append(max(each))
    finally:
        if compressed is not None:
            compressed.remove()
    return {"method": method, "saved_bytes": saved.total, "errors": dict(errors)}


def _groups(model: nn.Module) -> dict[str, list[str]]:
    """Return names of parameters by place: all, a layer type, or one of attention's linear layers.

    Call it before the model is compressed, which replaces layers by other types.
    """
    names = [name for name, _ in model.named_parameters()]
    groups: dict[str, list[str]] = {"all": names}
    for name in names:
        path, module = modules_around(model, name), name.rpartition(".")[0]
        where = layer_type(path)
        if where == "linear" and any("attention" in type(around).__name__.lower() for around in path[:-1]):
            where = module.rpartition(".")[2]
        groups.setdefault(where, []).append(name)
    return groups


def summarized(rows: Sequence[Row]) -> list[Row]:
    """Return rows with medians of the errors by place, and `lowest` and `highest` of "all"."""
    return [
        {
            **row,
            **{where: statistics.median(errors) for where, errors in row["errors"].items()},
            "lowest": min(row["errors"]["all"]),
            "highest": max(row["errors"]["all"]),
        }
        for row in rows
    ]


def _places(rows: Sequence[Row]) -> list[Column]:
    """Return a column for each layer type and linear layer of attention."""
    names = dict.fromkeys(name for row in rows for name in row["errors"] if name != "all")
    return [*PLACE, *(Column(name, name, "{:.4f}") for name in names)]


PLACE = (Column("sequence", "sequence"), Column("method", "method"))
COMMAND = Command(
    name="benchmarks activations",
    summary="Error of a trained model's gradients by bits of saved activations.",
    examples=(
        "python -m benchmarks activations --method norm-8,agoq --sequence 256",
    ),
    settings=ActivationsBenchmark,
    measure=measure,
    baselines=[Baseline(field="saved_vs_plain", value="saved_bytes", to={"method": PLAIN}, alike=("sequence",))],
    tables=[
        Table(
            title="Bytes saved, and relative error of gradients",
            rows=summarized,
            columns=[
                *PLACE,
                Column("saved\nMB", lambda row: row["saved_bytes"] / 1e6, "{:.2f}"),
                Column("of\nplain", "saved_vs_plain", "{:.0%}"),
                Column("error,\nmedian", "all", "{:.4f}"),
                Column("\nlowest", "lowest", "{:.4f}"),
                Column("\nhighest", "highest", "{:.4f}"),
                Column("in training", "train_loss", "{:.4f}"),
            ],
        ),
        Table(
            title="Medians, by layer type and linear layer of attention",
            rows=lambda rows: [row for row in summarized(rows) if row["method"] != PLAIN],
            columns=_places,
        ),
    ],
)  # fmt: skip
