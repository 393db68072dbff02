"""What is measured on a model: perplexity and logits, greedy generation, errors of sums, and nearest neighbours."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.tensor_parallel.reduce import plain_sum
from lowbit_lab.evaluate.loading import Sequences

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


@dataclass
class _Squares:
    """Squared errors and squared sums of one layer, and their mean shares by token."""

    error: float = 0.0
    power: float = 0.0
    by_token: float = 0.0
    tokens: int = 0


class SumErrors:
    """Errors of sums over emulated ranks, for `emulate_tensor_parallel_(watch=...)`.

    A layer's error is the root mean square of the sum's difference to the float32 sum of the partial sums, over that of
    the float32 sum.
    """

    def __init__(self) -> None:
        self._layers: dict[str, _Squares] = {}

    def __call__(self, layer: str, partials: Sequence[Tensor], total: Tensor) -> None:
        exact = plain_sum([partial.float() for partial in partials])
        error = (total.float() - exact).square().sum(-1, dtype=torch.float64)
        power = exact.square().sum(-1, dtype=torch.float64)
        squares = self._layers.setdefault(layer, _Squares())
        squares.error += float(error.sum())
        squares.power += float(power.sum())
        used = power > 0
        squares.by_token += float((error[used] / power[used]).sum())
        squares.tokens += int(used.sum())

    def relative(self) -> dict[str, float]:
        """Return the error of each layer."""
        return {name: math.sqrt(s.error / s.power) if s.power else 0.0 for name, s in self._layers.items()}

    def by_token(self) -> dict[str, float]:
        """Return the error of each layer, with each token's error relative to its own sum, so all count equally."""
        return {name: math.sqrt(s.by_token / s.tokens) if s.tokens else 0.0 for name, s in self._layers.items()}

    def mean(self) -> float | None:
        """Return the root mean square over the layers; None without calls."""
        return root_mean_square(self.relative().values())


def root_mean_square(errors: Iterable[float]) -> float | None:
    """Return the root mean square; None without errors."""
    squares = [error * error for error in errors]
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def by_kind(errors: Mapping[str, float]) -> dict[str, float]:
    """Return the root mean square over layers whose names differ only in numbers, by name without the numbers."""
    kinds: dict[str, list[float]] = {}
    for name, error in errors.items():
        kinds.setdefault(kind_of(name), []).append(error)
    return {kind: root_mean_square(values) or 0.0 for kind, values in kinds.items()}


def kind_of(layer: str) -> str:
    """Return `mlp.down_proj` for model.layers.3.mlp.down_proj."""
    parts = layer.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts)


NEAREST = 10
_SHORTEST, _LONGEST = 40, 400  # characters of a sentence


def sentences(documents: Iterable[bytes], count: int, seed: int = 0) -> list[str]:
    """Return up to `count` different sentences in a random order, of 40 to 400 characters."""
    text = b"\n".join(documents).decode("utf-8", errors="replace")
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text))
    chosen = list(dict.fromkeys(part for part in parts if _SHORTEST <= len(part) <= _LONGEST))
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


@torch.no_grad()
def embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch: int = 32,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Return means over the tokens of texts, float32 (texts, E) on the CPU; those of similar length go together."""
    encoder: nn.Module = getattr(model, "base_model", model)
    limits = getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length
    length = int(min(filter(None, limits)))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors: list[Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(order), batch):
        group = order[start : start + batch]
        inputs = tokenizer(
            [texts[i] for i in group], padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(device)
        states, kept = encoder(**inputs).last_hidden_state.float(), inputs["attention_mask"][..., None]
        for i, vector in zip(group, ((states * kept).sum(1) / kept.sum(1)).cpu(), strict=True):
            vectors[i] = vector
        if progress is not None:
            progress(start + len(group))
    return torch.stack(vectors)


def agreement(exact: Tensor, other: Tensor) -> dict[str, float]:
    """Compare the neighbours of (texts, E) vectors with those of exact ones, by cosine.

    Returns:
        `nearest` (share of texts whose nearest other text is the same), `nearest_10` (mean share of their 10 nearest
        that are the same) and `rank_correlation` (Spearman's, of the similarities of all pairs).
    """
    count = len(exact)
    if count < NEAREST + 2:
        raise ValueError(f"{count} sentences have no {NEAREST} neighbours to choose; allowed: at least {NEAREST + 2}")
    similar = [F.normalize(x.double(), dim=-1) for x in (exact, other)]
    similar = [x @ x.T for x in similar]
    itself = torch.eye(count, dtype=torch.bool)
    best, found = (x.masked_fill(itself, -2).topk(NEAREST).indices for x in similar)
    first, second = torch.triu_indices(count, count, 1)
    ranks = [x[first, second].argsort().argsort().double() for x in similar]
    return {
        "nearest": float((best[:, 0] == found[:, 0]).double().mean()),
        "nearest_10": float((best[:, :, None] == found[:, None, :]).any(-1).double().mean()),
        "rank_correlation": float(torch.corrcoef(torch.stack(ranks))[0, 1]),
    }
