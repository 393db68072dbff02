"""Perplexity of a model on windows of text, and how far its logits are from another's."""

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

REMEMBERED = 2**28
"""Bytes of logits that are kept to compare others with."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a model makes of a text.

    Attributes:
        loss: mean negative log-likelihood of a token, in nats, summed up in float64; NaN where a sum over ranks was
            NaN or infinite. tokens: how many were predicted.
        logits: 16 hexadecimal digits of all bits of the first batch's logits: equal where those are bit-identical.
        logits_error: root mean square of the difference to a reference's logits, over that of the reference's from
            their mean; None without a reference.
    """

    loss: float
    tokens: int
    logits: str
    logits_error: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.inf if self.loss >= 700 else math.exp(self.loss)


@dataclass
class Reference:
    """Logits of the first batches, to compare those of other formats with.

    Attributes:
        kept: float32 on the CPU, batch by batch, as many as fit into `REMEMBERED` bytes, but one at least.
        full: one did not fit; those after it are not kept either, so that what is kept are the first ones.
    """

    kept: list[Tensor] = field(default_factory=list)
    full: bool = False

    def remember(self, logits: Tensor) -> None:
        """Keep this batch's, if it is to be kept."""
        size = sum(t.numel() for t in self.kept) * 4
        self.full = self.full or (bool(self.kept) and size + logits.numel() * 4 > REMEMBERED)
        if not self.full:
            self.kept.append(logits.detach().float().cpu())


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
    """How well a causal language model predicts a text, window by window.

    Args:
        model: takes token ids, int64 (batch, length), and returns what has `logits` (batch, length, vocabulary).
        sequences: the text, on the device `device` when it is used; count: windows of it, evenly spread (0: all).
        batch: windows at a time.
        reference: empty: it remembers this model's logits; else they are compared with those in it.
        progress: called with the number of windows of each batch.

    Raises:
        ValueError: no window.
    """
    indices = sequences.spread(count)
    if not indices:
        raise ValueError(f"{sequences.source} has no tokens to predict; allowed: at least one")
    remembers = reference is not None and not reference.kept
    compared = iter(reference.kept if reference is not None and not remembers else ())
    total, tokens, digest = 0.0, 0, ""
    error, power = 0.0, 0.0
    training = model.training
    model.eval()
    try:
        for inputs, targets in sequences.batches(indices, batch):
            logits = _logits(model, inputs.to(device))
            digest = digest or _digest(logits)
            total += _loss(logits, targets.to(device))
            tokens += targets.numel()
            if remembers and reference is not None:
                reference.remember(logits)
            if (truth := next(compared, None)) is not None:
                error += _square(logits.float().cpu() - truth)
                power += _square(truth - truth.mean(-1, keepdim=True))
            if progress is not None:
                progress(len(inputs))
    finally:
        model.train(training)
    relative = math.sqrt(error / power) if power else None
    return Score(loss=total / tokens, tokens=tokens, logits=digest, logits_error=relative)


class SumErrors:
    """Error of the sums over ranks, for `emulate_tensor_parallel_(watch=...)`: against their exact sum.

    The root mean square of what comes out minus the float32 sum of the partial sums, over the root mean square of that
    sum.
    """

    def __init__(self) -> None:
        self._squares: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, boundary: str, partials: Sequence[Tensor], total: Tensor) -> None:
        exact = partials[0].float()
        for partial in partials[1:]:
            exact = exact + partial
        error = (total.float() - exact).square().sum(dtype=torch.float64)
        power = exact.square().sum(dtype=torch.float64)
        before = self._squares.get(boundary)
        self._squares[boundary] = (error, power) if before is None else (before[0] + error, before[1] + power)

    def relative(self) -> dict[str, float]:
        """By boundary."""
        return {
            name: math.sqrt(float(error / power)) if float(power) else 0.0
            for name, (error, power) in self._squares.items()
        }

    def mean(self) -> float | None:
        """Root of the mean square over the boundaries; None if nothing was seen."""
        found = self.relative().values()
        return math.sqrt(sum(e * e for e in found) / len(found)) if found else None


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    more: dict[str, Any] = {"use_cache": False} if hasattr(model, "config") else {}
    return model(inputs, **more).logits


def _loss(logits: Tensor, targets: Tensor) -> float:
    """Sum over the tokens: float32 each, added up in float64."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return float(losses.double().sum())


def _square(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _digest(logits: Tensor) -> str:
    data = logits.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
