"""Point-to-point messages over Gloo: with a length, a checksum, a time limit, and errors that name the failed rank.

If the ends disagree about a length, both get an error with both lengths: of different size classes (`tags`), message
and the receive never meet, and both ends state what they wait for (`failure`); of one class, the checksum shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire import tags
from lowbit.wire.checksum import Checksums, damaged
from lowbit.wire.connections import connections_of, pieces
from lowbit.wire.errors import PeerError
from lowbit.wire.failure import FailureBoard, Letter, Route, wrong_length
from lowbit.wire.traffic import Traffic

_SHORTEST = timedelta(milliseconds=1)  # Gloo takes 0 for no limit
_MOST_DEVICES = 8  # network devices of a Gloo group, each with its own connections


class Mailbox:
    """Sends and receives messages of one conversation within a group.

    Args:
        group: over Gloo; messages are on the CPU.
        board: finds the rank that failed; may be set later, but before the first message.
        traffic: counts the seconds of checksums and waits.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        checksums: Checksums,
        board: FailureBoard | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.group, self.checksums, self.traffic = group, checksums, traffic or Traffic()
        if board is not None:
            self.board = board

    def send(self, message: Tensor, place: tuple[int, ...], *routes: Route, expected: int | None = None) -> list[Sent]:
        """Seal a message and start to send it to one or several ranks.

        Args:
            message: 1-D uint8 whose last bytes are free for the checksum; do not write to it until it has been sent.
            place: identifies the message in the conversation; the receiver passes the same.
            expected: bytes that the receiver has posted its receive for; None: the length of this message.
        """
        with self.traffic.timing("checksum_seconds"):
            self.checksums.seal(message, *place)
        sent, nbytes = [], message.numel() if expected is None else expected
        for route in routes:
            works = [
                _started(carrier.send, [message[piece]], route.peer, tags.tag(route.channel, nbytes))
                for carrier, piece in pieces(self.group, route.channel, nbytes)
            ]
            sent.append(Sent(self.board, route, nbytes, False, self.group, works, message))
        return sent

    def expect(
        self, route: Route, nbytes: int, place: tuple[int, ...] = (), buffer: Callable[[int], Tensor] | None = None
    ) -> Expected:
        """Post the receive of a message of `nbytes` of payload; one that is posted late costs another round trip.

        Args:
            place: as for `send`; may be set later, but before the wait.
            buffer: called with a number of bytes, returns at least as much memory to receive in: 1-D uint8 on the CPU.
        """
        nbytes += self.checksums.room
        # Without checksums nothing would show that a longer message was cut off: then Gloo has to end the process.
        room = tags.capacity(nbytes) if self.checksums.enabled else nbytes
        memory = (buffer or partial(torch.empty, dtype=torch.uint8))(room)
        works = [
            _started(carrier.recv, [memory[:room][piece]], route.peer, tags.tag(route.channel, nbytes))
            for carrier, piece in pieces(self.group, route.channel, nbytes)
        ]
        return Expected(self.board, route, nbytes, True, self.group, works, self, memory, place)


class _Failed:
    """Work that could not start because the peer has ended; `wait` raises the error."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        raise self._error


def _started(start: Callable[..., dist.Work], *args: Any) -> dist.Work | _Failed:
    try:
        return start(*args)
    except RuntimeError as error:
        return _Failed(error)


def _wait(works: Sequence[dist.Work | _Failed], patience: timedelta, group: dist.ProcessGroup) -> None:
    begin, left = time.monotonic(), patience
    try:
        for work in works:
            work.wait(left)
            left = max(_SHORTEST, patience - timedelta(seconds=time.monotonic() - begin))  # together, not each
    except RuntimeError as error:
        # Gloo has closed all connections that are like the one of the piece that did not pass, but no others.
        if len(works) > 1 and "timed out" in str(error).lower():
            sever(group)
        raise


@dataclass(eq=False)
class Sent(Letter):
    """A message that is being sent. Gloo reads from `message` until `wait` has returned."""

    group: dist.ProcessGroup
    works: list[dist.Work | _Failed]
    message: Tensor

    def wait(self) -> None:
        """Wait until the peer has received it; PeerError: the peer ended, or did not in time."""
        with self.board.blaming(self.route.peer):
            self.leave(self.board.patience)

    def leave(self, patience: timedelta) -> None:
        """Wait with another time limit, and raise Gloo's own error."""
        _wait(self.works, patience, self.group)
        self.done()


@dataclass(eq=False)
class Expected(Letter):
    """A message whose receive is posted. `place`: as for `Mailbox.send`."""

    group: dist.ProcessGroup
    works: list[dist.Work | _Failed]
    mailbox: Mailbox
    memory: Tensor
    place: tuple[int, ...]

    def wait(self, nbytes: int | None = None) -> Tensor:
        """Wait for the message and return its payload: 1-D uint8 on the CPU, of `nbytes` if shorter than expected.

        Raises:
            DamagedError: the message did not arrive as it was sent.
            PeerError: the peer ended, or did not send in time, or sent another length.
        """
        checksums, timing = self.mailbox.checksums, self.mailbox.traffic.timing
        with self.board.blaming(self.route.peer), timing("wait_seconds", message=self.route.about):
            _wait(self.works, self.board.patience, self.group)
        self.done()
        end = self.nbytes if nbytes is None else nbytes + checksums.room
        with timing("checksum_seconds"):
            intact = checksums.intact(self.memory[:end], *self.place)
        if intact:
            return self.memory[: end - checksums.room]
        if (sent := checksums.end_of(self.memory, *self.place)) is None:
            raise damaged(self.route.about, self.route.peer)
        error = PeerError(wrong_length(self.route.about, sent, self.board.own_name, end), self.route.peer)
        self.board.give_up(error, partial(sever, self.mailbox.group))
        raise error


def sever(group: dist.ProcessGroup) -> None:
    """Close all of this rank's connections in a Gloo group, even a destroyed one; waits on them fail at once.

    The process continues, and the store of the group stays usable.
    """
    # A Gloo wait that times out closes the connections to all peers, so that no half of a message is left behind.
    # A wait on a connection that is closed already fails without that effect, so the next peer is tried.
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    first = tags.tag(tags.NEVER.first, 0)
    for carrier, device in product(connections_of(group), range(_MOST_DEVICES)):  # Gloo chooses a device by the tag
        for peer in others:
            try:
                nothing = torch.empty(1, dtype=torch.uint8)
                carrier.recv([nothing], peer, first + device).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    break
