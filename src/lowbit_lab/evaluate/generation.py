"""Greedy generation, and how long a format generates the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_lab.evaluate.text import Sequences

PROMPTS = 16


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


@dataclass(frozen=True, kw_only=True)
class SameTokens:
    """How alike two sets of continuations are.

    Attributes:
        tokens: share of tokens that are equal. before: mean number of tokens before the first that differs.
        whole: share of continuations that are equal throughout.
    """

    tokens: float
    before: float
    whole: float


def same_tokens(expected: Tensor, other: Tensor) -> SameTokens:
    """Compare continuations, (prompts, tokens) each."""
    same = expected == other
    prefix = same.long().cumprod(1).sum(1)
    return SameTokens(
        tokens=float(same.double().mean()),
        before=float(prefix.double().mean()),
        whole=float((prefix == same.shape[1]).double().mean()),
    )
