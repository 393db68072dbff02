"""Simulates a training step of a pipeline: which rank computes, codes, sends and waits, and when.

At the end of a step all ranks send their metrics to rank 0, which sends the sums back; then each runs its optimizer.
A step is the time between two sums, and simulating one from sum to sum gives the steady state. The actions of a
schedule are PyTorch's own lists, and the same as arrays.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from lowbit.codecs.checks import check_int

ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
KINDS = "FBIW"
"""Forward; backward; the pass of a split backward for the inputs; its pass for the weights."""
F, B, I, W = range(4)  # noqa: E741
Order = Mapping[int, Sequence[Any]]
"""The actions of each rank in order, as PyTorch's schedules list them, or as text ("0F1"); None is idle."""


@dataclass(frozen=True, eq=False)
class Actions:
    """The actions of all ranks as arrays, in order; rank r has the entries from `first[r]` to `first[r + 1]`.

    Args:
        first: int64 (R + 1,). stage, micro_batch: int32 (A,). kind: uint8 (A,), indices into `KINDS`.
    """

    first: NDArray[np.int64]
    stage: NDArray[np.int32]
    kind: NDArray[np.uint8]
    micro_batch: NDArray[np.int32]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.first) - 1

    @property
    def rank(self) -> NDArray[np.int32]:
        """int32 (A,): the rank of each action."""
        return np.repeat(np.arange(self.ranks, dtype=np.int32), np.diff(self.first))

    def name(self, action: int) -> str:
        """An action as PyTorch prints it, such as "0F1"."""
        return f"{self.stage[action]}{KINDS[self.kind[action]]}{self.micro_batch[action]}"

    def names(self, rank: int) -> list[str]:
        """The actions of a rank."""
        return [self.name(action) for action in range(self.first[rank], self.first[rank + 1])]


def actions(schedule: str, *, ranks: int, stages_per_rank: int = 1, microbatches: int) -> Actions:
    """Return the actions of one step of a schedule as arrays; see `order_of`."""
    return actions_from(order_of(schedule, ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches))


def actions_from(order: Order) -> Actions:
    """Read the actions of a schedule's list; communication and idle moments are left out.

    Actions that run together (OVERLAP_F_B) come one after the other, as PyTorch runs them. Micro-batches are counted
    from the lowest forward of a stage, because PyTorch's 1F1B lists those of the last stage one too high.
    """
    every: list[tuple[str, str, str]] = []
    first: list[int] = [0]
    lowest: dict[tuple[str, str], int] = {}
    for rank in sorted(order):
        for action in order[rank]:
            if action is not None:
                every += ACTION.findall(str(action))
        first.append(len(every))
    for stage, kind, number in every:
        if kind == "F":
            lowest[stage, kind] = min(lowest.get((stage, kind), int(number)), int(number))
    return Actions(
        first=np.array(first, dtype=np.int64),
        stage=np.array([int(stage) for stage, _, _ in every], dtype=np.int32),
        kind=np.array([KINDS.index(kind) for _, kind, _ in every], dtype=np.uint8),
        micro_batch=np.array([int(n) - lowest.get((stage, kind), 0) for stage, kind, n in every], dtype=np.int32),
    )


def order_of(schedule: str, *, ranks: int, stages_per_rank: int, microbatches: int, split: bool = True) -> Order:
    """Return each rank's actions in one step of a schedule of `torch.distributed.pipelining`; starts no process.

    Args:
        schedule: its name ("1F1B", "ZBVZeroBubble", ...) in upper or lower case.
        ranks, stages_per_rank: of the pipeline; GPipe and 1F1B have one stage a rank.
        microbatches: of a step.
        split: whether schedules that split backward passes in two do so; False: they run whole ones.

    Raises:
        ValueError: an unknown schedule, or numbers that it does not support.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    for name, count in (("ranks", ranks), ("stages_per_rank", stages_per_rank), ("microbatches", microbatches)):
        check_int(name, count, 1, 1 << 16)
    kind: Any = get_schedule_class(schedule)
    several = issubclass(kind, PipelineScheduleMulti)
    if not several and stages_per_rank != 1:
        raise ValueError(f"stages_per_rank is {stages_per_rank}; allowed with {schedule}: 1")
    stages = [_StageStub(index * ranks, ranks, ranks * stages_per_rank) for index in range(stages_per_rank)]
    order = actions_of(kind(stages if several else stages[0], microbatches, loss_fn=lambda *_: None))  # never run
    return order if split else _unsplit(order)


def _unsplit(order: Order) -> Order:
    texts = {rank: (str(action) for action in actions if action is not None) for rank, actions in order.items()}
    parts = {rank: [part for text in of_rank for part in ACTION.findall(text)] for rank, of_rank in texts.items()}
    return {
        rank: [f"{stage}{'B' if kind == 'I' else kind}{number}" for stage, kind, number in of_rank if kind != "W"]
        for rank, of_rank in parts.items()
    }


def actions_of(schedule: Any) -> Order:
    """Return the actions of all ranks, which every rank's schedule object holds."""
    order = getattr(schedule, "pipeline_order", None)
    return order or schedule._get_pipeline_order()


class _StageStub:
    """The attributes of a stage that a schedule reads when it lays out its actions."""

    def __init__(self, index: int, ranks: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = ranks, 0
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod, self.has_backward, self.device = nn.Identity(), True, "cpu"


@dataclass(frozen=True, kw_only=True)
class Channel:
    """A link in one direction, or both directions of a half-duplex link: it carries one message at a time.

    Args:
        bytes_per_second: rate of payloads; infinite by default.
        latency: seconds from the end of sending to the receiver.

    Raises:
        ValueError: a rate that is not positive, or a negative latency.
    """

    bytes_per_second: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {self.bytes_per_second}; allowed: more than 0")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency is {self.latency}; allowed: at least 0 and finite")


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds and bytes of one micro-batch on a stage.

    Args:
        forward, backward: seconds of computing. The two passes of a split backward take half of it each.
        encode_forward: encoding activations for the next stage. decode_forward: decoding those of the previous one.
        encode_backward: encoding gradients for the previous stage. decode_backward: decoding those of the next one.
        forward_bytes, backward_bytes: of the messages that this stage sends.

    Raises:
        ValueError: a value that is negative or not finite.
    """

    forward: float
    backward: float
    encode_forward: float = 0.0
    decode_forward: float = 0.0
    encode_backward: float = 0.0
    decode_backward: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= (value := getattr(self, field.name)) < math.inf:
                raise ValueError(f"{field.name} is {value}; allowed: at least 0 and finite")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The channels between ranks.

    Args:
        channels: all of them. A channel that several pairs of ranks use is shared; one that both directions of a pair
            use is half-duplex.
        routes: index of the channel by (sender, receiver). Ranks that exchange activations need one. The metrics sent
            at the end of a step use it, too; without one they take the longest latency of any channel.
    """

    channels: Sequence[Channel]
    routes: Mapping[tuple[int, int], int]


Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Times of all actions and messages, in seconds from the sum at the end of the previous step.

    Attributes:
        actions: of the schedule. begin, end: float64 (A,), of each, including coding. decode, encode: float64 (A,),
            seconds of coding at its beginning and at its end.
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
        seconds: from the end of one step to the end of the next.
        compute, coding, finish: float64 (R,): seconds of each rank's own work; `finish` is its optimizer, and `coding`
            is 0 where it overlaps with computing.
        busy: float64, seconds that each channel was occupied. nbytes: bytes that each carried.
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
        """float64 (R,): seconds in which a rank does nothing, as it waits for messages and averages."""
        return np.maximum(0.0, self.seconds - self.compute - self.coding - self.finish)

    @property
    def waiting_share(self) -> float:
        """The average share of a step that a rank waits."""
        return float(self.waiting.mean() / self.seconds) if self.seconds else 0.0


@dataclass(slots=True, eq=False)
class _Message:
    """A message; `seconds`: on its channel. `leaves`, `arrives`: as in `Timeline`, once it was sent."""

    sender: int
    receiver: int
    channel: int
    latency: float
    seconds: float = 0.0
    nbytes: int = 0
    backward: bool = False
    boundary: int = -1
    micro_batch: int = -1
    leaves: float = math.nan
    arrives: float = math.nan
    awaited: bool = False


@dataclass(slots=True, eq=False)
class _Task:
    """Work of a rank, which begins when the message that it needs has arrived, and ends with sending one."""

    seconds: float
    needs: _Message | None = None
    sends: _Message | None = None
    begin: float = math.nan
    end: float = math.nan


def simulate(
    actions: Actions,
    stages: Sequence[StageTimes],
    network: Network,
    *,
    overlaps_coding: bool = False,
    optimizer: Sequence[float] | float = 0.0,
    averaging: Sequence[float] | float = 0.0,
) -> Step:
    """Simulate a training step that follows another.

    Args:
        actions: of the schedule (`lowbit_run.simulate.actions`, or `actions_from` a list of PyTorch's).
        stages: one for each stage of the schedule.
        network: of the ranks.
        overlaps_coding: coding overlaps with computing, as on a GPU: it delays messages but takes no time of the rank.
        optimizer: seconds of each rank, or of all, between the sums of a step and the next step.
        averaging: seconds of each rank, or of all, between its last action and the sums, such as averaging gradients.

    Raises:
        ValueError: actions that are not one step of these stages, a pair of ranks without a channel, or ranks that wait
            for each other forever; the text names the first action that cannot begin.
    """
    ranks = actions.ranks
    before, after = _each(optimizer, ranks), _each(averaging, ranks)
    count, owner = _checked(actions, len(stages))
    messages = _messages(stages, network, owner.tolist(), count, overlaps_coding)
    by_place = {(m.backward, m.boundary, m.micro_batch): m for m in messages}
    # Inputs of the first stage have no gradients: PyTorch does everything in the pass for the weights.
    inputs = [stage.backward / 2 if index else 0.0 for index, stage in enumerate(stages)]
    seconds = {  # computing, decoding the input and encoding the result, by kind and stage
        F: [(s.forward, s.decode_forward, s.encode_forward) for s in stages],
        B: [(s.backward, s.decode_backward, s.encode_backward) for s in stages],
        I: [(half, s.decode_backward, s.encode_backward) for half, s in zip(inputs, stages, strict=True)],
        W: [(s.backward - half, 0.0, 0.0) for half, s in zip(inputs, stages, strict=True)],
    }
    parts, tasks = list[tuple[float, float, float]](), list[_Task]()
    steps = zip(actions.stage.tolist(), actions.kind.tolist(), actions.micro_batch.tolist(), strict=True)
    for stage, kind, micro_batch in steps:
        source, target = (stage - 1, stage) if kind == F else (stage, stage - 1)  # boundaries of its input and result
        needs = None if kind == W else by_place.get((kind != F, source, micro_batch))
        sends = None if kind == W else by_place.get((kind != F, target, micro_batch))
        computing, decoding, encoding = seconds[kind][stage]
        decoding, encoding = (0.0 if needs is None else decoding), (0.0 if sends is None else encoding)
        parts.append((computing, decoding, encoding))
        tasks.append(_Task(computing if overlaps_coding else decoding + computing + encoding, needs, sends))
    compute, decode, encode = np.array(parts, np.float64).T
    programs = [tasks[first:last] for first, last in itertools.pairwise(actions.first.tolist())]
    whole = _between_sums(programs, network, before.tolist(), after.tolist())
    busy = _run(whole, len(network.channels) + 1)
    if any(math.isnan(program[-1].end) for program in whole):
        stuck = ((i, task.needs) for i, task in enumerate(tasks) if math.isnan(task.begin) and task.needs is not None)
        action, message = next(stuck)
        raise ValueError(
            f"the ranks wait for each other forever: rank {actions.rank[action]} cannot begin {actions.name(action)}, "
            f"because rank {message.sender} never reaches the action that sends its input; allowed: an order without "
            "cycles"
        )

    def each(name: str, dtype: Any, of: Sequence[_Message | _Task] = messages) -> NDArray[Any]:
        return np.array([getattr(one, name) for one in of], dtype)

    sizes, channels = each("nbytes", np.float64), each("channel", np.int32)
    none = np.zeros_like(decode)
    return Step(
        seconds=max(program[-1].end for program in whole),
        compute=np.bincount(actions.rank, compute, ranks).astype(np.float64),
        coding=np.bincount(actions.rank, none if overlaps_coding else decode + encode, ranks).astype(np.float64),
        finish=before,
        busy=np.array(busy[:-1]),
        nbytes=np.bincount(channels, sizes, len(network.channels)).astype(np.float64),
        timeline=Timeline(
            actions=actions, begin=each("begin", np.float64, tasks), end=each("end", np.float64, tasks),
            decode=none if overlaps_coding else decode, encode=none if overlaps_coding else encode,
            sender=each("sender", np.int32), receiver=each("receiver", np.int32), boundary=each("boundary", np.int32),
            backward=each("backward", np.bool_), micro_batch=each("micro_batch", np.int32),
            leaves=each("leaves", np.float64), arrives=each("arrives", np.float64),
        ),
    )  # fmt: skip


def _messages(
    stages: Sequence[StageTimes], network: Network, owner: Sequence[int], count: int, overlaps_coding: bool
) -> list[_Message]:
    messages: list[_Message] = []
    for backward, boundary in itertools.product((False, True), range(len(stages) - 1)):
        source, target = (boundary + 1, boundary) if backward else (boundary, boundary + 1)
        if (pair := (owner[source], owner[target]))[0] == pair[1]:
            continue
        place, way = network.routes.get(pair, -1), "backward" if backward else "forward"
        if not 0 <= place < len(network.channels):
            raise ValueError(f"rank {pair[0]} sends to rank {pair[1]}, and there is no channel between them")
        channel, nbytes = network.channels[place], getattr(stages[source], f"{way}_bytes")
        latency, seconds = channel.latency, nbytes / channel.bytes_per_second
        if overlaps_coding:
            latency += getattr(stages[source], f"encode_{way}") + getattr(stages[target], f"decode_{way}")
        messages += [
            _Message(*pair, place, latency, seconds, nbytes, backward, boundary, micro_batch)
            for micro_batch in range(count)
        ]
    return messages


def _between_sums(
    programs: Sequence[list[_Task]], network: Network, before: Sequence[float], after: Sequence[float]
) -> list[list[_Task]]:
    """Return the ranks' programs from one sum of metrics to the next.

    Rank 0 sends the sums; every rank runs its optimizer, its actions and its averaging, and sends its metrics to
    rank 0, which waits for all of them.
    """
    free, others = len(network.channels), range(1, len(programs))
    longest = max((channel.latency for channel in network.channels), default=0.0)

    def message(sender: int, receiver: int) -> _Message:
        channel = network.routes.get((sender, receiver), free)
        return _Message(sender, receiver, channel, network.channels[channel].latency if channel < free else longest)

    sums, metrics = [message(0, rank) for rank in others], [message(rank, 0) for rank in others]
    first = [*(_Task(0.0, sends=message) for message in sums), _Task(before[0]), *programs[0], _Task(after[0])]
    return [
        first + [_Task(0.0, needs=message) for message in metrics],
        *(
            [_Task(before[rank], needs=sums[rank - 1]), *programs[rank], _Task(after[rank], sends=metrics[rank - 1])]
            for rank in others
        ),
    ]


def _run(programs: Sequence[list[_Task]], channels: int) -> list[float]:
    """Fill in the times of all tasks and messages that can happen; return the seconds that each channel is occupied.

    A channel carries one message at a time, in the order in which they were sent.
    """
    free, busy, done = [0.0] * channels, [0.0] * channels, [0] * len(programs)
    ends: list[tuple[float, int]] = []  # of the tasks that have begun, with their ranks

    def begin(rank: int, now: float) -> None:
        """Begin a rank's next task once the message that it needs arrives, if that has been sent."""
        if done[rank] < len(programs[rank]):
            task = programs[rank][done[rank]]
            if task.needs is not None and math.isnan(task.needs.arrives):
                task.needs.awaited = True
                return
            task.begin = now if task.needs is None else max(now, task.needs.arrives)
            heappush(ends, (task.begin + task.seconds, rank))

    for rank in range(len(programs)):
        begin(rank, 0.0)
    while ends:
        now, rank = heappop(ends)
        task = programs[rank][done[rank]]
        task.end = now
        done[rank] += 1
        begin(rank, now)
        if (sent := task.sends) is not None:
            sent.leaves = max(now, free[sent.channel])
            free[sent.channel] = sent.leaves + sent.seconds
            busy[sent.channel] += sent.seconds
            sent.arrives = free[sent.channel] + sent.latency
            if sent.awaited:
                begin(sent.receiver, now)
    return busy


def _checked(actions: Actions, stages: int) -> tuple[int, NDArray[np.int32]]:
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
    place = position.reshape(len(KINDS), stages, count)
    back = np.maximum(place[B], place[I])
    wrong = (back < place[F]) | ((place[W] >= 0) & (place[W] < place[I]))
    local = (owner[:-1] == owner[1:])[:, None]
    wrong[1:] |= local & (place[F][1:] < place[F][:-1])
    wrong[:-1] |= local & (back[:-1] < back[1:])
    if wrong.any():
        bad, micro_batch = (int(i[0]) for i in np.nonzero(wrong))
        raise ValueError(
            f"rank {owner[bad]} has actions of stage {bad}, micro-batch {micro_batch}, in an order that cannot run: "
            "one of them needs a later one"
        )
    return count, owner


def _each(value: Sequence[float] | float, ranks: int) -> Floats:
    numbers = np.asarray(value, dtype=np.float64)
    if numbers.shape not in ((), (ranks,)):
        raise ValueError(f"optimizer and averaging have {value}; allowed: one number, or one for each of {ranks} ranks")
    numbers = np.broadcast_to(numbers, ranks)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise ValueError(f"optimizer and averaging have {value}; allowed: at least 0 and finite")
    return numbers
