"""Predicts time and memory of a choice of stages, schedule and formats on a cluster, and searches for the best."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

import torch

from lowbit.codecs import Codec, parse, parse_pair
from lowbit.codecs.speed import coding_speed
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit_run.config import ConfigError
from lowbit_run.plan.cluster import Cluster, Machine
from lowbit_run.plan.sizes import ModelSizes, optimizer_ns
from lowbit_run.simulate import Actions, Channel, Network, Step, actions_from
from lowbit_run.simulate.held import InFlight, in_flight
from lowbit_run.simulate.predict import AS_FAST, choose_formats, predicted_step
from lowbit_run.simulate.step import order_of
from lowbit_run.train.config import PipelineConfig, TrainConfig
from lowbit_run.train.evaluate import evaluation_bytes
from lowbit_run.train.export import export_dtype
from lowbit_run.train.footprint import LayerSaves, rank_bytes
from lowbit_run.train.layout import PipelineLayout, make_layout
from lowbit_run.train.model import hugging_face_config
from lowbit_run.train.saved import saves_of, stage_policies
from lowbit_run.train.schedules import SCHEDULES, Schedule
from lowbit_run.train.tied import expected_rows, row_bytes, tied_codec


@dataclass(frozen=True, kw_only=True)
class PipelineChoice:
    """A way to cut and run a model. `layers`: of each stage; empty: distributed evenly.

    `formats`: of activations, or of both ways ("int4 / int6"): one for each boundary, or one for all.
    """

    schedule: Schedule
    stages_per_rank: int
    microbatches: int
    layers: tuple[int, ...] = ()
    formats: tuple[str, ...] = ("fp32",)

    def pipeline(self, ranks: int, base: PipelineConfig = PipelineConfig()) -> PipelineConfig:
        """The settings of `lowbit train` for one pipeline of `ranks` ranks; `base` has what is not chosen."""
        pairs = [text.partition(" / ") for text in self.formats]
        backward = tuple(second for _, _, second in pairs)
        given = tuple(second or repr(parse_pair(text)[1]) for text, second in zip(self.formats, backward, strict=True))
        codes = not all(parse_pair(text)[0].is_plain for text in self.formats)
        return replace(
            base, ranks=ranks, data_parallel=1, stages_per_rank=self.stages_per_rank, layers=self.layers,
            schedule=self.schedule, microbatches=self.microbatches, forward=tuple(first for first, _, _ in pairs),
            backward=given if any(backward) else (), anchor=base.anchor and codes,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """The predicted time, memory (bytes of each rank) and traffic of a choice.

    `bits`: per element, forward and backward, of each boundary. `tied_bytes`: of the rows of a tied embedding in a
    step, both ways.
    """

    choice: PipelineChoice
    step: Step
    memory: tuple[float, ...]
    bits: tuple[tuple[float, float], ...]
    tied_bytes: int

    @property
    def total_bits(self) -> float:
        """Bits per element of all boundaries together, both ways."""
        return sum(map(sum, self.bits))

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.step.seconds

    @property
    def nbytes(self) -> float:
        """Bytes of a step, over all links."""
        return float(self.step.nbytes.sum()) + self.tied_bytes


class Predictor:
    """Predicts time and memory of choices for a model on a cluster; `config` has all settings that are not chosen."""

    def __init__(self, cluster: Cluster, sizes: ModelSizes, config: TrainConfig) -> None:
        self.cluster, self.sizes, self.config = cluster, sizes, config
        self.sequence, self.batch = config.data.sequence, config.data.batch
        self._tied_rows, self._checksums = tied_codec(config.pipeline), config.run.checksums
        self.machines = cluster.of_ranks
        self._speed = functools.cache(coding_speed)
        self._own_optimizer = functools.cache(optimizer_ns)
        self._saved = functools.cache(self._saved_by_layer)

    def rows(self, choice: PipelineChoice) -> int:
        """Windows of a micro-batch; ConfigError if the batch cannot be divided into these micro-batches."""
        rows, rest = divmod(self.batch, choice.microbatches)
        if rest:
            raise ConfigError(f"data.batch is {self.batch}; allowed: a multiple of {choice.microbatches} micro-batches")
        return rows

    def layout(self, choice: PipelineChoice) -> PipelineLayout:
        """The layers of each stage, and the stages of each rank."""
        ranks = len(self.machines)
        return make_layout(replace(choice, formats=("fp32",)).pipeline(ranks), ranks=ranks, layers=self.sizes.layers)

    def layer_seconds(self, machine: Machine, tokens: int) -> float:
        """Seconds of forward and backward of a decoder layer, for a micro-batch with this many tokens."""
        if machine.layer_seconds:
            growing = machine.layer_seconds - machine.layer_overhead
            measured = machine.layer_overhead + tokens * growing / machine.layer_tokens
            adapted = self.sizes.last_passes == 2
            return measured if adapted else measured * self.sizes.passes / 3  # with adapters, of the run's own layers
        return tokens * self.sizes.passes * self.sizes.layer_flops / (machine.tflops * 1e12)

    def predict(self, choice: PipelineChoice) -> Prediction:
        """Simulate a choice; ConfigError: refused by `lowbit train`, too little memory, or machines without a link."""
        layout = self.layout(choice)
        memory = self._memory(choice, layout)
        shape = self._shape(choice)
        bits = tuple(
            (forward.bits_per_element(shape), backward.bits_per_element(shape))
            for forward, backward in map(parse_pair, _every(choice.formats, layout.stages - 1))
        )
        network = self._network(layout)
        step, tied_bytes = self._step(choice, layout, network), 0
        if self._followed(layout):
            tied_bytes, busy = 2 * self._step_rows(), step.busy.copy()
            first, last = layout.rank_of(0), layout.rank_of(layout.stages - 1)
            for channel in (network.routes[first, last], network.routes[last, first]):
                busy[channel] += self._step_rows() / network.channels[channel].bytes_per_second
            step = replace(step, busy=busy)
        return Prediction(choice=choice, step=step, memory=memory, bits=bits, tied_bytes=tied_bytes)

    def bytes_outside_steps(self, choice: PipelineChoice, evaluations: int, *, batches: int, saved: bool) -> float:
        """Bytes that all ranks send outside of steps: for evaluations of `batches` batches, and to save the model."""
        layout = self.layout(choice)
        exact, shapes = parse("fp32"), [(self.batch, self.sequence, self.sizes.width)] * batches
        coded = [parse_pair(text)[0] for text in _every(choice.formats, layout.stages - 1)]
        without, within = (
            evaluation_bytes(layout, codecs, shapes, checksums=self._checksums)
            for codecs in ([exact] * len(coded), coded)
        )
        if self._followed(layout) and batches:
            without += self._row_bytes(batches * self.batch * self.sequence, exact)
        before = self.config.data.format == "jsonl"  # samples are also scored before training, without codecs
        weights = sum(self._parameters(layout, rank) for rank in range(1, layout.ranks))
        scored = (evaluations + before) * without + evaluations * within
        return scored + saved * weights * saved_itemsize(self.config)

    def fits(self, choice: PipelineChoice, counts: Sequence[int], rank: int) -> bool:
        """Whether the machine of a rank has enough memory for these numbers of layers on its stages."""
        return self.rank_bytes(choice, counts, rank) <= self.machines[rank].bytes

    def rank_bytes(self, choice: PipelineChoice, counts: Sequence[int], rank: int) -> int:
        """Memory of a rank with `counts` layers on its stages: what it keeps, and activations at the worst moment."""
        layout = replace(self.layout(replace(choice, layers=())), layer_counts=tuple(counts))
        held, sizes = self._schedule(choice, layout)[1], self.sizes
        saved = self._saved(replace(choice, formats=("fp32",)), layout)
        return rank_bytes(sizes.kept, sizes.batch, layout, rank, rows=self.rows(choice), held=held, saved=saved)

    def _saved_by_layer(self, choice: PipelineChoice, layout: PipelineLayout) -> list[list[LayerSaves]]:
        """What each layer of each stage saves; ConfigError if the run's settings are not for these stages."""
        config, sizes = replace(self.config, pipeline=choice.pipeline(layout.ranks, self.config.pipeline)), self.sizes
        policies = stage_policies(config, layout, sizes.kept, sizes.batch, vocab=sizes.vocab)
        return [saves_of(policy, layers) for policy, layers in zip(policies, layout.layer_counts, strict=True)]

    def _schedule(self, choice: PipelineChoice, layout: PipelineLayout) -> tuple[Actions, InFlight]:
        counts = layout.ranks, choice.stages_per_rank, choice.microbatches
        return _schedule(choice.schedule, *counts, not self.sizes.checkpoints)

    def _shape(self, choice: PipelineChoice) -> tuple[int, int, int]:
        return self.rows(choice), self.sequence, self.sizes.width

    def _step(self, choice: PipelineChoice, layout: PipelineLayout, network: Network) -> Step:
        machines = self.machines
        tokens, shape, sizes = self.rows(choice) * self.sequence, self._shape(choice), self.sizes
        ranks = [layout.rank_of(stage) for stage in range(layout.stages)]
        layers = [*map(float, layout.layer_counts)]
        layers[-1] += sizes.last_passes * sizes.last_flops / (sizes.passes * sizes.layer_flops)
        parameters = [self._parameters(layout, rank) for rank in range(layout.ranks)]

        def coding(rank: int, text: str) -> list[float]:
            speeds = (self._coding(machines[rank], codec, shape) for codec in parse_pair(text))
            return [4 * math.prod(shape) / speed for pair in speeds for speed in pair]

        def nbytes(text: str) -> tuple[int, int]:
            forward, backward = parse_pair(text)
            return forward.nbytes(shape), backward.nbytes(shape)

        return predicted_step(
            self._schedule(choice, layout)[0],
            [count * self.layer_seconds(machines[rank], tokens) for count, rank in zip(layers, ranks, strict=True)],
            ranks,
            network,
            formats=_every(choice.formats, layout.stages - 1),
            sizes=functools.cache(nbytes),
            coding=functools.cache(coding),
            checksum=CHECKSUM_BYTES * self._checksums,
            forward=1 / sizes.passes,
            overlaps_coding=all(machine.gpus for machine in machines),
            optimizer=[
                1e-9 * count * (machine.optimizer_ns or self._own_optimizer())
                for count, machine in zip(parameters, machines, strict=True)
            ],
            averaging=[self._tied_seconds(layout, rank) for rank in range(layout.ranks)],
        )

    def _network(self, layout: PipelineLayout) -> Network:
        """Build channels between all ranks that exchange activations, and between the ends of the pipeline."""
        channels: list[Channel] = []
        known: dict[object, int] = {}
        routes: dict[tuple[int, int], int] = {}
        pairs = {(layout.rank_of(s), layout.rank_of(s + 1)) for s in range(layout.stages - 1)}
        if self._followed(layout):
            pairs.add((layout.rank_of(0), layout.rank_of(layout.stages - 1)))
        for a, b in sorted({*pairs, *((b, a) for a, b in pairs)}):
            if a == b:
                continue
            first, second = self.machines[a].name, self.machines[b].name
            link = self.cluster.link(first, second)
            if link is None:
                key, channel = (first, a, b), Channel()
            else:
                back = link.between[0] != first if link.between else b < a
                rate = link.back_mbit if back and link.back_mbit else link.mbit
                channel = Channel(bytes_per_second=rate * 1e6 / 8, latency=link.rtt_ms / 2000)
                pair = (min(first, second), max(first, second))
                key = (link.shared or pair, False if link.half_duplex else back)
            if key not in known:
                known[key] = len(channels)
                channels.append(channel)
            routes[a, b] = known[key]
        return Network(channels=channels, routes=routes)

    def _parameters(self, layout: PipelineLayout, rank: int) -> int:
        last, stages = layout.stages - 1, layout.stages_of(rank)
        copied = self.sizes.tied * (self._followed(layout) and 0 in stages)
        each = (self.sizes.parameters(layout.layer_counts[s], first=s == 0, last=s == last) for s in stages)
        return sum(each) - copied

    def _tied_seconds(self, layout: PipelineLayout, rank: int) -> float:
        """Seconds of sending a tied embedding's rows to the first rank, and their gradients back."""
        ends = layout.rank_of(0), layout.rank_of(layout.stages - 1)
        link = self.cluster.link(*(self.machines[end].name for end in ends))
        if link is None or not self._followed(layout) or rank not in ends:
            return 0.0
        byte = (2 if link.half_duplex else 1) * 8e-6 / min(link.mbit, link.back_mbit or link.mbit)
        return 2 * (self._step_rows() * byte + link.rtt_ms / 2000)

    def _step_rows(self) -> int:
        """Bytes of a tied embedding's rows in a step, in one direction."""
        return self._row_bytes(self.batch * self.sequence, self._tied_rows)

    def _row_bytes(self, tokens: int, codec: Codec) -> int:
        rows = expected_rows(tokens, self.sizes.tied // self.sizes.width)
        return row_bytes(rows, self.sizes.width, codec, checksums=self._checksums)

    def _followed(self, layout: PipelineLayout) -> bool:
        """Whether the first rank's copy of a tied embedding follows that of the last rank."""
        return self.sizes.tied > 0 and layout.rank_of(0) != layout.rank_of(layout.stages - 1)

    def _memory(self, choice: PipelineChoice, layout: PipelineLayout) -> tuple[float, ...]:
        """Memory of each rank, in bytes; MemoryShort if a rank needs more than its machine has."""
        found = []
        for rank, machine in enumerate(self.machines):
            found.append(self.rank_bytes(choice, layout.layer_counts, rank))
            if found[-1] > machine.bytes:
                layers = sum(layout.layer_counts[stage] for stage in layout.stages_of(rank))
                raise MemoryShort(
                    f"machine {machine.name!r} has {machine.bytes / 1e6:,.1f} MB and needs {found[-1] / 1e6:,.1f} "
                    f"for {layers} layers; allowed: more memory, more machines, or a smaller model"
                )
        return tuple(found)

    def _coding(self, machine: Machine, codec: Codec, shape: tuple[int, int, int]) -> tuple[float, float]:
        for name, speed in machine.coding_speeds.items():
            if parse(name) == codec:
                return speed
        return self._speed(codec, (1, *shape[1:]))


class MemoryShort(ConfigError):
    """A machine has less memory than its share of the model takes."""


def saved_itemsize(config: TrainConfig) -> int:
    """Bytes of each saved weight, also where the files of `model.pretrained` are not there yet."""
    if config.lora.rank:
        return torch.float32.itemsize
    if config.model.pretrained and config.run.save_dtype is None:
        dtype: Any = hugging_face_config(config.model, vocab=0, sequence=config.data.sequence).dtype
    else:
        dtype = export_dtype(config)
    return (dtype or torch.float32).itemsize


def _every(formats: tuple[str, ...], boundaries: int) -> tuple[str, ...]:
    return formats * boundaries if len(formats) == 1 else formats


@functools.cache
def _schedule(name: str, ranks: int, stages_per_rank: int, microbatches: int, split: bool) -> tuple[Actions, InFlight]:
    order = order_of(name, ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches, split=split)
    return actions_from(order), in_flight(order)


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
        if SCHEDULES[schedule].laps and each == 1 and "1F1B" in schedules:
            continue  # the same as 1F1B or GPipe
        plain = PipelineChoice(schedule=schedule, stages_per_rank=each, microbatches=cut)
        try:
            for name, layers in product(formats, _splits(predictor, plain)):
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
    first = max((found for found in order if found.seconds <= AS_FAST * order[0].seconds), key=lambda f: f.total_bits)
    as_fast = AS_FAST * order[0].seconds / first.seconds  # what the choice of `first` leaves of the tolerance
    return [_by_boundary(predictor, first, formats, as_fast), *(found for found in order if found is not first)]


def _splits(predictor: Predictor, choice: PipelineChoice) -> list[tuple[int, ...]]:
    """Return the split whose slowest rank is fastest, and the even one, written as (), if that also fits."""
    layout, sizes = predictor.layout(choice), predictor.sizes
    tokens, head = predictor.rows(choice) * predictor.sequence, sizes.last_flops / sizes.layer_flops
    seconds = [predictor.layer_seconds(machine, tokens) for machine in predictor.machines]
    costs: list[Callable[[int], float]] = [lambda layers, each=each: each * layers for each in seconds]
    last = layout.rank_of(layout.stages - 1)
    costs[last] = lambda layers: seconds[last] * (layers + head)
    fastest = best_split(costs, sizes.layers, least=choice.stages_per_rank)
    assert fastest is not None  # there are at least as many layers as stages
    even = layout.layer_counts
    found = dict.fromkeys((_over_stages(fastest, choice, predictor), even))
    fitting = [layers for layers in found if all(predictor.fits(choice, layers, rank) for rank in range(layout.ranks))]
    fitting = fitting or [_within_memory(predictor, choice, costs)]
    return [() if layers == even else layers for layers in fitting]


def _within_memory(
    predictor: Predictor, choice: PipelineChoice, costs: Sequence[Callable[[int], float]]
) -> tuple[int, ...]:
    """Return the fastest split whose ranks have no more layers than fit into their memory, or raise MemoryShort."""
    layers, ranks, each = predictor.sizes.layers, len(costs), choice.stages_per_rank
    most = []
    for rank in range(ranks):
        limit = each - 1
        for count in range(each, layers - each * (ranks - 1) + 1):
            others = [count if one == rank else each for one in range(ranks)]
            if not predictor.fits(choice, _over_stages(others, choice, predictor), rank):
                break
            limit = count
        most.append(limit)
    shares = best_split(costs, layers, least=each, most=most)
    if shares is None:
        predictor.predict(choice)  # raises with the numbers of the even split
        raise MemoryShort("the model does not fit into the memory of the cluster")
    return _over_stages(shares, choice, predictor)


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

    bits = {name: one.total_bits for name in formats if (one := predicted((name,) * boundaries))}
    names = sorted(bits, key=lambda name: -bits[name])
    start = _every(found.choice.formats, boundaries)
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
