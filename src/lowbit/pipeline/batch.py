"""What a call of a schedule was given on this rank, and what of it decides the layouts of all that crosses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowbit.pipeline.layouts import layout_of


@dataclass(frozen=True)
class Batch:
    """What a call of `schedule.step` or `schedule.eval` was given on this rank.

    Attributes:
        training: whether gradients are computed.
        micro_batches: how many the schedule runs.
        args: positional inputs by micro-batch; empty tuples on a rank without the first stage.
        kwargs: keyword inputs by micro-batch, of any stage.
    """

    training: bool
    micro_batches: int
    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]

    def problem(self) -> str:
        """What is wrong with the inputs of the first stage; empty if nothing is."""
        count, allowed = self.micro_batches, "allowed: at least one sample for each"
        if len(self.args) != count:
            return f"the batch gives {len(self.args)} micro-batches, and the schedule has {count}; {allowed}"
        for i, args in enumerate(self.args):
            if any(isinstance(x, Tensor) and x.dim() and not len(x) for x in args):
                return f"micro-batch {i} of {count} is empty; {allowed}"
        return ""

    def mode(self) -> tuple[Any, ...]:
        """What decides layouts beside the inputs: whether gradients are computed, and autocast's dtypes."""
        kinds = {x.device.type for x in tree_leaves(self.args) if isinstance(x, Tensor)}
        cast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        return self.training, *sorted(cast)

    def keys(self) -> list[tuple[Any, Any]]:
        """What of the inputs decides layouts, positional and by keyword; the same for micro-batches that are alike."""
        given = [[layout_of(x) for x in args if isinstance(x, Tensor)] for args in self.args]
        named = [tree_leaves(sorted(kwargs.items())) for kwargs in self.kwargs]
        return [(_key(layouts), _key(leaves)) for layouts, leaves in zip(given, named, strict=True)]


def _key(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype, x.stride(), x.requires_grad) for x in values if isinstance(x, Tensor))
