"""Everything that is attacked, with shapes of every kind; a case is made of a seed and a number alone.

Each format says in `hostile()`, in the examples of its folder of tests, how it is attacked.
"""

from __future__ import annotations

import functools
import itertools
import random

from tests.codecs.examples import rooms

from .targets import Case, Fused, Target


@functools.cache
def targets(only: str = "") -> list[Target]:
    """Those whose name contains `only`; such as have more ways to go wrong several times."""
    return [target for target in _targets() if only in target.name]


def _targets() -> list[Target]:
    operators = ("norm_recompute", "norm_backward", "gated_recompute", "gated_backward")
    fused = [Fused(name, *s) for name, s in itertools.product(operators, ((4, 64), (3, 8), (8, 1000)))]
    return [target for room in rooms() for target in room.hostile()] + fused


def case_of(seed: int, number: int, only: str = "") -> tuple[str, Case, random.Random]:
    """Case `number` of a seed: the target's name, the attack, and the numbers at random that are left.

    Args:
        seed: of all cases. number: which one.
        only: of targets whose name contains this.

    Raises:
        ValueError: there is no such target.
    """
    rng = random.Random((seed << 40) | number)
    chosen = targets(only)
    if not chosen:
        raise ValueError(f"only is {only!r}; allowed: a part of a target's name, such as 'TAHQuant'")
    target = rng.choice(chosen)
    return target.name, target.case(rng), rng
