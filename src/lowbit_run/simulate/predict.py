"""Predicts the duration of a step from the formats of its boundaries, and chooses formats by it.

`lowbit plan pipeline` predicts a step on a cluster before a run; `pipeline.forward = "auto"` predicts it in a run.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from lowbit_run.simulate.step import Actions, Network, StageTimes, Step, simulate

Coding = Sequence[float]
"""Seconds to encode and to decode activations, and the same for gradients."""

AS_FAST = 1.01  # times the fastest step: up to this, formats with more bits are preferred
_AS_FAST_THERE = 1.001  # times the fastest step: as fast, when the format of one boundary is chosen
_AS_PREDICTED = 1.15  # times the predicted step: longer ones are explained by slower links
_LEAST_SHARE, _HALVINGS = 0.1, 10


def predicted_step(
    actions: Actions,
    compute: Sequence[float],
    ranks: Sequence[int],
    network: Network,
    *,
    formats: Sequence[str],
    sizes: Callable[[str], tuple[int, int]],
    coding: Callable[[int, str], Coding],
    checksum: int,
    forward: float = 1 / 3,
    **parts: Any,
) -> Step:
    """Simulate a step.

    Args:
        compute: for each stage, seconds of forward and backward of a micro-batch. forward: the share of the former.
        ranks: rank of each stage. formats: format of each boundary.
        sizes: bytes of a message by format, forward and backward. coding: seconds by rank and format.
        checksum: bytes added to each message. parts: further arguments of `simulate`.
    """
    stages = []
    for stage, seconds in enumerate(compute):
        ends: dict[str, float] = {}
        if stage < len(formats):
            text = formats[stage]
            ends["encode_forward"], _, _, ends["decode_backward"] = coding(ranks[stage], text)
            ends["forward_bytes"] = sizes(text)[0] + checksum
        if stage:
            text = formats[stage - 1]
            _, ends["decode_forward"], ends["encode_backward"], _ = coding(ranks[stage], text)
            ends["backward_bytes"] = sizes(text)[1] + checksum
        stages.append(StageTimes(forward=forward * seconds, backward=(1 - forward) * seconds, **ends))  # pyright: ignore
    return simulate(actions, stages, network, **parts)


def choose_formats(
    seconds: Callable[[tuple[str, ...]], float],
    names: Sequence[str],
    places: Sequence[int],
    start: tuple[str, ...],
    *,
    as_fast: float,
) -> tuple[tuple[str, ...], float]:
    """Choose the most exact formats that are about as fast as the fastest; also return the seconds of the fastest.

    `seconds`: of a step, by the format of each boundary. `names`: the most exact first. `places`: boundaries to choose
    for. `as_fast`: a step counts as about as fast if it takes at most this many times the fastest.
    """
    timed = functools.cache(seconds)

    def changed(mix: tuple[str, ...], place: int, name: str) -> tuple[str, ...]:
        return (*mix[:place], name, *mix[place + 1 :])

    mix = start
    for place in places:
        mix = min((changed(mix, place, name) for name in names), key=timed)
    best = timed(mix)
    for least in names:  # first the same at all boundaries, so that equal links keep equal formats
        exact = tuple(min(name, least, key=names.index) if i in places else name for i, name in enumerate(mix))
        if timed(exact) <= best * as_fast:
            mix = exact
            break
    for place in places:
        limit = timed(mix) * _AS_FAST_THERE
        mix = next(option for name in names if timed(option := changed(mix, place, name)) <= limit)
    return mix, best


def share_of_rates(seconds: Callable[[float], float], measured: float) -> float:
    """The share of the probed link rates that explains the `measured` seconds of a step; 1 if no slower links do.

    Training may not reach the rate that a probe reaches: TCP starts slowly after a pause, and some links carry one
    direction at a time. `seconds`: predicted, by this share.
    """
    if measured <= _AS_PREDICTED * seconds(1.0) or seconds(_LEAST_SHARE) < measured:
        return 1.0
    low, high = _LEAST_SHARE, 1.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return high
