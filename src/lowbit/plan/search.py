"""Searches for the stages, schedule and formats that are predicted to train fastest on a cluster."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter

from lowbit.config import ConfigError
from lowbit.plan.predict import MemoryShort, PipelineChoice, Prediction, Predictor
from lowbit.simulate.predict import choose_formats
from lowbit.train.config import Schedule

_LAPS = ("Interleaved1F1B", "LoopedBFS")
_AS_FAST = 1.01  # times the fastest: up to this, formats with more bits are preferred
_FEW_STAGES = 4
_SECONDS = attrgetter("seconds")
_MOST_MOVES = 8  # moves of a layer from one stage to another


def best_split(
    costs: Sequence[Callable[[int], float]], layers: int, *, least: int = 1, most: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Share layers among ranks so that the slowest rank is as fast as possible; None if they do not fit.

    Among splits with equally slow ranks, the one with the least total time is chosen: it fills the pipeline soonest.
    Both are exact. `costs`: for each rank, seconds by number of layers. `least`: of any rank. `most`: of each rank.
    """
    most = most or [layers] * len(costs)
    slowest = _share(costs, layers, least, most, max)
    if slowest is None:
        return None
    limit = slowest[0]
    bounded = [lambda count, cost=cost: cost(count) if cost(count) <= limit else math.inf for cost in costs]
    found = _share(bounded, layers, least, most, float.__add__)
    assert found is not None
    return found[1]


def _share(
    costs: Sequence[Callable[[int], float]], layers: int, least: int, most: Sequence[int], both: Callable[..., float]
) -> tuple[float, tuple[int, ...]] | None:
    """The least cost and its split; `both` combines two costs. Among equals, earlier ranks get more layers."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for cost, limit in zip(costs, most, strict=True):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (total, shares) in best.items():
            for count in range(least, min(limit, layers - used) + 1):
                found = both(total, float(cost(count))), (*shares, count)
                known = following.get(used + count)
                if known is None or found[0] < known[0] or (found[0] == known[0] and found[1] > known[1]):
                    following[used + count] = found
        best = following
    return best.get(layers)


def search(
    predictor: Predictor,
    *,
    formats: Sequence[str],
    schedules: Sequence[Schedule],
    stages_per_rank: Sequence[int],
    microbatches: Sequence[int],
) -> list[Prediction]:
    """Predict every combination, and improve the best of each format; the first is the recommended one.

    Combinations that `lowbit train` would refuse are left out, and so are those that do not fit into the memory.

    Returns:
        The fastest choice of each format, in the order of speed, except that among those within 1 % of the fastest the
        one with the most bits is first.

    Raises:
        ConfigError: no combination is possible; the text gives the reason for one of them.
    """
    best: dict[str, Prediction] = {}
    problem: ConfigError | None = None
    largest_first = sorted(microbatches, reverse=True)  # so that an error is not about too few micro-batches
    for schedule, each, cut in product(schedules, stages_per_rank, largest_first):
        if schedule in _LAPS and each == 1 and "1F1B" in schedules:
            continue  # the same as 1F1B or GPipe
        plain = PipelineChoice(schedule=schedule, stages_per_rank=each, microbatches=cut)
        try:
            shapes = list(_splits(predictor, plain))
            for name, layers in product(formats, shapes):
                found = predictor.predict(replace(plain, layers=layers, formats=(name,)))
                if name not in best or found.seconds < best[name].seconds:
                    best[name] = found
        except ConfigError as error:
            if problem is None or isinstance(error, MemoryShort):
                problem = error
    if not best:
        assert problem is not None
        raise problem
    order = sorted((_improve(predictor, found) for found in best.values()), key=_SECONDS)
    first = max((found for found in order if found.seconds <= _AS_FAST * order[0].seconds), key=lambda f: f.total_bits)
    as_fast = _AS_FAST * order[0].seconds / first.seconds  # what the choice of `first` leaves of the tolerance
    return [_by_boundary(predictor, first, formats, as_fast), *(found for found in order if found is not first)]


def _splits(predictor: Predictor, choice: PipelineChoice) -> Iterator[tuple[int, ...]]:
    """Yield the split whose slowest rank is fastest, and the even one if that also fits."""
    layout, sizes = predictor.layout(choice), predictor.sizes
    tokens = predictor.rows(choice) * predictor.sequence

    def cost(rank: int) -> Callable[[int], float]:
        each_layer = predictor.layer_seconds(predictor.machines[rank], tokens)
        extra = (rank == layout.rank_of(layout.stages - 1)) * sizes.last_flops / sizes.layer_flops
        return lambda layers: each_layer * (layers + extra)

    each = choice.stages_per_rank
    ranks = range(layout.ranks)
    most = [sizes.layers] * layout.ranks
    fastest = best_split([cost(rank) for rank in ranks], sizes.layers, least=each, most=most)
    assert fastest is not None  # there are at least as many layers as stages
    even = layout.layer_counts
    found = dict.fromkeys((_over_stages(fastest, choice, predictor), even))
    fitting = [layers for layers in found if all(predictor.fits(choice, layers, rank) for rank in ranks)]
    if not fitting:
        fitting = list(_within_memory(predictor, choice, [cost(rank) for rank in ranks]))
    yield from (() if layers == even else layers for layers in fitting)


def _within_memory(
    predictor: Predictor, choice: PipelineChoice, costs: Sequence[Callable[[int], float]]
) -> Iterator[tuple[int, ...]]:
    """Yield the fastest split whose ranks have no more layers than fit into their memory, or raise MemoryShort."""
    layers, ranks, each = predictor.sizes.layers, len(costs), choice.stages_per_rank
    most = []
    for rank in range(ranks):
        limit = each - 1
        for count in range(each, layers - each * (ranks - 1) + 1):
            others = [each] * ranks
            others[rank] = count
            if not predictor.fits(choice, _over_stages(others, choice, predictor), rank):
                break
            limit = count
        most.append(limit)
    shares = best_split(costs, layers, least=each, most=most)
    if shares is None:
        predictor.predict(choice)  # raises with the numbers of the even split
        raise MemoryShort("the model does not fit into the memory of the cluster")
    yield _over_stages(shares, choice, predictor)


def _over_stages(shares: Sequence[int], choice: PipelineChoice, predictor: Predictor) -> tuple[int, ...]:
    """The layers of each stage if those of a rank are shared evenly among its stages."""
    layout = predictor.layout(choice)
    counts = [0] * layout.stages
    for rank, share in enumerate(shares):
        stages = layout.stages_of(rank)
        each, extra = divmod(share, len(stages))
        for place, stage in enumerate(stages):
            counts[stage] = each + (place < extra)
    return tuple(counts)


def _improve(predictor: Predictor, found: Prediction) -> Prediction:
    """Move single layers as long as that makes a step faster."""
    for _ in range(_MOST_MOVES):
        better = min(_predicted(predictor, _moves(predictor, found)), key=_SECONDS, default=found)
        if better.seconds >= found.seconds * (1 - 1e-9):
            break
        found = better
    return found


def _by_boundary(predictor: Predictor, found: Prediction, formats: Sequence[str], as_fast: float) -> Prediction:
    """Change the format of single boundaries if that is faster, or about as fast with more bits."""
    boundaries = predictor.layout(found.choice).stages - 1
    if boundaries < 2:
        return found

    @functools.cache
    def predicted(mix: tuple[str, ...]) -> Prediction | None:
        return next(_predicted(predictor, [replace(found.choice, formats=mix)]), None)

    def seconds(mix: tuple[str, ...]) -> float:
        return math.inf if (one := predicted(mix)) is None else one.seconds

    uniform = {name: predicted((name,) * boundaries) for name in formats}
    names = [name for name, one in uniform.items() if one is not None]
    names.sort(key=lambda name: -uniform[name].total_bits)  # pyright: ignore[reportOptionalMemberAccess]
    start = found.choice.formats * (boundaries if len(found.choice.formats) == 1 else 1)
    mix, _ = choose_formats(seconds, names, range(boundaries), start, as_fast=as_fast)
    return predicted(mix) or found


def _predicted(predictor: Predictor, choices: Iterable[PipelineChoice]) -> Iterator[Prediction]:
    for choice in choices:
        with contextlib.suppress(ConfigError):
            yield predictor.predict(choice)


def _moves(predictor: Predictor, found: Prediction) -> Iterator[PipelineChoice]:
    """Yield choices with one layer moved from the busiest rank; with few stages, from any rank."""
    choice = found.choice
    layout = predictor.layout(choice)
    counts, sources = layout.layer_counts, range(layout.stages)
    if layout.stages > _FEW_STAGES:
        sources = layout.stages_of(int((found.step.compute + found.step.coding).argmax()))
    for source, target in product(sources, range(layout.stages)):
        if source != target and counts[source] > 1:
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            yield replace(choice, layers=tuple(moved))
