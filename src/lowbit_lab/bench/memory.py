"""`lowbit bench memory`: memory of training, and how much low-bit activations save.

Every method trains the same model from the same weights on the same tokens, in its own process. On a CPU the peak is
that of the process's resident pages in a step, minus those before the model was created; on a GPU, the allocator's.
"""

import dataclasses
import importlib.util
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from lowbit_lab.bench.settings import AtLeastTwo, Device, EachOnce, check_device, megabytes
from lowbit_lab.bench.workers import Workers
from lowbit_lab.charts import Stacks
from lowbit_run.config import NonNegative, Positive, section
from lowbit_run.report import Baseline, Column, Command, Row, Table
from lowbit_run.train.config import DataConfig, ModelConfig
from lowbit_run.train.data import load_data
from lowbit_run.train.model import vocabulary
from lowbit_run.train.optim import check_torchao

log = logging.getLogger(__name__)

Method = Literal[
    "bf16", "checkpoint", "fp8", "int4-uniform", "int4", "low-bit", "low-bit+8bit", "bf16+8bit-gradients",
    "bf16+8bit-optimizer", "int4+8bit-gradients", "agoq",
]  # fmt: skip
METHODS = get_args(Method)
DEPTH_METHODS = ("bf16", "checkpoint", "low-bit", "checkpoint+low-bit", "plan")
# Without these, glibc keeps freed memory, and the process appears as large as its peak.
_EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@section()
class MemoryBenchmark:
    """The model, how it is trained, and the methods."""

    methods: Annotated[tuple[Method, ...], EachOnce] = METHODS
    """bf16: PyTorch's default. checkpoint: gradient checkpointing of decoder layers. fp8: everything saved in 8 bits.
    int4-uniform: everything in 4 bits. int4: everything but attention. low-bit: `compress_saved_` with its defaults.
    low-bit+8bit: also gradients and AdamW in 8 bits. agoq: AGoQ as published, that is int4 with both in 8 bits,
    whatever `bits` is. Its parts: int4, bf16+8bit-gradients, bf16+8bit-optimizer, int4+8bit-gradients."""
    sequences: Annotated[tuple[Positive, ...], EachOnce] = (1024,)
    """Tokens of a sample."""
    depths: tuple[Positive, ...] = ()
    """Measure a forward and a backward pass of models with this many layers instead: plain, checkpointing, low-bit,
    both, and a plan for each layer, in turn in one process."""
    share: Annotated[float, Field(gt=0)] = 0.6
    """With depths: the plan's limit, as a share of checkpointing's peak. If nothing fits, the plan with the lowest peak
    is used."""
    max_error: Annotated[float, Field(gt=0)] = 0.03
    """With depths: the largest relative error of the gradient that the plan may have."""
    batch: Positive = 1
    """Samples of a micro-batch."""
    microbatches: Positive = 2
    """Micro-batches of a step."""
    bits: Literal[0, 2, 3, 4, 5, 6, 7, 8] = 0
    """Bits of low-bit activations; in low-bit, norms and attention have at least 8. 0: the defaults, 4 for int4."""
    steps: AtLeastTwo = 4
    """Training steps. The first is not measured."""
    device: Device = "cpu"
    """cuda: the current GPU."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """fp32: float32 weights, with matrix products in bfloat16, as in `lowbit train`. bf16: bfloat16 weights only."""
    model: ModelConfig = ModelConfig(layers=4, vocab=256)
    """Model to train. Logits and their gradient take about 14 bytes for each token and entry of the vocabulary, with
    every method."""
    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Learning rate."""
    seed: NonNegative = 0
    """Seed of weights and data order."""
    text: tuple[str, ...] = ()
    """Files or folders to train on, as bytes. If omitted, Python's standard library."""
    max_bytes: Positive = 4_000_000
    """Read at most this many bytes of text."""
    threads: Positive = 2
    """PyTorch threads."""

    def __post_init__(self) -> None:
        vocabulary(self.model, 256)

    def data(self, sequence: int) -> DataConfig:
        """Return the settings of the text, in samples of this many tokens, for steps of all micro-batches."""
        batch = self.batch * self.microbatches
        return DataConfig(text=self.text, batch=batch, max_bytes=self.max_bytes, sequence=sequence)


def in_8_bits(method: str) -> tuple[str, ...]:
    """Return what a method keeps in 8 bits: "gradients", "optimizer", both or neither."""
    if method == "agoq" or method.endswith("+8bit"):
        return "gradients", "optimizer"
    return tuple(part for part in ("gradients", "optimizer") if method.endswith(f"+8bit-{part}"))


def measure(settings: MemoryBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every method at every sequence length that `earlier` rows lack.

    Yields:
        Rows, one for each: `method`, `sequence`, `saved_bytes` (by autograd for one micro-batch, each storage
        once), `saved` (the same by layer type), `weight_copies_bytes` (autocast's copies of weights, saved next to
        them), `peak_bytes`, of which `weights_bytes`, `gradients_bytes` (before the optimizer's step),
        `optimizer_bytes` and `rest_bytes` (temporary tensors and waste), `step_seconds` (median), `loss` (of the last
        step's samples), `gradient_error` (by layer type and for "all": |g' - g| / |g| against plain gradients of the
        weights that the method has trained), and `saved_vs_bf16`, `peak_vs_bf16`, `time_vs_bf16` (ratio to bf16 at the
        same sequence, None without it).
        With depths: `method`, `sequence`, `layers`, `activations_peak_bytes` (activations and temporaries: what a
        forward and a backward pass allocate beyond weights and gradients), `activations_vs_checkpoint`,
        `activations_vs_bf16`, `pass_seconds` (median; on a CPU, of the process), `seconds_vs_checkpoint` (median
        of the ratios of consecutive passes, between `lowest` and `highest`), `gradient_error_all`, and for the plan
        `predicted_bytes`, `limit_bytes` and `choices`.
    """
    check_device(settings.device)
    methods = settings.methods
    needing = [method for method in methods if "optimizer" in in_8_bits(method)]
    if not settings.depths and needing and importlib.util.find_spec("torchao") is None:
        if methods != METHODS:  # it was requested by name
            check_torchao()
        methods = tuple(method for method in methods if method not in needing)
        for method in needing:
            log.warning('%s is left out: torchao is missing; install it with: pip install "lowbit[8bit]"', method)
    load_data(settings.data(max(settings.sequences)))  # so that an unreadable text is an error here
    rows = list(earlier)
    yield rows
    if settings.depths:
        known = {row.get("layers") for row in rows if row["sequence"] == settings.sequences[0]}
        if missing := [layers for layers in settings.depths if layers not in known]:
            with Workers("lowbit_lab.bench.memory_run") as process:
                process.ask("depths", settings=dataclasses.asdict(settings))
                for layers in missing:
                    rows.extend(process.ask("depth", layers=layers)[0])
                    yield rows
        return
    known = {(row["method"], row["sequence"]) for row in _whole_steps(rows)}
    for sequence, method in itertools.product(settings.sequences, methods):
        if (method, sequence) not in known:
            rows.append(_measured(settings, method, sequence))
            whole = sorted(_whole_steps(rows), key=lambda row: (row["sequence"], METHODS.index(row["method"])))
            rows = [*whole, *(row for row in rows if "layers" in row)]
            yield rows


def _measured(settings: MemoryBenchmark, method: str, sequence: int) -> dict[str, Any]:
    """Measure the row of one method in a new process."""
    order = {"settings": dataclasses.asdict(settings), "method": method, "sequence": sequence}
    try:
        with Workers("lowbit_lab.bench.memory_run", environment=_EXACT) as process:
            row = process.ask("measure", **order)[0]
    except ChildProcessError as error:
        raise ChildProcessError(f"{method} at sequence {sequence}: {error}") from None
    # With a single micro-batch, gradients are allocated only while its activations are freed.
    together = ["weights_bytes", "optimizer_bytes", "saved_bytes", "weight_copies_bytes"]
    together += ["gradients_bytes"] if settings.microbatches > 1 else []
    return row | {"rest_bytes": row["peak_bytes"] - sum(row[name] for name in together)}


PARTS = {
    "weights": "weights_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_bytes",
    "saved": "saved_bytes",
    "copies of weights": "weight_copies_bytes",
    "rest": "rest_bytes",
}


def _finding(rows: Sequence[Row]) -> str:
    """State how much less memory the best method takes than BF16."""
    best = min(rows, key=lambda row: row.get("peak_vs_bf16") or 1.0)
    if not best.get("peak_vs_bf16"):
        return "Memory at the peak of a training step"
    return f"{best['method']}: {1 - best['peak_vs_bf16']:.0%} less memory at the peak of a step than BF16"


def _share(row: Row) -> str:
    share = f" · {row['peak_vs_bf16']:.0%}" if row.get("peak_vs_bf16") else ""
    return f"{row['peak_bytes'] / 1e6:.0f} MB{share}"


TYPES = ("all", "norm", "mlp", "linear", "attention", "embedding", "other", "loss")


def _place(row: Row) -> dict[str, Any]:
    """Return the fields that identify a row; others, such as `loss`, are also names of layer types."""
    return {name: row[name] for name in ("sequence", "method")}


def _whole_steps(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows that are not by depth."""
    return [row for row in rows if "layers" not in row]


PLACE = (Column("sequence", "sequence"), Column("method", "method"))
COMMAND = Command(
    name="bench memory",
    summary="Memory of training, and how much low-bit activations save.",
    examples=(
        "lowbit bench memory --sequence 1024 --method bf16,low-bit,agoq",
        "lowbit bench memory --depth 2,8 --sequence 512 --model.dim 64",
        "lowbit bench memory --device cuda --sequence 1024,4096 --json memory.json",
    ),
    settings=MemoryBenchmark,
    measure=measure,
    key=("method", "sequence"),
    free=("methods", "sequences", "depths"),
    baselines=[
        Baseline(field=field, value=value, to={"method": "bf16"}, alike=("sequence",))
        for field, value in (
            ("saved_vs_bf16", "saved_bytes"), ("peak_vs_bf16", "peak_bytes"), ("time_vs_bf16", "step_seconds"),
        )
    ],
    tables=[
        Table(
            title="Activations and temporaries of a pass, and its seconds",
            columns=[
                Column("layers", "layers"),
                Column("method", "method"),
                Column("peak\nMB", "activations_peak_bytes", lambda size: f"{size / 1e6:.2f}"),
                Column("of\nbf16", "activations_vs_bf16", "{:.2f}"),
                Column("of\ncheckpoint", "activations_vs_checkpoint", "{:.2f}"),
                Column("predicted\nMB", "predicted_bytes", lambda size: f"{size / 1e6:.2f}"),
                Column("seconds", "pass_seconds", "{:.3f}"),
                Column("of\ncheckpoint", "seconds_vs_checkpoint", "{:.2f}"),
                Column("lowest", "lowest", "{:.2f}"),
                Column("highest", "highest", "{:.2f}"),
                Column("gradient\nerror", "gradient_error_all", "{:.4f}"),
                Column("the plan's layers", "choices"),
            ],
            rows=lambda rows: [row for row in rows if "layers" in row],
            gap="layers",
        ),
        Table(
            title="Memory of a training step",
            rows=_whole_steps,
            columns=[
                *PLACE,
                Column("saved\nMB", "saved_bytes", megabytes),
                Column("of\nbf16", "saved_vs_bf16", "{:.0%}"),
                Column("peak\nMB", "peak_bytes", megabytes),
                Column("of\nbf16", "peak_vs_bf16", "{:.0%}"),
                Column("s a\nstep", "step_seconds", "{:.2f}"),
                Column("of\nbf16", "time_vs_bf16", "{:.0%}"),
                Column("loss", "loss", "{:.4f}"),
            ],
        ),
        Table(
            title="Parts of the peak",
            columns=[*PLACE, *(Column(f"{part}\nMB", field, megabytes) for part, field in PARTS.items())],
            rows=_whole_steps,
        ),
        Table(
            title="Saved by autograd for a micro-batch, by layer type",
            columns=[*PLACE, *(Column(f"{kind}\nMB", kind, megabytes) for kind in TYPES)],
            rows=lambda rows: [_place(row) | row["saved"] for row in _whole_steps(rows)],
        ),
        Table(
            title="Relative error of gradients, by layer type of the parameters",
            columns=[*PLACE, *(Column(kind, kind, "{:.4f}") for kind in TYPES)],
            rows=lambda rows: [_place(row) | row["gradient_error"] for row in _whole_steps(rows)],
        ),
    ],
    charts=[
        Stacks(
            rows=_whole_steps, title=_finding, subtitle="Peak of a training step, by what the memory holds.",
            panel=lambda row: f"{row['sequence']} tokens", group="method", label="MB", show=_share,
            parts={
                {"saved": "saved activations"}.get(part, part): lambda row, field=field: max(0.0, row[field] / 1e6)
                for part, field in PARTS.items()
            },
        )
    ],
)  # fmt: skip
