"""Weights of channels: the error of activations falls where their gradients are small.

A sender of activations decodes the gradients that cross the boundary back. With the mean square of each channel's
gradient, an error costs the loss least if each channel's is inversely proportional to it. So tokens are multiplied by
weights before they are coded, and divided by them after. Weights travel with each message, in steps of half an octave,
4 bits each: a receiver needs to know nothing. Until there are gradients, all are 1. Shape suffixes: C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.codecs.subspace_quant.memory import Memory

GRAIN = 2  # weights to an octave
ONE = 8  # level of the weight 1; levels are 0 to 15
KEPT = 0.9  # of the mean squares, when those of another step come
ZEROS = 2.0**-60  # mean squares relative to their mean, at least
ALL_ONE = ONE | ONE << 4  # a byte of two weights
FELT = "felt"


class WeightedMemory(Memory):
    """The state of one end, and what a sender of activations knows of their gradients.

    Attributes:
        felt: float64 (C,), running mean squares of gradients; zeros: there were none.
        levels: uint8 (C,), of the weights of the next messages.
    """

    def reset(self) -> None:
        super().reset()
        self._feel(torch.zeros(self._shape[1], dtype=torch.float64, device=self._device))

    def observe(self, gradient: Tensor) -> None:
        """Take in a gradient of activations that were sent, (..., C); one with NaN or Inf is left out."""
        square_C = gradient.detach().reshape(-1, self._shape[1]).double().square().sum(0)
        self._squares += torch.where(square_C.isfinite().all(), square_C, 0.0)

    def end_step(self) -> None:
        """Let the weights of the next messages follow the gradients since the last call."""
        mean, before = self._squares.mean(), self.felt.sum() > 0
        now_C = self._squares / torch.where(mean > 0, mean, 1.0)
        followed_C = torch.where(before, KEPT * self.felt + (1 - KEPT) * now_C, now_C)
        self._feel(torch.where(mean > 0, followed_C, self.felt))

    def state_dict(self) -> dict[str, Any]:
        self.end_step()  # as the next pass would
        felt = {FELT: self.felt.clone()} if self.felt.any() else {}
        return super().state_dict() | felt

    def load_state_dict(self, state: dict[str, Any], codec: object) -> None:
        rest = {key: value for key, value in state.items() if key != FELT}
        felt = state.get(FELT, torch.zeros(self._shape[1], dtype=torch.float64, device=self._device))
        if not isinstance(felt, Tensor) or felt.shape != self._shape[1:] or felt.dtype != torch.float64:
            raise ValueError(f"state has {FELT} of a wrong type or shape; allowed: float64 {self._shape[1:]}")
        if not (felt.isfinite() & (felt >= 0)).all():
            raise ValueError(f"state has {FELT} with NaN, Inf or negative numbers; allowed: mean squares")
        super().load_state_dict(rest, codec)
        self._feel(felt.to(self._device, copy=True))

    def _feel(self, felt: Tensor) -> None:
        self.felt, self._squares = felt, torch.zeros_like(felt)
        self.levels = levels_of(felt)


def levels_of(felt_C: Tensor) -> Tensor:
    """The weights' levels, uint8: roots of mean squares, relative to their median; 1 where all are zeros."""
    octaves_C = torch.where(felt_C.sum() > 0, felt_C, 1.0).clamp(min=ZEROS).log2() / 2
    steps_C = (GRAIN * (octaves_C - octaves_C.median())).round()
    return (steps_C.clamp(-ONE, 15 - ONE) + ONE).to(torch.uint8)


def packed(levels_C: Tensor) -> Tensor:
    """Levels as they travel, two to a byte, the first in the lower half."""
    even_2 = torch.cat([levels_C, levels_C.new_full((len(levels_C) % 2,), ONE)]).view(-1, 2)
    return even_2[:, 0] | even_2[:, 1] << 4


def weights(packed: Tensor, channels: int, *, inverse: bool) -> Tensor:
    """Float32 (C,): what to multiply tokens by before they are coded, or after with `inverse`."""
    levels_C = torch.stack([packed & 15, packed >> 4], 1).view(-1)[:channels].long()
    return _powers(packed.device, inverse)[levels_C]


def _powers(device: torch.device, inverse: bool) -> Tensor:
    steps = torch.arange(16, device=device, dtype=torch.float64) - ONE
    return (2.0 ** ((-steps if inverse else steps) / GRAIN)).float()
