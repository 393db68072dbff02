"""An embedding that is the output matrix as well, in a pipeline: one weight, on the first stage and on the last.

Each of the two stages has its own copy and computes its own part of the gradient. The two parts are added up after
every backward pass, so that both copies take the same optimizer step and stay equal.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.ranks.groups import new_group
from lowbit.train.model import StageModule
from lowbit.train.plan import Plan
from lowbit.train.replicas import Replicas


class TiedWeights:
    """Keeps the two copies of a tied embedding in step. Where nothing is tied, or one stage has both, it does nothing.

    Every rank makes one, since process groups are made together.

    Args:
        modules: this rank's modules, by stage; plan: where the others are.
        replicas: the pipelines, each of which has its own two copies.
        tied: whether the model ties its embedding.

    Attributes:
        copies: those of the weight that this rank has.
    """

    def __init__(self, modules: dict[int, StageModule], plan: Plan, replicas: Replicas, *, tied: bool) -> None:
        ends = (plan.rank_of(0), plan.rank_of(plan.stages - 1))
        self._group: dist.ProcessGroup | None = None
        self.copies: list[nn.Parameter] = []
        if not tied or plan.stages == 1:
            return
        if ends[0] != ends[1]:
            for index in range(replicas.count):
                members = replicas.members(index)
                group = new_group([members[place] for place in sorted(ends)], timeout=replicas.timeout)
                self._group = group or self._group
        if 0 in modules:
            self.copies.append(_weight(modules[0].decoder.get_input_embeddings()))  # pyright: ignore
        if plan.stages - 1 in modules:
            self.copies.append(_weight(modules[plan.stages - 1].head))

    def counted_elsewhere(self, parameter: nn.Parameter, module: StageModule) -> bool:
        """Whether this is the last stage's copy: the same weight that the first stage has."""
        return not module.first and any(parameter is copy for copy in self.copies)

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients."""
        gradients = [_gradient(copy) for copy in self.copies]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients and self._group is not None:
            dist.all_reduce(gradients[0], group=self._group)


def _weight(module: nn.Module | None) -> nn.Parameter:
    weight = getattr(module, "weight", None)
    assert isinstance(weight, nn.Parameter)
    return weight


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
