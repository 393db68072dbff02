"""Perplexity of a model on windows of text, the distance of its logits to a reference's, and greedy generation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit_lab.evaluate.text import Sequences

REMEMBERED = 2**28
"""Bytes of logits that a `Reference` keeps."""
PROMPTS = 16


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model predicts a text.

    Attributes:
        loss: mean negative log-likelihood of a token, in nats, added up in float64; NaN if a sum over
            ranks was NaN or infinite. tokens: number of predicted ones.
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
        batches: float32 on the CPU, up to `REMEMBERED` bytes, but at least one.
        full: a batch did not fit; later ones are also left out, so that the kept ones are the first.
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
    """Measure how well a language model predicts a text, window by window.

    Args:
        model: takes token ids, int64 (batch, length), and returns an object with `logits` (batch, length, vocabulary).
        sequences: the text.
        count: number of windows, evenly spread (0: all).
        batch: windows at a time.
        reference: if empty, it stores this model's logits; otherwise they are compared with it.
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
            targets = targets.to(device)
            losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
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


@torch.no_grad()
def generate(model: Any, sequences: Sequences, tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the most likely continuation of 16 windows of the text, int64 (prompts, tokens).

    The prompt is the whole window, in one batch; generation does not stop at an end-of-text token.
    """
    whole = [i for i in sequences.spread(PROMPTS) if i < sequences.whole]
    prompts = torch.stack([sequences.sequence(i) for i in whole or [0]]).to(device)
    settings = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    output = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    return output[:, prompts.shape[1] :].cpu()


def same_tokens(expected: Tensor, other: Tensor) -> dict[str, float]:
    """Compare continuations, (prompts, tokens) each.

    Returns:
        `same_tokens` (share of equal ones), `tokens_before` (mean number before the first that differs) and
        `same_texts` (share of continuations that are equal throughout).
    """
    same = expected == other
    prefix = same.long().cumprod(1).sum(1)
    return {
        "same_tokens": float(same.double().mean()),
        "tokens_before": float(prefix.double().mean()),
        "same_texts": float((prefix == same.shape[1]).double().mean()),
    }


def _square(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _digest(logits: Tensor) -> str:
    data = logits.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
