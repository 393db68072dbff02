"""What is measured on a model: perplexity and logits, greedy generation, errors of sums, and nearest neighbours."""

import hashlib
import math
import random
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.tensor_parallel.reduce import plain_sum
from lowbit_lab.evaluate.loading import Sequences

REMEMBERED = 2**28
"""Most bytes of logits that are kept as a reference."""
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


@torch.no_grad()
def perplexity(
    model: nn.Module,
    sequences: Sequences,
    *,
    count: int = 0,
    batch: int = 4,
    reference: list[Tensor] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Measure how well a language model predicts a text, window by window.

    Args:
        model: takes token ids, int64 (batch, length), and returns an object with `logits` (batch, length, vocabulary).
        sequences: the text.
        count: number of windows, evenly spread (0: all).
        batch: windows at a time.
        reference: logits of the first batches, float32 on the CPU. If empty, those of this model are added, at least
            one batch; otherwise they are compared with it.
        device: of the model.
        progress: called with the number of windows done.

    Raises:
        ValueError: no window.
    """
    indices = sequences.spread(count)
    if not indices:
        raise ValueError(f"{sequences.source} has no tokens to predict; allowed: at least one")
    stored = reference if not reference else None
    compared, room = iter(reference or ()), REMEMBERED
    options: dict[str, Any] = {"use_cache": False} if hasattr(model, "config") else {}
    total, tokens, windows, digest, error, power = 0.0, 0, 0, "", 0.0, 0.0
    training = model.training
    model.eval()
    try:
        for inputs, targets in sequences.batches(indices, batch):
            logits = model(inputs.to(device), **options).logits
            if not digest:
                data = logits.cpu().contiguous().flatten().view(torch.uint8)
                digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
            targets = targets.to(device)
            losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
            total += float(losses.double().sum())
            tokens += targets.numel()
            windows += len(inputs)
            if stored is not None and (room >= 4 * logits.numel() or not stored):
                stored.append(logits.float().cpu())
            room -= 4 * logits.numel()  # below 0 from the first batch that did not fit
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


class SumErrors:
    """Errors of sums over emulated ranks, for `emulate_tensor_parallel_(watch=...)`.

    A layer's error is the root mean square of the sum's difference to the float32 sum of the partial sums, over that of
    the float32 sum.
    """

    def __init__(self) -> None:
        self._layers: dict[str, Tensor] = {}  # squared errors and sums; of tokens: shares of these, and their number

    def __call__(self, layer: str, partials: Sequence[Tensor], total: Tensor) -> None:
        exact = plain_sum([partial.float() for partial in partials])
        error = (total.float() - exact).square().sum(-1, dtype=torch.float64)
        power = exact.square().sum(-1, dtype=torch.float64)
        used = power > 0
        found = torch.stack([error.sum(), power.sum(), (error[used] / power[used]).sum(), used.sum()]).cpu()
        self._layers[layer] = self._layers[layer] + found if layer in self._layers else found

    def relative(self) -> dict[str, float]:
        return {name: float((s[0] / s[1]).sqrt()) if s[1] else 0.0 for name, s in self._layers.items()}

    def by_token(self) -> dict[str, float]:
        """Return the error of each layer, with each token's error relative to its own sum, so all count equally."""
        return {name: float((s[2] / s[3]).sqrt()) if s[3] else 0.0 for name, s in self._layers.items()}

    def mean(self) -> float | None:
        return root_mean_square(self.relative().values())


def root_mean_square(errors: Iterable[float]) -> float | None:
    """Return the root mean square; None without errors."""
    squares = [error * error for error in errors]
    return math.sqrt(statistics.fmean(squares)) if squares else None


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
