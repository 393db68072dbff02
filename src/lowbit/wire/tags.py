"""All tags of messages over Gloo, in one table: neither two kinds of message can meet, nor two size classes.

Gloo hands a message to the receive that was posted for its sender and tag. A message longer than that receive ends the
process, in Gloo's own thread. So the tag of a message states more than its place:

    tag = 32 * channel + size class            0 <= tag < 2^31

A channel is the place of a message: each kind below has a range of channels of its own. The size class says how large
the receive's buffer is (`capacity`). Both ends compute it from the length that they believe in. If they disagree about
a length, there are two cases. Either the classes differ: then the message and the receive never meet, and both ends
time out and state their lengths to each other (`FailureBoard`). Or the buffer has room for either length, and the
checksum does not fit (`Mailbox`). This costs no byte and no round trip: only memory behind a message that nobody
touches.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

_LARGE = [half for e in range(16, 24) for half in (2 << e - 1, 3 << e - 1)]  # up to half more than a message needs
CAPACITIES = (1 << 8, 1 << 12, *_LARGE, *(1 << e for e in range(24, 37)))
"""Bytes of the buffer that is posted for a message, by size class."""
_CLASSES = 32
CHANNELS = (1 << 31) // _CLASSES


@dataclass(frozen=True)
class Kind:
    """A kind of message, and the channels that it has.

    Attributes:
        name: in errors, plural.
        first: of its channels.
        members: independent users of this kind within a process group. width: channels of each.
    """

    name: str
    first: int
    members: int
    width: int

    def channels(self, member: int) -> range:
        """Channels of one member, counted from 0.

        Raises:
            RuntimeError: there are no more.
        """
        if not 0 <= member < self.members:
            raise RuntimeError(
                f"this process group has had {self.members} {self.name}, and no more are allowed: "
                "make others in another group (torch.distributed.new_group)"
            )
        return range(self.first + member * self.width, self.first + (member + 1) * self.width)

    @property
    def end(self) -> int:
        """The first channel after this kind's."""
        return self.first + self.members * self.width


# A program may use tags below 2^27 for messages of its own.
PROGRAM = Kind("tags", 0, 1, 1 << 22)
# Nobody ever sends these: a receive of them in vain closes connections. 32 tags, for at most as many network devices.
NEVER = Kind("groups", PROGRAM.end, 1, 1)
# Conversations of two ranks (`Messages`). Consecutive messages have different channels, so that one which nobody takes
# is not mistaken for the next.
CONVERSATIONS = Kind("conversations", NEVER.end, 1 << 16, 32)
ANNOUNCEMENTS = Kind("pipelines", CONVERSATIONS.end, 32, 1)
# A receive may stay posted in vain for long, so no two pipelines of a group share channels, nor two configurations of a
# pipeline.
PIPELINES = Kind("pipelines", ANNOUNCEMENTS.end, 32, 3 << 19)
# By a digest of call and layer, then by lane.
COLLECTIVES = Kind("calls", PIPELINES.end, 1 << 9, 1 << 14)
# By direction, then by number.
ENGINES = Kind("communicators of other engines", COLLECTIVES.end, 64, 64)
# Between neighbours, in a trial: messages of one size.
LAYOUTS = Kind("trials", ENGINES.end, 1, 1)

KINDS = (PROGRAM, NEVER, CONVERSATIONS, ANNOUNCEMENTS, PIPELINES, COLLECTIVES, ENGINES, LAYOUTS)


def capacity(nbytes: int) -> int:
    """Bytes of the buffer to receive a message of `nbytes` in."""
    return CAPACITIES[_size_class(nbytes)]


def tag(channel: int, nbytes: int) -> int:
    """Tag of a message on a channel whose receive is posted for `nbytes`."""
    return channel * _CLASSES + _size_class(nbytes)


def _size_class(nbytes: int) -> int:
    if nbytes > CAPACITIES[-1]:
        raise ValueError(f"a message has {nbytes} bytes; allowed: at most {CAPACITIES[-1]}")
    return bisect_left(CAPACITIES, nbytes)
