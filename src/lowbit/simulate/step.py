"""A training step of a pipeline, simulated: who computes, codes, sends and waits when.

What is simulated is what `lowbit train` does. A rank takes its actions in the schedule's order. It waits for the
message of an action, decodes it, computes, encodes the result and goes on while that is sent. At the end of a step all
ranks send their numbers to rank 0, which sends the sums back. Then each runs its optimizer and begins the next step. So
a step is the time between two sums, and simulating one from sum to sum gives the steady state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lowbit.simulate import events
from lowbit.simulate.orders import KINDS, Actions, B, F, I, W

Floats = NDArray[np.float64]
_UNBOUNDED = (1 << 31) - 1
_COMPILED_FROM = 4000  # actions; below, Python is faster than compiling


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A link in one direction, or both directions of a half-duplex link: it carries one message at a time.

    Args:
        bytes_per_second: rate of payloads; infinite by default.
        latency: seconds from the end of sending to the receiver.
        most: messages that may be on it or wait for it; a rank whose next message finds no room stops computing.
            0: any number, as in lowbit.

    Raises:
        ValueError: a rate that is not positive, or a negative latency or number.
    """

    bytes_per_second: float = math.inf
    latency: float = 0.0
    most: int = 0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {self.bytes_per_second}; allowed: more than 0")
        if not (0 <= self.latency < math.inf and self.most >= 0):
            raise ValueError(f"latency is {self.latency} and most is {self.most}; allowed: at least 0")


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds and bytes of one micro-batch on a stage.

    Args:
        forward, backward: computing. inputs, weights: of backward's two passes, if a schedule splits it; by default
            half of it each.
        encode_forward: coding what goes to the next stage. decode_forward: decoding what comes from the previous one.
        encode_backward: coding gradients for the previous stage. decode_backward: decoding those of the next one.
        forward_bytes, backward_bytes: of the messages that this stage sends.

    Raises:
        ValueError: negative or not finite.
    """

    forward: float
    backward: float
    inputs: float | None = None
    weights: float | None = None
    encode_forward: float = 0.0
    decode_forward: float = 0.0
    encode_backward: float = 0.0
    decode_backward: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{field.name} is {value}; allowed: at least 0 and finite")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Who sends to whom over what.

    Args:
        channels: all of them. A channel that several pairs of ranks use is shared; one that both directions of a pair
            use is half-duplex.
        routes: index of the channel from a rank to another. Ranks that exchange activations need one. The numbers at
            the end of a step travel over it, too; without one they take the longest latency of any channel.
    """

    channels: Sequence[Channel]
    routes: Mapping[tuple[int, int], int]


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Machines that several ranks share.

    Args:
        of: host of each rank. cores: of each host; an action takes one.
    """

    of: Sequence[int]
    cores: Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """When everything happened, in seconds from the sum at the end of the step before.

    Attributes:
        actions: of the schedule. begin, end: float64 (A,), of each, with coding. decode, encode: float64 (A,), its
            seconds of coding, at its beginning and at its end.
        sender, receiver: int32 (M,), ranks of the messages between stages. boundary: int32 (M,), between stage i and
            i + 1. backward: bool (M,), gradients. micro_batch: int32 (M,).
        leaves, arrives: float64 (M,): when a message begins to occupy its channel, and when its receiver has it.
    """

    actions: Actions
    begin: Floats
    end: Floats
    decode: Floats
    encode: Floats
    sender: NDArray[np.int32]
    receiver: NDArray[np.int32]
    boundary: NDArray[np.int32]
    backward: NDArray[np.bool_]
    micro_batch: NDArray[np.int32]
    leaves: Floats
    arrives: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A simulated step.

    Attributes:
        seconds: of the step, as one follows another.
        compute, coding, finish: float64 (R,): seconds of each rank; `finish` is its optimizer and what it averages.
        busy: float64, seconds that each channel was occupied. nbytes: that each carried.
        timeline: of actions and messages.
    """

    seconds: float
    compute: Floats
    coding: Floats
    finish: Floats
    busy: Floats
    nbytes: Floats
    timeline: Timeline

    @property
    def waiting(self) -> Floats:
        """float64 (R,): seconds in which a rank does nothing."""
        return np.maximum(0.0, self.seconds - self.compute - self.coding - self.finish)

    @property
    def waiting_share(self) -> float:
        """The share of their time that the ranks wait, on average."""
        return float(self.waiting.mean() / self.seconds) if self.seconds else 0.0


def simulate(
    actions: Actions,
    stages: Sequence[StageTimes],
    network: Network,
    *,
    hosts: Hosts | None = None,
    beside: bool = False,
    optimizer: Sequence[float] | float = 0.0,
    averaging: Sequence[float] | float = 0.0,
) -> Step:
    """Simulate a training step that follows another.

    Args:
        actions: of the schedule (`lowbit.simulate.actions`, or `actions_from` a list of PyTorch's).
        stages: one for each stage of the schedule.
        network: of the ranks.
        hosts: which ranks share cores; by default each rank has its own.
        beside: coding runs beside computing, as on a GPU: it delays messages and takes no time of the rank.
        optimizer: seconds of each rank, or of all, between the sums of a step and the next step.
        averaging: seconds of each rank, or of all, between its last action and the sums, such as averaging gradients.

    Raises:
        ValueError: actions that are not one step of these stages, a pair of ranks without a channel, or ranks that wait
            for each other for ever; the text names the first action that cannot begin.
    """
    program = _Program(actions, stages, network, beside)
    everyone = np.arange(actions.ranks, dtype=np.int32)
    cores = np.ones(actions.ranks) if hosts is None else hosts.cores
    of = everyone if hosts is None else hosts.of
    if len(of) != actions.ranks or not set(of) <= set(range(len(cores))) or min(cores) < 1:
        raise ValueError(f"hosts has {len(of)} ranks on {len(cores)} hosts; allowed: {actions.ranks} ranks, cores >= 1")
    before, after = _each(optimizer, actions.ranks), _each(averaging, actions.ranks)
    whole, place = program.between_sums(before, after)
    begin, end, left = np.zeros(len(whole.seconds)), np.zeros(len(whole.seconds)), np.zeros(len(whole.link))
    busy = np.zeros(len(network.channels) + 1)
    loop = events.run if len(end) >= _COMPILED_FROM else getattr(events.run, "py_func", events.run)
    done = loop(
        whole.first, whole.awaited, whole.seconds, whole.emitted, np.asarray(of, np.int32),
        np.asarray(cores, np.int32), whole.link, whole.wire, whole.receiver, whole.latency, program.most, begin, end,
        left, busy,
    )  # fmt: skip
    if done < len(end):
        raise ValueError(program.stuck(end[place], whole.seconds[place]))
    rank, coding = actions.rank, program.decode + program.encode
    count = program.messages
    return Step(
        seconds=float(end.max(initial=0.0)),
        compute=_sums(rank, program.compute, actions.ranks),
        coding=_sums(rank, coding, actions.ranks),
        finish=before + after,
        busy=busy[:-1],
        nbytes=_sums(program.link, program.nbytes, len(network.channels)),
        timeline=Timeline(
            actions=actions, begin=begin[place], end=end[place],
            decode=np.zeros_like(coding) if beside else program.decode,
            encode=np.zeros_like(coding) if beside else program.encode,
            sender=program.sender, receiver=program.receiver, boundary=program.boundary, backward=program.backward,
            micro_batch=program.number, leaves=left[:count] - program.wire,
            arrives=left[:count] + program.latency,
        ),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Whole:
    """The arguments of the event loop: actions and messages with those at both ends of the step."""

    first: NDArray[np.int64]
    awaited: NDArray[np.int32]
    emitted: NDArray[np.int32]
    seconds: Floats
    link: NDArray[np.int32]
    wire: Floats
    receiver: NDArray[np.int32]
    latency: Floats


class _Program:
    """The schedule's actions with their messages."""

    def __init__(self, actions: Actions, stages: Sequence[StageTimes], network: Network, beside: bool) -> None:
        self.actions, self.network = actions, network
        self.counts, self.owner = _checked(actions, len(stages))
        stage, kind, number = actions.stage, actions.kind, actions.micro_batch
        count, last = self.counts, len(stages) - 1
        remote = np.append(self.owner[:-1] != self.owner[1:], False)
        crossing = np.flatnonzero(remote)
        index = np.full(last + 1, events.NONE, np.int64)
        index[crossing] = np.arange(len(crossing))
        half = len(crossing) * count  # messages forward; as many come backward
        self.messages = 2 * half
        forward, back = kind == F, (kind == B) | (kind == I)
        below, above = np.maximum(stage - 1, 0), stage

        def message(boundary: NDArray[np.int32], backward: int, where: NDArray[np.bool_]) -> NDArray[np.int64]:
            crosses = where & remote[boundary]
            return np.where(crosses, index[boundary] * count + number + backward * half, events.NONE)

        inner = stage > 0
        self.awaited = np.where(forward, message(below, 0, forward & inner), message(above, 1, back)).astype(np.int32)
        self.emitted = np.where(forward, message(above, 0, forward), message(below, 1, back & inner)).astype(np.int32)
        self._time(stages, beside)
        boundary = np.repeat(crossing, count).astype(np.int32)
        low, high = self.owner[boundary], self.owner[boundary + 1]
        self.boundary = np.concatenate([boundary, boundary])
        self.backward = np.repeat([False, True], half)
        self.sender, self.receiver = np.concatenate([low, high]), np.concatenate([high, low])
        self.number = np.tile(np.arange(count, dtype=np.int32), 2 * len(crossing))
        sizes = np.array([[s.forward_bytes for s in stages], [s.backward_bytes for s in stages]], float)
        self.nbytes = np.concatenate([sizes[0][boundary], sizes[1][boundary + 1]])
        self._travel(stages, crossing, beside)

    def _time(self, stages: Sequence[StageTimes], beside: bool) -> None:
        """Seconds of each action: computing, and coding at either side."""
        stage, kind = self.actions.stage, self.actions.kind
        table = np.zeros((len(KINDS), len(stages)))
        for i, each in enumerate(stages):
            half = each.backward / 2
            inputs = half if each.inputs is None else each.inputs
            weights = half if each.weights is None else each.weights
            if i == 0:  # whose inputs have no gradients: PyTorch does everything in the pass for the weights
                inputs, weights = 0.0, each.backward
            table[F, i], table[B, i], table[I, i], table[W, i] = each.forward, each.backward, inputs, weights
        self.compute = table[kind, stage]
        forward, zero = kind == F, np.zeros(len(stages))
        first, second = zero.copy(), zero.copy()
        for name, array in (("decode", first), ("encode", second)):
            pair = [[getattr(s, f"{name}_{way}") for s in stages] for way in ("forward", "backward")]
            coded = np.where(forward, np.array(pair[0])[stage], np.array(pair[1])[stage])
            used = self.awaited if array is first else self.emitted
            setattr(self, name, np.where(used >= 0, coded, 0.0))
        self.decode: Floats
        self.encode: Floats
        self.seconds = self.compute if beside else self.decode + self.compute + self.encode

    def _travel(self, stages: Sequence[StageTimes], crossing: NDArray[np.int64], beside: bool) -> None:
        """Channel, seconds on it, and latency of each message."""
        channels, routes = self.network.channels, self.network.routes
        ends = [(int(self.owner[boundary]), int(self.owner[boundary + 1])) for boundary in crossing]
        pairs = sorted({*ends, *((b, a) for a, b in ends)})
        for a, b in pairs:
            if not 0 <= routes.get((a, b), -1) < len(channels):
                raise ValueError(f"rank {a} sends to rank {b}, and there is no channel between them")
        ranks = self.actions.ranks
        key = self.sender.astype(np.int64) * ranks + self.receiver
        known = np.array([a * ranks + b for a, b in pairs], np.int64)
        link = np.array([routes[pair] for pair in pairs], np.int32)
        self.link = link[np.searchsorted(known, key)] if len(pairs) else np.zeros(0, np.int32)
        rates = np.array([channel.bytes_per_second for channel in channels])
        latencies = np.array([channel.latency for channel in channels])
        self.wire = self.nbytes / rates[self.link] if len(self.link) else np.zeros(0)
        self.latency = latencies[self.link] if len(self.link) else np.zeros(0)
        if beside:
            ways = (("forward", 0, 1), ("backward", 1, 0))
            more = [
                getattr(stages[b + sender], f"encode_{way}") + getattr(stages[b + receiver], f"decode_{way}")
                for way, sender, receiver in ways
                for b in crossing
            ]
            self.latency = self.latency + np.repeat(more, self.counts)
        self.most = np.array([*(channel.most or _UNBOUNDED for channel in channels), _UNBOUNDED], np.int32)

    def between_sums(self, before: Floats, after: Floats) -> tuple[_Whole, NDArray[np.int64]]:
        """The program from sum to sum, and where the schedule's actions are in it.

        Rank 0 sends the sums, everybody runs its optimizer, its actions and its averaging, and sends its numbers to
        rank 0, which waits for all.
        """
        ranks, others, channels = self.actions.ranks, self.actions.ranks - 1, len(self.network.channels)
        first = self.actions.first
        release, report = self.messages + np.arange(others), self.messages + others + np.arange(others)
        head, tail = np.full(ranks, 1), np.full(ranks, 1)
        head[0], tail[0] = others + 1, others + 1
        offset = np.cumsum(head + tail) - tail  # of a rank's actions in the whole program, beside those before
        place = np.arange(first[-1]) + np.repeat(offset, np.diff(first))
        size = int(first[-1] + head.sum() + tail.sum())
        starts = np.append(0, np.cumsum(np.diff(first) + head + tail))
        awaited, emitted = np.full(size, events.NONE, np.int32), np.full(size, events.NONE, np.int32)
        seconds = np.zeros(size)
        for whole, part in ((awaited, self.awaited), (emitted, self.emitted), (seconds, self.seconds)):
            whole[place] = part
        begins, ends = starts[:-1] + head - 1, starts[1:] - tail
        seconds[begins], seconds[ends] = before, after
        emitted[:others], awaited[begins[1:]] = release, release
        emitted[ends[1:]], awaited[starts[1] - others : starts[1]] = report, report
        longest = max((channel.latency for channel in self.network.channels), default=0.0)
        link, latency = [], []
        for pair in [(0, r) for r in range(1, ranks)] + [(r, 0) for r in range(1, ranks)]:
            channel = self.network.routes.get(pair, channels)
            link.append(channel)
            latency.append(self.network.channels[channel].latency if channel < channels else longest)
        whole = _Whole(
            first=starts.astype(np.int64), awaited=awaited, emitted=emitted, seconds=seconds,
            link=np.append(self.link, link).astype(np.int32),
            wire=np.append(self.wire, np.zeros(2 * others)),
            receiver=np.concatenate([self.receiver, np.arange(1, ranks), np.zeros(others)]).astype(np.int32),
            latency=np.append(self.latency, latency),
        )  # fmt: skip
        return whole, place

    def stuck(self, end: Floats, seconds: Floats) -> str:
        """The message for ranks that wait for each other."""
        actions = self.actions
        for rank in range(actions.ranks):
            mine = np.arange(actions.first[rank], actions.first[rank + 1])
            if len(waiting := mine[end[mine] == 0.0][:1]) and self.awaited[waiting[0]] >= 0:
                break
        else:
            return "the ranks wait for each other for ever"
        action, what = int(waiting[0]), self.awaited[waiting[0]]
        sender = self.sender[what]
        return (
            f"the ranks wait for each other for ever: rank {rank} cannot begin {actions.name(action)}, because rank "
            f"{sender} does not get to what it sends for that; allowed: an order without circles"
        )


def _sums(of: NDArray[np.int32], values: Floats, count: int) -> Floats:
    """The sums of values by their index."""
    return np.bincount(of, values, count).astype(np.float64)


def _each(value: Sequence[float] | float, ranks: int) -> Floats:
    """One number for each rank."""
    numbers = np.broadcast_to(np.asarray(value, dtype=np.float64), ranks)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise ValueError(f"optimizer and averaging have {value}; allowed: at least 0 and finite")
    return numbers


def _checked(actions: Actions, stages: int) -> tuple[int, NDArray[np.int32]]:
    """Check that actions are one step; returns the number of micro-batches, and the rank of each stage."""
    stage, kind, number, rank = actions.stage, actions.kind, actions.micro_batch, actions.rank
    seen = sorted(set(stage.tolist()))
    if seen != list(range(stages)):
        raise ValueError(f"stages has {stages} entries, and the actions have stages {seen[:9]}; allowed: the same")
    count = int(number.max()) + 1
    key = (kind.astype(np.int64) * stages + stage) * count + number
    times = np.bincount(key, minlength=len(KINDS) * stages * count).reshape(len(KINDS), stages, count)
    whole = (times[B] == 1) & (times[I] == 0) & (times[W] == 0)
    split = (times[B] == 0) & (times[I] == 1) & (times[W] == 1)
    if not ((times[F] == 1).all() and (whole | split).all()):
        raise ValueError("the actions are not one step; allowed: F once, and B, or I and W, for each micro-batch")
    owner = np.zeros(stages, np.int32)
    owner[stage] = rank
    if (owner[stage] != rank).any():
        raise ValueError("a stage has actions on several ranks; allowed: each stage on one rank")
    position = np.full(len(KINDS) * stages * count, -1, np.int64)
    position[key] = np.arange(len(key))
    at = position.reshape(len(KINDS), stages, count)
    back = np.maximum(at[B], at[I])
    wrong = (back < at[F]) | ((at[W] >= 0) & (at[W] < at[I]))
    local = (owner[:-1] == owner[1:])[:, None]
    wrong[1:] |= local & (at[F][1:] < at[F][:-1])
    wrong[:-1] |= local & (back[:-1] < back[1:])
    if wrong.any():
        bad, micro_batch = (int(i[0]) for i in np.nonzero(wrong))
        raise ValueError(
            f"rank {owner[bad]} has actions of stage {bad}, micro-batch {micro_batch}, in an order that cannot run: "
            "each needs another that comes later"
        )
    return count, owner
