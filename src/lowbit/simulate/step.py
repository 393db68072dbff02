"""Simulates a training step of a pipeline: which rank computes, codes, sends and waits, and when.

At the end of a step all ranks send their metrics to rank 0, which sends the sums back; then each runs its optimizer.
A step is the time between two sums, and simulating one from sum to sum gives the steady state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowbit.simulate import events
from lowbit.simulate.orders import Actions
from lowbit.simulate.parts import Network, StageTimes
from lowbit.simulate.program import Floats, StepProgram

_COMPILED_FROM = 50_000  # actions simulated so far: for fewer, compiling takes longer than running in Python
_simulated = [0]


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
        compute, coding, finish: float64 (R,): seconds of each rank; `finish` is its optimizer and what it averages.
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
        """float64 (R,): seconds in which a rank does nothing."""
        return np.maximum(0.0, self.seconds - self.compute - self.coding - self.finish)

    @property
    def waiting_share(self) -> float:
        """The average share of a step that a rank waits."""
        return float(self.waiting.mean() / self.seconds) if self.seconds else 0.0


def simulate(
    actions: Actions,
    stages: Sequence[StageTimes],
    network: Network,
    *,
    beside: bool = False,
    optimizer: Sequence[float] | float = 0.0,
    averaging: Sequence[float] | float = 0.0,
) -> Step:
    """Simulate a training step that follows another.

    Args:
        actions: of the schedule (`lowbit.simulate.actions`, or `actions_from` a list of PyTorch's).
        stages: one for each stage of the schedule.
        network: of the ranks.
        beside: coding overlaps with computing, as on a GPU: it delays messages but takes none of the rank's time.
        optimizer: seconds of each rank, or of all, between the sums of a step and the next step.
        averaging: seconds of each rank, or of all, between its last action and the sums, such as averaging gradients.

    Raises:
        ValueError: actions that are not one step of these stages, a pair of ranks without a channel, or ranks that wait
            for each other forever; the text names the first action that cannot begin.
    """
    program = StepProgram(actions, stages, network, beside)
    before, after = _each(optimizer, actions.ranks), _each(averaging, actions.ranks)
    whole, place = program.between_sums(before, after)
    begin, end = np.zeros(len(whole.seconds)), np.zeros(len(whole.seconds))
    entered, left = np.zeros(len(whole.link)), np.zeros(len(whole.link))
    busy = np.zeros(len(network.channels) + 1)
    _simulated[0] += len(end)
    loop = events.run if _simulated[0] >= _COMPILED_FROM else getattr(events.run, "py_func", events.run)
    done = loop(
        whole.first, whole.awaited, whole.seconds, whole.emitted, whole.link, whole.wire, whole.receiver,
        whole.latency, begin, end, entered, left, busy,
    )  # fmt: skip
    if done < len(end):
        raise ValueError(program.stuck(end[place]))
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
            micro_batch=program.number, leaves=entered[:count],
            arrives=left[:count] + program.latency,
        ),
    )  # fmt: skip


def _sums(of: NDArray[np.int32], values: Floats, count: int) -> Floats:
    return np.bincount(of, values, count).astype(np.float64)


def _each(value: Sequence[float] | float, ranks: int) -> Floats:
    numbers = np.asarray(value, dtype=np.float64)
    if numbers.shape not in ((), (ranks,)):
        raise ValueError(f"optimizer and averaging have {value}; allowed: one number, or one for each of {ranks} ranks")
    numbers = np.broadcast_to(numbers, ranks)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise ValueError(f"optimizer and averaging have {value}; allowed: at least 0 and finite")
    return numbers
