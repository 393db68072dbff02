"""An embedding that is tied to the output matrix, in a pipeline: one weight, on the first stage and on the last.

Each of the two stages has its own copy and computes its own part of the gradient. The two parts are added after every
backward pass, so that both copies take the same optimizer step and stay equal.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.ranks.groups import new_group
from lowbit.train.layout import Layout
from lowbit.train.metrics import Work
from lowbit.train.model import StageModule
from lowbit.train.replicas import Replicas


class TiedWeights:
    """Keeps the two copies of a tied embedding equal; does nothing if it is not tied, or with a single stage.

    To be made on every rank, since process groups are.

    Args:
        modules: this rank's modules, by stage.
        replicas: the pipelines, each of which has its own two copies.
        tied: whether the model ties its embedding.

    Attributes:
        copies: of the weight, on this rank.
        peer: rank of the run that has the other copy; None where none has.
    """

    def __init__(self, modules: dict[int, StageModule], layout: Layout, replicas: Replicas, *, tied: bool) -> None:
        last = layout.stages - 1
        ends = sorted({layout.rank_of(0), layout.rank_of(last)})
        self._group: dist.ProcessGroup | None = None
        self.copies: list[nn.Parameter] = []
        self.peer: int | None = None
        self._sent_bytes = self._sent_elements = 0
        if not tied or layout.stages == 1:
            return
        if len(ends) == 2:
            for index in range(replicas.count):
                members = replicas.members(index)
                group = new_group([members[place] for place in ends], timeout=replicas.timeout)
                self._group = group or self._group
            own = replicas.members(replicas.index)
            if replicas.place in ends:
                self.peer = own[ends[0] if replicas.place == ends[1] else ends[1]]
        if 0 in modules:
            self.copies.append(modules[0].decoder.get_input_embeddings().weight)  # pyright: ignore
        if last in modules:
            self.copies.append(modules[last].head.weight)  # pyright: ignore

    def counted_elsewhere(self, parameter: nn.Parameter, module: StageModule) -> bool:
        """Whether this is the last stage's copy: norms count the first stage's."""
        return not module.first and any(parameter is copy for copy in self.copies)

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients."""
        gradients = [_gradient(copy) for copy in self.copies]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients and self._group is not None:
            dist.all_reduce(gradients[0], group=self._group)
            self._sent_elements += gradients[0].numel()
            self._sent_bytes += sum_bytes(gradients[0].numel())

    def note_traffic(self, work: Work) -> None:
        """Add what this rank has sent since the last call."""
        work.tied_bytes += self._sent_bytes
        work.tied_elements += self._sent_elements
        self._sent_bytes = self._sent_elements = 0


def sum_bytes(numel: int) -> int:
    """Bytes that each of the two ranks sends to sum the gradients of a weight: half of its sum, half of the result."""
    return 4 * numel


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
