"""Choose a rate for a boundary from its tensors, the same on all ranks."""

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from lowbit.codecs.transform_quant.codec import TransformQuant
from lowbit.codecs.transform_quant.rates import RateGoal
from lowbit.wire.messages import gather_json


def choose_rate(
    goal: RateGoal,
    x: Tensor | None = None,
    gradient: Tensor | None = None,
    *,
    part: float = 1.0,
    backward: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: float = 120.0,
) -> TransformQuant:
    """Choose a rate by the tensors of the ranks that have them, the highest of these; return it on all ranks.

    Every rank calls it, after a step of the warm-up, and gives `LowBitStage.set_codecs` the results. Keep them with
    your checkpoints: a resumed run has to begin with them.

    Args:
        goal: the same on all ranks.
        x, gradient, part, backward: as for `RateGoal.choose`; None on ranks without them.
        group: ranks that take the same rate; None: all.
        timeout: seconds after which a rank that does not join is an error.

    Raises:
        ValueError: no rank has `x`.
    """
    chosen = [] if x is None else [goal.choose(x, gradient, part=part, backward=backward).bits]
    bits = [one for of_rank in gather_json(chosen, group, timeout=timeout) for one in of_rank]
    if not bits:
        raise ValueError("x is None on all ranks; allowed: activations on at least one")
    return replace(goal.default(), bits=None if None in bits else max(bits))
