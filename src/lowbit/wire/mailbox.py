"""The one message between two ranks over Gloo: sized, sealed, timed, and blamed on the rank that fails.

A message is a payload with its checksum behind it (`lowbit.wire.checksum`). Both ends name its channel
(`lowbit.wire.tags`) and its length. Where they disagree about the length, both get an error that names both lengths:

- Lengths of different size classes have different tags, so the message and the receive never meet. The waits of both
  ends time out, and each end states on the failure board which lengths it waits for (`lowbit.wire.failure`).
- Lengths of one class fit into the receiver's buffer. The checksum is not where the receiver looks for it; the place
  where it fits tells the length that was sent. The receiver writes both lengths on the failure board and gives up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire import tags
from lowbit.wire.checksum import Checksums, damaged
from lowbit.wire.errors import PeerError
from lowbit.wire.failure import FailureBoard, Letter, Route, wrong_length
from lowbit.wire.traffic import Traffic

_MOST_DEVICES = 8  # network devices of a Gloo group, each with connections of its own


class Mailbox:
    """Sends and receives messages of one conversation within a group.

    Args:
        group: the ranks; messages are on the CPU, and Gloo carries them.
        checksums: of the conversation.
        board: finds out who failed; may be set later, but before the first message.
        traffic: where the seconds of checksums and waits are counted.

    Attributes:
        group, checksums, board: as given.
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
            message: uint8, one dimension; the last bytes are free for the checksum. Nobody may write to it until it has
                been sent.
            place: which message of the conversation it is; the receiver gives the same.
            expected: bytes of the message that the receiver has posted its receive for; None: those of this one.
        """
        with self.traffic.timing("checksum_seconds"):
            self.checksums.seal(message, *place)
        sent, nbytes = [], message.numel() if expected is None else expected
        for route in routes:
            work = _started(self.group.send, [message], route.peer, tags.tag(route.channel, nbytes))
            sent.append(Sent(self.board, route, nbytes, False, work, message))
        return sent

    def expect(
        self, route: Route, nbytes: int, place: tuple[int, ...] = (), buffer: Callable[[int], Tensor] | None = None
    ) -> Expected:
        """Post the receive of a message.

        Gloo asks before it sends a message whose receive is not posted yet, which takes a round trip.

        Args:
            nbytes: of its payload.
            place: as for `send`; may be set later, but before the wait.
            buffer: returns memory of at least so many bytes to receive in: uint8, one dimension, on the CPU.
        """
        nbytes += self.checksums.room
        memory = (buffer or partial(torch.empty, dtype=torch.uint8))(tags.capacity(nbytes))
        work = _started(self.group.recv, [memory], route.peer, tags.tag(route.channel, nbytes))
        return Expected(self.board, route, nbytes, True, work, self, memory, place)


class _Failed:
    """Work that could not start, because the peer has ended: whoever waits for it gets the error."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        raise self._error


def _started(start: Callable[..., dist.Work], *args: Any) -> dist.Work | _Failed:
    try:
        return start(*args)
    except RuntimeError as error:
        return _Failed(error)


@dataclass(eq=False)
class Sent(Letter):
    """A message on its way. `message`: Gloo reads from it until `wait` has returned."""

    work: dist.Work | _Failed
    message: Tensor

    def wait(self) -> None:
        """Return when the peer has received it.

        Raises:
            PeerError: the peer ended, or did not receive it in time.
        """
        with self.board.blaming(self.route.peer):
            self.leave(self.board.patience)

    def leave(self, patience: timedelta) -> None:
        """Like `wait`, with a limit of its own, and Gloo's own error."""
        self.work.wait(patience)
        self.done()


@dataclass(eq=False)
class Expected(Letter):
    """A message whose receive is posted. `place`: as for `Mailbox.send`."""

    work: dist.Work | _Failed
    mailbox: Mailbox
    memory: Tensor
    place: tuple[int, ...]

    def wait(self, nbytes: int | None = None) -> Tensor:
        """Return the payload when it has arrived: uint8, one dimension, on the CPU.

        Args:
            nbytes: of the payload, if it is shorter than the receive allows.

        Raises:
            DamagedError: it did not arrive as it was sent.
            PeerError: the peer ended, or did not send in time, or sent another length.
        """
        checksums, timing = self.mailbox.checksums, self.mailbox.traffic.timing
        with self.board.blaming(self.route.peer), timing("wait_seconds", message=self.route.about):
            self.work.wait(self.board.patience)
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
    """Close all of this rank's connections in a Gloo group, even a destroyed one; whoever waits there fails at once.

    This process goes on, and the store of the group is as usable as before.
    """
    # A wait on Gloo that times out closes the connections to all peers, since no half of a message may stay behind.
    # A connection that is closed already fails without that, so the next peer is tried.
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    first = tags.tag(tags.NEVER.first, 0)
    for device in range(_MOST_DEVICES):  # Gloo chooses among its devices by the tag
        for peer in others:
            try:
                nothing = torch.empty(1, dtype=torch.uint8)
                group.recv([nothing], peer, first + device).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    break
