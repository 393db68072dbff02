"""Builds the arguments of the event loop: the schedule's actions and messages, and those between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowbit.simulate import events
from lowbit.simulate.orders import KINDS, Actions, B, F, I, W
from lowbit.simulate.parts import Network, StageTimes

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Whole:
    """The arguments of the event loop, including the actions and messages at both ends of the step."""

    first: NDArray[np.int64]
    awaited: NDArray[np.int32]
    emitted: NDArray[np.int32]
    seconds: Floats
    link: NDArray[np.int32]
    wire: Floats
    receiver: NDArray[np.int32]
    latency: Floats


class StepProgram:
    """The schedule's actions with their messages."""

    def __init__(self, actions: Actions, stages: Sequence[StageTimes], network: Network, beside: bool) -> None:
        self.actions, self.network = actions, network
        self.counts, self.owner = checked(actions, len(stages))
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
        """Compute the seconds of each action: computing, and coding before and after."""
        stage, kind = self.actions.stage, self.actions.kind
        table = np.zeros((len(KINDS), len(stages)))
        for i, each in enumerate(stages):
            # Inputs of the first stage have no gradients: PyTorch does everything in the pass for the weights.
            inputs = each.backward / 2 if i else 0.0
            table[:, i] = each.forward, each.backward, inputs, each.backward - inputs  # as in KINDS
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
        """Find the channel of each message, its seconds on it, and its latency."""
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

    def between_sums(self, before: Floats, after: Floats) -> tuple[Whole, NDArray[np.int64]]:
        """Return the program from one sum of metrics to the next, and the positions of the schedule's actions in it.

        Rank 0 sends the sums; every rank runs its optimizer, its actions and its averaging, and sends its metrics to
        rank 0, which waits for all of them.
        """
        ranks, others, channels = self.actions.ranks, self.actions.ranks - 1, len(self.network.channels)
        first = self.actions.first
        release, report = self.messages + np.arange(others), self.messages + others + np.arange(others)
        head, tail = np.full(ranks, 1), np.full(ranks, 1)
        head[0], tail[0] = others + 1, others + 1
        offset = np.cumsum(head + tail) - tail  # by which a rank's actions move in the whole program
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
        whole = Whole(
            first=starts.astype(np.int64), awaited=awaited, emitted=emitted, seconds=seconds,
            link=np.append(self.link, link).astype(np.int32),
            wire=np.append(self.wire, np.zeros(2 * others)),
            receiver=np.concatenate([self.receiver, np.arange(1, ranks), np.zeros(others)]).astype(np.int32),
            latency=np.append(self.latency, latency),
        )  # fmt: skip
        return whole, place

    def stuck(self, end: Floats) -> str:
        """The error message for ranks that wait for each other; `end`: of actions, 0 for those that never began."""
        waiting = np.flatnonzero((end == 0.0) & (self.awaited >= 0))
        if not len(waiting):
            return "the ranks wait for each other forever"
        action = int(waiting[0])
        return (
            f"the ranks wait for each other forever: rank {self.actions.rank[action]} cannot begin "
            f"{self.actions.name(action)}, because rank {self.sender[self.awaited[action]]} never reaches the action "
            "that sends its input; allowed: an order without cycles"
        )


def checked(actions: Actions, stages: int) -> tuple[int, NDArray[np.int32]]:
    """Check that the actions form one step; return the number of micro-batches, and the rank of each stage."""
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
            "one of them needs a later one"
        )
    return count, owner
