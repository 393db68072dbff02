"""Predicted seconds of a step by the formats of its boundaries, and the formats that follow from them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowbit.codecs import Codec, parse_pair
from lowbit.codecs.foreign import open_session
from lowbit.pipeline.boundary import warm_up
from lowbit.train.config import PipelineConfig
from lowbit.train.distance import Pair
from lowbit.train.layout import Layout

_AS_FAST = 1.03  # of the fastest: the most exact formats among these are taken
_AS_FAST_THERE = 1.001  # the same for a single boundary
_KEEP = 1.10  # of the fastest: formats with more bits than the best ones stay
_AS_PREDICTED = 1.15  # times as long as predicted: not blamed on the links
_LEAST_SHARE, _HALVINGS = 0.1, 10
_ROUNDS = 3  # of coding, the fastest of which counts
_CACHE = 1 << 22  # float32, written before each: a step computes between two messages


class Forecast:
    """Seconds of a step of one pipeline, by the formats of its boundaries.

    Args:
        stated: of each rank, seconds of compute in a step, those after the pipeline, and `coding_seconds` by format.
        formats: with their sizes. trips, rates: by two ranks of the pipeline.
        checksum: bytes of each message. rest: seconds of a step after the pipeline.
        beside: coding runs beside computing.
    """

    def __init__(
        self,
        layout: Layout,
        pipeline: PipelineConfig,
        stated: Sequence[Any],
        formats: Mapping[str, tuple[int, int]],
        trips: Mapping[Pair, float],
        rates: Mapping[Pair, float],
        *,
        checksum: int,
        rest: float,
        beside: bool,
    ) -> None:
        from lowbit.simulate import actions

        self._layout, self._stated, self._sizes, self._checksum = layout, stated, formats, checksum
        self._rest, self._beside, self._count = rest, beside, pipeline.microbatches
        self._actions = actions(
            pipeline.schedule, ranks=layout.ranks, stages_per_rank=layout.stages_per_rank,
            microbatches=pipeline.microbatches,
        )  # fmt: skip
        crossing = [(layout.rank_of(i), layout.rank_of(i + 1)) for i in range(layout.stages - 1) if layout.crosses(i)]
        self._pairs = sorted({*crossing, *((b, a) for a, b in crossing)})
        self._trips, self._rates = trips, rates

    def seconds(self, formats: Sequence[str], share: float = 1.0) -> float:
        """Seconds of a step with these formats, at this share of the links' rates."""
        from lowbit.simulate import Channel, Network, StageTimes, simulate

        stages = []
        for stage in range(self._layout.stages):
            rank = self._layout.rank_of(stage)
            compute, _, coding = self._stated[rank]
            layers = sum(self._layout.layer_counts[each] for each in self._layout.stages_of(rank))
            seconds = compute / self._count * self._layout.layer_counts[stage] / layers
            ends: dict[str, Any] = {}
            if stage < len(formats):
                text = formats[stage]
                ends["encode_forward"], ends["decode_backward"] = coding[text][0], coding[text][3]
                ends["forward_bytes"] = self._sizes[text][0] + self._checksum
            if stage:
                text = formats[stage - 1]
                ends["decode_forward"], ends["encode_backward"] = coding[text][1], coding[text][2]
                ends["backward_bytes"] = self._sizes[text][1] + self._checksum
            stages.append(StageTimes(forward=seconds / 3, backward=2 * seconds / 3, **ends))
        bytes_per_second = [share * self._rates.get(pair, math.inf) * 1e6 / 8 for pair in self._pairs]
        channels = [
            Channel(bytes_per_second=rate, latency=self._trips[min(pair), max(pair)] / 2)
            for rate, pair in zip(bytes_per_second, self._pairs, strict=True)
        ]
        network = Network(channels=channels, routes={pair: i for i, pair in enumerate(self._pairs)})
        return simulate(self._actions, stages, network, beside=self._beside, optimizer=self._rest).seconds


def share_of_rates(seconds: Callable[[float], float], measured: float) -> float:
    """The share of the measured rates with which a step takes as long as it did; 1 where that is no explanation.

    Training may not get all that a probe gets: TCP starts slowly after a pause, and some links carry one direction at a
    time.

    Args:
        seconds: of a step, by this share. measured: seconds of a step.
    """
    if measured <= _AS_PREDICTED * seconds(1.0) or seconds(_LEAST_SHARE) < measured:
        return 1.0
    low, high = _LEAST_SHARE, 1.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return high


def choose(
    seconds: Callable[[tuple[str, ...]], float],
    formats: Mapping[str, tuple[int, int]],
    crosses: Sequence[bool],
    current: tuple[str, ...] | None = None,
) -> tuple[tuple[str, ...], dict[str, float]]:
    """The most exact formats that are about as fast as the fastest.

    Formats that are there already stay if they have more bits than these and are not much slower.

    Args:
        seconds: of a step, by the format of each boundary. formats: the most exact first, with their sizes.
        crosses: of each boundary, whether it lies between two ranks; others take the most exact format.
        current: formats of the boundaries by now.

    Returns:
        The format of each boundary; and seconds by format at all boundaries, and with those that were chosen.
    """
    names, timed = list(formats), functools.cache(seconds)
    places = [i for i, does in enumerate(crosses) if does]

    def everywhere(name: str) -> tuple[str, ...]:
        return tuple(name if does else names[0] for does in crosses)

    def changed(mix: tuple[str, ...], place: int, name: str) -> tuple[str, ...]:
        return (*mix[:place], name, *mix[place + 1 :])

    mix = min(map(everywhere, names), key=timed)
    for place in places:
        mix = min((changed(mix, place, name) for name in names), key=timed)
    best = timed(mix)
    for least in names:  # at all boundaries alike, so that equal links keep equal formats
        exact = tuple(min(name, least, key=names.index) for name in mix)
        if timed(exact) <= best * _AS_FAST:
            mix = exact
            break
    for place in places:
        limit = timed(mix) * _AS_FAST_THERE
        mix = next(option for name in names if timed(option := changed(mix, place, name)) <= limit)
    if current is not None and timed(current) <= best * _KEEP and _nbytes(current, formats) > _nbytes(mix, formats):
        mix = current
    return mix, {**{name: timed(everywhere(name)) for name in names}, "these": timed(mix)}


def usable(texts: Sequence[str], shape: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """The formats that can code messages of this shape and take fewer bytes than those before; with their sizes."""
    found: dict[str, tuple[int, int]] = {}
    for text in texts:
        forward, backward = parse_pair(text)
        try:
            sizes = forward.nbytes(shape), backward.nbytes(shape)
        except ValueError:
            continue
        if all(sum(sizes) < sum(each) for each in found.values()):
            found[text] = sizes
    return found


def coding_seconds(text: str, shape: tuple[int, int, int], device: torch.device) -> tuple[float, float, float, float]:
    """Seconds to encode and to decode activations, and the same for gradients."""
    forward, backward = (_coding(codec, shape, device) for codec in parse_pair(text))
    return *forward, *backward


def _coding(codec: Codec, shape: tuple[int, int, int], device: torch.device) -> tuple[float, float]:
    warm_up(codec, torch.Size(shape), torch.float32, device)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)  # not the generator of the training
    sender, receiver = (open_session(codec, shape=x.shape, dtype=x.dtype, device=device) for _ in range(2))
    times: tuple[list[float], list[float]] = [], []
    cache = torch.zeros(_CACHE, device=device)
    for _ in range(_ROUNDS):
        cache.add_(1)
        start = _now(device)
        payload = sender.encode(x)
        times[0].append(_now(device) - start)
        cache.add_(1)
        start = _now(device)
        receiver.decode(payload, out=torch.empty_like(x))
        times[1].append(_now(device) - start)
    return min(times[0]), min(times[1])


def _now(device: torch.device) -> float:
    """The time when all work of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _nbytes(mix: Sequence[str], formats: Mapping[str, tuple[int, int]]) -> int:
    return sum(sum(formats[name]) for name in mix)
