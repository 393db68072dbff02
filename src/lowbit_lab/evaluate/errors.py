"""Errors of sums over emulated ranks: by boundary, and by token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.tensor_parallel.reduce import plain_sum


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
