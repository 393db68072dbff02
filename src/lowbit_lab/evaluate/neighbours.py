"""Sentence embeddings of an encoder, and whether the nearest neighbours of the sentences stay the same."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.config import ConfigError

NEAREST = 10
_SHORTEST, _LONGEST = 40, 400  # characters of a sentence
_MODES = {
    "pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How the vectors of a sentence's tokens are combined into one.

    Args:
        mode: "mean" or "max" over the tokens, or the "first" token's.
        normalized: scale the vector to length 1.
        length: the most tokens of a sentence; None: those of the model.
    """

    mode: str = "mean"
    normalized: bool = False
    length: int | None = None

    @classmethod
    def read(cls, folder: str | Path) -> Pooling:
        """Read the files that sentence-transformers writes next to a model; without them: the mean of the tokens."""
        modules = _json(Path(folder) / "modules.json") or []
        kinds = {str(module["type"]).rpartition(".")[2]: Path(folder, module["path"]) for module in modules}
        settings = _json(kinds["Pooling"] / "config.json") if "Pooling" in kinds else None
        chosen = [name for name, on in (settings or {}).items() if name.startswith("pooling_mode") and on is True]
        unknown = sorted((set(chosen) - set(_MODES)) | (set(kinds) - {"Transformer", "Pooling", "Normalize"}))
        if unknown or len(chosen) > 1:
            raise ConfigError(
                f"model {str(folder)!r} has {', '.join(unknown or chosen)}; allowed: one pooling of mean, max or "
                "first token, and normalization"
            )
        length = (_json(Path(folder) / "sentence_bert_config.json") or {}).get("max_seq_length")
        return cls(mode=_MODES[chosen[0]] if chosen else "mean", normalized="Normalize" in kinds, length=length)

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors of sentences, float32 (sentences, E), from states (sentences, tokens, E)."""
        states, kept = states.float(), mask[..., None].bool()
        if self.mode == "first":
            vectors = states[:, 0]
        elif self.mode == "max":
            vectors = states.masked_fill(~kept, -torch.inf).amax(1)
        else:
            vectors = (states * kept).sum(1) / kept.sum(1)
        return F.normalize(vectors, dim=-1) if self.normalized else vectors


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
    pooling: Pooling,
    *,
    batch: int = 32,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the vectors of texts, float32 (texts, E) on the CPU; texts of similar length go through together."""
    encoder: nn.Module = getattr(model, "base_model", model)
    limits = pooling.length, getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length
    length = int(min(filter(None, limits)))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors: list[Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(order), batch):
        group = order[start : start + batch]
        inputs = tokenizer(
            [texts[i] for i in group], padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(device)
        states = encoder(**inputs).last_hidden_state
        for i, vector in zip(group, pooling(states, inputs["attention_mask"]).cpu(), strict=True):
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


def _json(path: Path) -> Any:
    """Return the contents of a file, or None if it does not exist."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}; allowed: JSON of sentence-transformers") from error
