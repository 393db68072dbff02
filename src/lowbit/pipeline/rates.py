"""Choose a rate for a boundary from its tensors, the same on all ranks."""

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from lowbit.codecs.transform_quant.codec import TransformQuant
from lowbit.codecs.transform_quant.rates import RateGoal
from lowbit.escape import one_line, shown
from lowbit.wire.errors import described
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
        ValueError: no rank has `x`, or one could not choose; on all ranks.
    """
    chosen: list[float | str | None] = []
    try:
        if x is not None:
            chosen = [goal.choose(x, gradient, part=part, backward=backward).bits]
    except Exception as error:  # the other ranks wait for this one
        chosen = [described(error)]
    bits: list[float | None] = []
    for rank, of_rank in enumerate(gather_json(chosen, group, timeout=timeout)):
        match of_rank:
            case []:
                pass
            case [None | int() | float() as one] if not isinstance(one, bool):
                bits.append(one)
            case [str(why)]:
                raise ValueError(f"rank {rank} of the group could not choose a rate: {one_line(why)}")
            case _:
                raise ValueError(f"rank {rank} of the group states the rate {shown(of_rank)}; allowed: a number")
    if not bits:
        raise ValueError("x is None on all ranks; allowed: activations on at least one")
    return replace(goal.default(), bits=None if None in bits else max(bit for bit in bits if bit is not None))
