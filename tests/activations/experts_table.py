"""Mixture-of-experts families: what they keep for backward of PyTorch's, and the error of their gradients.

    python -m tests.activations.experts_table [family ...]

Hugging Face's models with 2 layers, dim 64, 8 experts of width 112, two of them for each token. Kept: a batch of
2 x 128 bytes under bfloat16 autocast, for each of the library's ways to compute experts. Error: of all gradients and of
those of the experts' weights, in float32 and under autocast, after 60 steps of AdamW at a rate of 1e-3 with 4 x 64
bytes of Python's standard library each, on 4 x 64 more.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor

from lowbit.activations import compress_saved_, counted
from tests.activations.models import distance, gradients
from tests.activations.test_experts import KEPT, WAYS, language_model, loss_of, text


def kept(family: str, way: str) -> tuple[int, int]:
    """Bytes that PyTorch keeps, and ours."""
    sizes = []
    for compress in (False, True):
        model = language_model(family, way)
        if compress:
            compress_saved_(model, report=False)
        with counted(model) as saved:
            loss_of(model, text(0, 2, 129), autocast=True).backward()
        sizes.append(saved.total)
    return sizes[0], sizes[1]


def errors(family: str, autocast: bool, model: Any) -> tuple[float, float]:
    """Relative error of all gradients, and of those of the experts' weights."""
    ids, ours = text(1000), copy.deepcopy(model)
    compress_saved_(ours, report=False)
    expected, found = (gradients(m, loss_of(m, ids, autocast)) for m in (model, ours))

    def inside(grads: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: grad for name, grad in grads.items() if ".experts." in name}

    return distance(found, expected), distance(inside(found), inside(expected))


def main() -> None:
    torch.set_num_threads(1)
    print("| family | " + " | ".join(f"kept, `{way}`" for way in WAYS) + " | error | of experts | bfloat16 |")
    print("|" + "---|" * (len(WAYS) + 4))
    for family in sys.argv[1:] or KEPT:
        sizes = [kept(family, way) for way in WAYS]
        model = language_model(family)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(60):
            loss_of(model, text(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        every, of_experts = errors(family, False, model)
        narrow, _ = errors(family, True, model)
        shares = " | ".join(f"{ours / 1e6:.2f} of {plain / 1e6:.2f} MB, {ours / plain:.1%}" for plain, ours in sizes)
        print(f"| {family} | {shares} | {every:.4f} | {of_experts:.4f} | {narrow:.4f} |", flush=True)


if __name__ == "__main__":
    main()
