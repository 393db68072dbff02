"""`lowbit bench activations`: how far few bits of saved activations turn a trained model's gradients.

One model, trained at full precision first: gradients of random weights say little, because attention is still flat.
Then every method's gradients of the same samples are compared with PyTorch's, layer type by layer type.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_, counted
from lowbit.activations.counting import layer_type
from lowbit.activations.measure import gradients, relative_error
from lowbit.activations.structure import in_attention, linear_like
from lowbit.bench.pipeline import check_at_least, model_of
from lowbit.bench.report import Report, Row, machine
from lowbit.codecs.base import check_choice
from lowbit.train.config import DataConfig, ModelConfig, OptimizerConfig
from lowbit.train.data import Data, Order, load_data
from lowbit.train.model import build_model, next_token_loss, vocabulary
from lowbit.train.optim import learning_rate, make_optimizer, set_learning_rate

PLAIN = "plain"
_ELSEWHERE: Any = {"norm": 16, "mlp": 16, "linear": 16}
METHODS: dict[str, LayerAware | None] = {
    PLAIN: None,
    "low-bit": LayerAware(),
    "int4": LayerAware(norm=4),
    "int4-uniform": LayerAware(norm=4, attention=4),
    "int8-uniform": LayerAware(bits=8, attention=8),
    "attention-4": LayerAware(**_ELSEWHERE, attention=4),
    "attention-8": LayerAware(**_ELSEWHERE, attention=8),
    "low-bit+attention-4": LayerAware(attention=4),
    "low-bit+attention-8": LayerAware(attention=8),
}
_LEAST = {"samples": 1, "batch": 1, "train_steps": 0, "max_bytes": 1, "threads": 1}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, how it is trained first, and the methods.

    Args:
        methods: low-bit (ours), int4 (norms in 4 bits, too), int4-uniform (attention's tensors in 4, too), int8-uniform
            (all in 8), attention-4 and attention-8 (nothing but attention's), low-bit+attention-4 and -8 (ours, and
            attention's). What PyTorch keeps is always measured, for the bytes.
        sequences: tokens of a sample.
        samples: on which gradients are compared, one after the other, held out from training.
        batch: samples of a training step; train_steps: of training before that, on samples of the longest sequence.
        lr: highest learning rate of this training.
        device: "cpu" or "cuda" (the current device).
        family: architecture: llama, gpt2, ... as in `lowbit train`.
        pretrained: local Hugging Face folder to take the model from; the sizes below then do not count, and training
            is up to `train_steps`, too.
        dim: width of the model; layers: decoder layers; heads: attention heads.
        kv_heads: key and value heads; 0: as many as heads. ffn: width of the feed-forward; 0: the family's usual.
        vocab: entries of the embedding; 0: as many as the tokenizer has.
        seed: of weights and samples.
        text: files or folders; absent: Python's standard library.
        max_bytes: read no more text than this.
        threads: of PyTorch.
    """

    methods: tuple[str, ...] = tuple(METHODS)[1:]
    sequences: tuple[int, ...] = (256, 1024)
    samples: int = 8
    batch: int = 2
    train_steps: int = 400
    lr: float = 1e-3
    device: str = "cpu"
    family: str = "llama"
    pretrained: str = ""
    dim: int = 128
    layers: int = 4
    heads: int = 2
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    seed: int = 0
    text: tuple[str, ...] = ()
    max_bytes: int = 4_000_000
    threads: int = 2

    def __post_init__(self) -> None:
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown or not self.methods:
            raise ValueError(f"methods is {self.methods}; allowed: {', '.join(METHODS)}")
        if not self.sequences or min(self.sequences) < 2:
            raise ValueError(f"sequences is {self.sequences}; allowed: at least 2 each")
        check_at_least(self, **_LEAST)
        check_choice("device", self.device, ("cpu", "cuda"))
        vocabulary(self.model, 256)

    @property
    def model(self) -> ModelConfig:
        """The model as `lowbit train` describes it."""
        return model_of(self)

    def data(self, sequence: int) -> DataConfig:
        """The text, in samples of so many tokens."""
        return DataConfig(
            text=self.text, tokenizer=self.pretrained or "bytes", batch=self.batch, max_bytes=self.max_bytes,
            sequence=sequence,
        )  # fmt: skip


def run(settings: Settings, *, on_rows: Callable[[Sequence[Row]], None] | None = None) -> Report:
    """Train the model, and measure.

    Returns:
        A report with a row for each sequence and method: `method`, `sequence`, `train_loss` (of the last tenth of the
        training steps; None without any), `saved_bytes` (kept by autograd for a sample, each storage once),
        `saved_vs_plain`, and `errors`: for "all" parameters, for those of each layer type, and for each of attention's
        linear layers by its name, |g' - g| / |g| of every sample. g are PyTorch's own gradients in float32.

    Raises:
        ValueError: text, model or device that cannot be used.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda; this machine has none that PyTorch can use; allowed: cpu")
    torch.set_num_threads(settings.threads)
    every = {sequence: load_data(settings.data(sequence)) for sequence in settings.sequences}
    model, loss = _trained(settings, every[max(settings.sequences)])
    rows: list[Row] = []
    for sequence, data in every.items():
        batches = _held_out(settings, data)
        exact = [gradients(model, lambda batch=batch: _loss(model, *batch)) for batch in batches]
        plain = 0
        for method in dict.fromkeys((PLAIN, *settings.methods)):
            row = _measure(model, method, batches, exact)
            plain = plain or row["saved_bytes"]
            more = {"saved_vs_plain": row["saved_bytes"] / plain, "train_loss": loss}
            rows.append({"sequence": sequence, **row, **more})
            if on_rows:
                on_rows(rows)
    return Report(command="bench activations", settings=settings, machine=machine(), rows=rows)


def _trained(settings: Settings, data: Data) -> tuple[nn.Module, float | None]:
    """The model after training, in training mode, and the loss that it came to."""
    vocab = vocabulary(settings.model, data.tokenizer.size)
    sequence = max(settings.sequences)
    model = build_model(settings.model, vocab=vocab, sequence=sequence, seed=settings.seed)
    nn.Module.to(model, torch.device(settings.device)).train()
    recipe = OptimizerConfig(lr=settings.lr, lr_warmup_steps=20)
    optimizer = make_optimizer(model.parameters(), recipe)
    order = Order(samples=len(data.train), batch=settings.batch, seed=settings.seed)
    losses = []
    for step in range(settings.train_steps):
        rate = learning_rate(recipe, step=step, steps=settings.train_steps)
        set_learning_rate(optimizer, rate)
        loss = _loss(model, *data.train.batch(order.ids(step)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    last = losses[-max(1, len(losses) // 10) :]
    return model, statistics.fmean(last) if last else None


def _held_out(settings: Settings, data: Data) -> list[tuple[Tensor, Tensor]]:
    """The samples to compare on: evenly over the held-out text, one at a time."""
    count = min(settings.samples, len(data.held_out))
    ids = torch.arange(count) * len(data.held_out) // count
    return [data.held_out.batch(one) for one in ids.split(1)]


def _measure(
    model: nn.Module,
    method: str,
    batches: Sequence[tuple[Tensor, Tensor]],
    exact: Sequence[dict[str, Tensor]],
) -> dict[str, Any]:
    """Bytes of the first sample and errors of all."""
    policy, groups = METHODS[method], _groups(model)
    compressed = compress_saved_(model, policy, report=False) if policy else None
    found: dict[str, list[float]] = defaultdict(list)
    try:
        with counted(model) as kept:
            graph = _loss(model, *batches[0])
        del graph
        for batch, wanted in zip(batches, exact, strict=True):
            given = gradients(model, lambda batch=batch: _loss(model, *batch))
            for where, names in groups.items():
                found[where].append(relative_error(given, {n: wanted[n] for n in names if n in wanted}))
    finally:
        if compressed is not None:
            compressed.remove()
    return {"method": method, "saved_bytes": kept.total, "errors": dict(found)}


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    device = next(model.parameters()).device
    logits = model(input_ids=inputs.to(device), use_cache=False).logits
    return next_token_loss(logits, targets.to(device))


def _groups(model: nn.Module) -> dict[str, list[str]]:
    """Names of parameters by where they are: all, a layer type, or one of attention's linear layers.

    Ask before the model is compressed: afterwards layers are not what they look like.
    """
    names = [name for name, _ in model.named_parameters()]
    groups: dict[str, list[str]] = {"all": names}
    for name in names:
        parts = name.split(".")[:-1]
        path = [model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts))]
        where = layer_type(path)
        if linear_like(path[-1]) is not None and in_attention(".".join(parts), model):
            where = parts[-1]
        groups.setdefault(where, []).append(name)
    return groups


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with medians of the errors, by where, and `lowest` and `highest` of "all"."""
    return [
        {
            **row,
            **{where: statistics.median(errors) for where, errors in row["errors"].items()},
            "lowest": min(row["errors"]["all"]),
            "highest": max(row["errors"]["all"]),
        }
        for row in rows
    ]
