"""How payloads travel between two ranks: with tags and early, or in the order of the schedule.

Stock schedules hardly overlap, and Gloo turns half-duplex when a rank posts a send before a receive. Where messages
have tags (Gloo), `Early` takes the traffic out of the schedule's hands: all receives of a step are posted when it
starts, sends leave as soon as there is something to send, and nobody waits before the data is needed. Both directions
of the link are then busy at once, and no order of sends can deadlock, because every receive is there already.

NCCL matches messages by their order alone, so there `InOrder` hands the schedule its own operations back, with
payloads in the place of tensors. On GPUs they run on streams of their own anyway.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.collectives.failure import FailureBoard
from lowbit.pipeline.traffic import Traffic


@dataclass(frozen=True)
class Route:
    """Where a message goes or comes from: the peer's rank in the group, and a tag of its own within a step."""

    peer: int
    tag: int


class Transport(Protocol):
    """What a stage needs to move payloads. A step is `begin`, any of the others, `drain`."""

    name: str

    def begin(self, board: FailureBoard) -> None:
        """Start a step."""
        ...

    def post(self, route: Route, nbytes: int) -> None:
        """Announce that a message of this size will be taken in this step."""
        ...

    def receive(self, route: Route, nbytes: int) -> list[dist.P2POp]:
        """The schedule is about to receive: operations it shall run for that."""
        ...

    def take(self, route: Route, nbytes: int) -> Tensor:
        """The message, as soon as it is there: uint8 (nbytes,)."""
        ...

    def send(self, route: Route, payload: Tensor) -> list[dist.P2POp]:
        """Send a message: operations the schedule shall run for that."""
        ...

    def drain(self) -> None:
        """Wait until everything that this rank sent has left, and release it."""
        ...


def choose(
    group: dist.ProcessGroup, device: torch.device | str, traffic: Traffic
) -> Early | InOrder:
    """The transport for a process group's backend: `Early` for Gloo between CPUs, otherwise `InOrder`."""
    if dist.get_backend(group) == "gloo" and torch.device(device).type == "cpu":
        return Early(group, device, traffic)
    return InOrder(group, device)


@dataclass
class _Sent:
    work: dist.Work
    payload: Tensor  # Gloo reads from it until the work is done
    peer: int


# Sends of all stages of this rank: the last stage to finish a step waits for them.
_outboxes: weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Sent]] = weakref.WeakKeyDictionary()


class Early:
    """Receives posted when the step starts, sends waited for when it ends."""

    name = "early, with tags"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device | str, traffic: Traffic
    ) -> None:
        self._group = group
        self._device = device
        self._traffic = traffic
        self._posted: dict[Route, tuple[dist.Work, Tensor]] = {}
        self._outbox = _outboxes.setdefault(group, [])
        self._board: FailureBoard | None = None

    def begin(self, board: FailureBoard) -> None:
        self._board = board
        if self._posted:
            raise RuntimeError(
                f"{len(self._posted)} messages of the previous step were never taken: it ended early, or its schedule "
                "had fewer micro-batches than this stage was prepared for; start again with a new process group"
            )
        self.drain()

    def post(self, route: Route, nbytes: int) -> None:
        payload = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with self._blaming(route.peer):
            work = dist.irecv(payload, group=self._group, group_src=route.peer, tag=route.tag)
        assert work is not None  # only for ranks outside the group
        self._posted[route] = work, payload

    def receive(self, route: Route, nbytes: int) -> list[dist.P2POp]:
        return []

    def take(self, route: Route, nbytes: int) -> Tensor:
        if route not in self._posted:
            self.post(route, nbytes)
        work, payload = self._posted.pop(route)
        self._wait(work, route.peer)
        return payload

    def send(self, route: Route, payload: Tensor) -> list[dist.P2POp]:
        with self._blaming(route.peer):
            work = dist.isend(payload, group=self._group, group_dst=route.peer, tag=route.tag)
        assert work is not None
        self._outbox.append(_Sent(work, payload, route.peer))
        return []

    def drain(self) -> None:
        while self._outbox:
            sent = self._outbox.pop(0)
            self._wait(sent.work, sent.peer)

    def _wait(self, work: dist.Work, peer: int) -> None:
        assert self._board is not None
        start = time.perf_counter()
        with self._blaming(peer):
            work.wait(self._board.patience)
        self._traffic.wait_seconds += time.perf_counter() - start

    def _blaming(self, peer: int) -> _Blaming:
        assert self._board is not None
        return _Blaming(self._board, peer)


class InOrder:
    """The schedule's own operations, in its own order; what they carry are payloads."""

    name = "in the schedule's order"

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str) -> None:
        self._group = group
        self._device = device
        self._arriving: dict[Route, Tensor] = {}
        self._leaving: list[Tensor] = []

    def begin(self, board: FailureBoard) -> None:
        # The schedule has waited for all of the previous step, so none of its payloads is in use any more.
        self._arriving.clear()
        self._leaving.clear()

    def post(self, route: Route, nbytes: int) -> None:
        """Nothing: messages are matched by their order, which is the schedule's."""

    def receive(self, route: Route, nbytes: int) -> list[dist.P2POp]:
        payload = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._arriving[route] = payload
        return [dist.P2POp(dist.irecv, payload, group=self._group, group_peer=route.peer)]

    def take(self, route: Route, nbytes: int) -> Tensor:
        return self._arriving.pop(route)

    def send(self, route: Route, payload: Tensor) -> list[dist.P2POp]:
        self._leaving.append(payload)
        return [dist.P2POp(dist.isend, payload, group=self._group, group_peer=route.peer)]

    def drain(self) -> None:
        """Nothing: the schedule waits for the operations it runs."""


class _Blaming:
    """Turn a failure of communication with a peer into an error that names whoever failed first."""

    def __init__(self, board: FailureBoard, peer: int) -> None:
        self._board = board
        self._peer = peer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise self._board.blame(self._peer, error) from error
