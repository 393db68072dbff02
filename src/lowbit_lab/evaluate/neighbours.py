"""Sentence embeddings of an encoder, and whether the nearest neighbours of the sentences stay the same."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
