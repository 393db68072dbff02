"""What each end of a boundary sees, in the last step but one of the warm-up, of activations and their gradients.

A codec with a goal in loss (`StatefulCodec.wanted_nats`) needs both, which cross at full precision then. The sender
proposes a parameter from them, which becomes its choice in the last step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowbit.codecs.stateful import StatefulCodec
from lowbit.pipeline.states import States


class Look:
    """Collects activations and gradients for the two directions of a boundary, at one end.

    For each tensor that gets a gradient, it keeps the activations of the first micro-batch until their gradient has
    crossed. Each of the pipeline's `boundaries` gets an equal part of the goal.
    """

    def __init__(self, boundaries: int) -> None:
        self._boundaries = boundaries
        self._states: list[tuple[States, bool]] = []
        self._learned: Sequence[Sequence[int]] = ()  # by micro-batch
        # By tensor and width: a micro-batch, and its activations until their gradient has crossed.
        self._kept: dict[tuple[int, int], tuple[int, Tensor | None]] = {}

    def add(self, codec: object, states: States, *, backward: bool) -> None:
        """Add a direction if its codec has a goal in loss."""
        if isinstance(codec, StatefulCodec) and not codec.settled and codec.wanted_nats is not None:
            self._states.append((states, backward))

    def use(self, learned: Sequence[Sequence[int]]) -> None:
        """Set which of the tensors that cross with each micro-batch get gradients, in this order."""
        self._learned = learned

    def activations(self, index: int, micro_batch: int, x: Tensor) -> None:
        """Look at activations that cross: tensor `index` of their micro-batch."""
        if self._states and index in self._learned[micro_batch]:
            key = index, x.shape[-1] if x.dim() else 1
            if key not in self._kept:
                self._kept[key] = micro_batch, x.detach().clone()

    def gradient(self, index: int, micro_batch: int, gradient: Tensor) -> None:
        """Look at a gradient that crosses: number `index` of those of its micro-batch."""
        if not self._states:
            return
        tensor = self._learned[micro_batch][index]
        key = tensor, gradient.shape[-1] if gradient.dim() else 1
        kept_from, x = self._kept.get(key, (None, None))
        if x is None or kept_from != micro_batch:
            return
        self._kept[key] = micro_batch, None
        slot = x.shape, x.dtype
        part = 1 / (self._boundaries * len(self._learned[micro_batch]))
        for states, backward in self._states:
            states.propose(index if backward else tensor, slot, x, gradient, part, backward=backward)
