"""`lowbit bench families`: what `compress_saved_` keeps of models that people train, and what it does to gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from lowbit.activations import compress_saved_, counted
from lowbit.config import ConfigError, NonNegative, Positive, section
from lowbit.plan.measure import gradients, relative_error
from lowbit.report import Column, Command, Row, Table
from lowbit.train.config import DataConfig
from lowbit.train.data import Order, load_data
from lowbit_lab.bench.family_models import FAMILIES, Family, family_model
from lowbit_lab.bench.memory_methods import policy_of
from lowbit_lab.bench.settings import EachOnce, megabytes


@section()
class FamiliesBenchmark:
    """The models, how long they are trained, and the bits."""

    families: Annotated[tuple[Family, ...], EachOnce] = FAMILIES
    """Hugging Face models with random weights, a model in Megatron's layout, and LoRA on Llama by PEFT. Mamba and RWKV
    are scans, most of whose tensors are saved as they are."""
    weights: Annotated[tuple[Literal["autocast", "bf16"], ...], EachOnce] = ("autocast", "bf16")
    """autocast: float32 weights with bfloat16 autocast. bf16: bfloat16 weights. LoRA has bf16 only."""
    bits: Annotated[int, Field(ge=0, le=16)] = 0
    """Bits of saved activations; norms and attention have at least 8. 0: the default of `LayerAware`."""
    dim: Positive = 128
    """Width of the model."""
    layers: Positive = 4
    """Decoder layers."""
    sequence: Positive = 256
    """Tokens of a sample."""
    batch: Positive = 2
    """Samples."""
    steps: NonNegative = 60
    """Training steps before gradients are compared."""
    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Learning rate of AdamW."""
    seed: NonNegative = 0
    """Seed of weights, data order and dropout."""
    text: tuple[str, ...] = ()
    """Files or folders to train on, as bytes. If omitted, Python's standard library."""
    max_bytes: Positive = 4_000_000
    """Read at most this many bytes of text."""
    threads: Positive = 2
    """PyTorch threads."""

    def __post_init__(self) -> None:
        if self.dim % 32:
            raise ConfigError(f"dim is {self.dim}; allowed: multiples of 32, the width of a head")

    def data(self) -> DataConfig:
        """The text, in samples of so many tokens."""
        return DataConfig(text=self.text, batch=self.batch, max_bytes=self.max_bytes, sequence=self.sequence)


def measure(settings: FamiliesBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every family that `earlier` rows lack.

    Yields:
        Rows, one for each: `family`, `weights`, `plain_bytes` and `saved_bytes` (kept by autograd for a batch, each
        storage once), `saved_vs_plain`, `gradient_error` (|g' - g| / |g| against plain gradients of the same weights,
        after the training steps), `loss`, and `modules`: for each module with a name of its own but for numbers, what
        it would keep without compression and what it keeps, by PyTorch's functions where that is not compressed.

    Raises:
        ConfigError: text that cannot be used.
        ModuleNotFoundError: LoRA without peft.
    """
    torch.set_num_threads(settings.threads)
    load_data(settings.data())  # an unreadable text is an error here
    rows = list(earlier)
    known = {(row["family"], row["weights"]) for row in rows}
    yield rows
    for family in settings.families:
        for weights in ("bf16",) if family.startswith("lora") else settings.weights:
            if (family, weights) not in known:
                rows.append(_measured(settings, family, weights))
                rows.sort(key=lambda row: (row["weights"], FAMILIES.index(row["family"])))
                yield rows


def _measured(settings: FamiliesBenchmark, family: Family, weights: str) -> dict[str, Any]:
    model = family_model(
        family, dim=settings.dim, layers=settings.layers, vocab=256, sequence=settings.sequence, seed=settings.seed
    )
    if weights == "bf16" and not family.startswith("lora"):
        model = model.bfloat16()
    windows = load_data(settings.data()).train
    order = Order(samples=len(windows), batch=settings.batch, seed=settings.seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.lr)

    def loss(step: int) -> Tensor:
        torch.manual_seed(settings.seed)  # of dropout
        ids, targets = windows.batch(order.ids(step))
        with torch.autocast("cpu", torch.bfloat16) if weights == "autocast" else nullcontext():
            logits = model(input_ids=ids, use_cache=False).logits
            return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    for step in range(settings.steps):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with counted(model) as plain:
        last = loss(settings.steps)
    value = last.item()
    del last
    exact = gradients(model, lambda: loss(settings.steps))
    compressed = compress_saved_(model, policy_of(settings.bits))
    error = relative_error(gradients(model, lambda: loss(settings.steps)), exact)
    with counted(model) as saved:
        last = loss(settings.steps)
    del last
    survey = compressed.survey
    assert survey is not None
    modules = [
        {"module": row.module, "count": len(row.names), "plain": row.plain, "kept": row.kept, "whole": dict(row.whole)}
        for row in survey.rows.values()
    ]
    return {
        "family": family, "weights": weights, "plain_bytes": plain.total, "saved_bytes": saved.total,
        "saved_vs_plain": saved.total / plain.total, "gradient_error": error, "loss": value, "modules": modules,
    }  # fmt: skip


COMMAND = Command(
    name="bench families",
    summary="What few bits keep of models that people train, and their gradients.",
    examples=("lowbit bench families --family llama,phi3,lora-dropout", "lowbit bench families --json families.json"),
    settings=FamiliesBenchmark,
    measure=measure,
    key=("family", "weights"),
    free=("families", "weights"),
    tables=[
        Table(
            title="Kept by autograd for backward, and the relative error of gradients",
            columns=[
                Column("weights", "weights"),
                Column("family", "family"),
                Column("plain\nMB", "plain_bytes", megabytes),
                Column("kept\nMB", "saved_bytes", megabytes),
                Column("of\nplain", "saved_vs_plain", "{:.1%}"),
                Column("gradient\nerror", "gradient_error", "{:.2%}"),
                Column("loss", "loss", "{:.3f}"),
            ],
            gap="weights",
        ),
    ],
    charts=[],
)
