"""Perplexity of a model on windows of text, and how far its logits and sums are from a reference's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.evaluate.text import Sequences
from lowbit.tensor_parallel.reduce import plain_sum

REMEMBERED = 2**28
"""Bytes of logits that a `Reference` keeps."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model predicts a text.

    Attributes:
        loss: mean negative log-likelihood of a token, in nats, added up in float64; NaN if a sum over ranks was NaN or
            infinite. tokens: number of predicted ones.
        logits: 16 hexadecimal digits of all bits of the first batch's logits: equal if these are bit-identical.
        logits_error: root mean square of the difference to a reference's logits, over that of the reference's from
            their mean; None without a reference.
    """

    loss: float
    tokens: int
    logits: str
    logits_error: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if that does not fit into a float."""
        return math.inf if self.loss >= 700 else math.exp(self.loss)


@dataclass
class Reference:
    """Logits of the first batches, to compare those of other formats with.

    Attributes:
        batches: float32 on the CPU, up to `REMEMBERED` bytes, but one at least.
        full: a batch did not fit; later ones are left out, too, so that these are the first.
    """

    batches: list[Tensor] = field(default_factory=list)
    full: bool = False

    def remember(self, logits: Tensor) -> None:
        """Keep this batch's logits if there is room."""
        size = 4 * sum(t.numel() for t in [*self.batches, logits])
        self.full = self.full or (bool(self.batches) and size > REMEMBERED)
        if not self.full:
            self.batches.append(logits.detach().float().cpu())


@torch.no_grad()
def perplexity(
    model: nn.Module,
    sequences: Sequences,
    *,
    count: int = 0,
    batch: int = 4,
    reference: Reference | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Measure how well a causal language model predicts a text, window by window.

    Args:
        model: takes token ids, int64 (batch, length), and returns an object with `logits` (batch, length, vocabulary).
        sequences: the text.
        count: windows of it, evenly spread (0: all).
        batch: windows at a time.
        reference: if empty, it remembers this model's logits; else they are compared with it.
        device: of the model.
        progress: called with the number of windows done.

    Raises:
        ValueError: no window.
    """
    indices = sequences.spread(count)
    if not indices:
        raise ValueError(f"{sequences.source} has no tokens to predict; allowed: at least one")
    remembers = reference is not None and not reference.batches
    compared = iter(reference.batches if reference is not None and not remembers else ())
    options: dict[str, Any] = {"use_cache": False} if hasattr(model, "config") else {}
    total, tokens, windows, digest = 0.0, 0, 0, ""
    error, power = 0.0, 0.0
    training = model.training
    model.eval()
    try:
        for inputs, targets in sequences.batches(indices, batch):
            logits = model(inputs.to(device), **options).logits
            digest = digest or _digest(logits)
            losses = F.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten(), reduction="none")
            total += float(losses.double().sum())
            tokens += targets.numel()
            windows += len(inputs)
            if remembers and reference is not None:
                reference.remember(logits)
            if (expected := next(compared, None)) is not None:
                error += _square(logits.float().cpu() - expected)
                power += _square(expected - expected.mean(-1, keepdim=True))
            if progress is not None:
                progress(windows)
    finally:
        model.train(training)
    relative = math.sqrt(error / power) if power else None
    return Score(loss=total / tokens, tokens=tokens, logits=digest, logits_error=relative)


class SumErrors:
    """Errors of sums over emulated ranks, for `emulate_tensor_parallel_(watch=...)`.

    Of each layer: root mean square of the sum's difference to the float32 sum of the partial sums, over that of the
    float32 sum.
    """

    def __init__(self) -> None:
        self._squares: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: str, partials: Sequence[Tensor], total: Tensor) -> None:
        exact = plain_sum([partial.float() for partial in partials])
        error = (total.float() - exact).square().sum(dtype=torch.float64)
        power = exact.square().sum(dtype=torch.float64)
        before = self._squares.get(layer)
        self._squares[layer] = (error, power) if before is None else (before[0] + error, before[1] + power)

    def relative(self) -> dict[str, float]:
        """Return the error of each layer."""
        return {
            name: math.sqrt(float(error / power)) if float(power) else 0.0
            for name, (error, power) in self._squares.items()
        }

    def mean(self) -> float | None:
        """Return the root mean square over the layers; None if nothing was seen."""
        errors = self.relative().values()
        return math.sqrt(sum(e * e for e in errors) / len(errors)) if errors else None


def _square(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _digest(logits: Tensor) -> str:
    data = logits.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
