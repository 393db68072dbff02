"""All tags of messages over Gloo, in one table, so that different kinds and size classes of messages never collide.

tag = 32 * channel + size class            0 <= tag < 2^31; each kind of message has its own channels
"""

from bisect import bisect_left
from dataclasses import dataclass

# Gloo hands a message to the receive that was posted for its sender and tag, and a longer one ends the process. So the
# size class of a message, from which its buffer follows, is part of its tag. If the ends disagree about a length,
# message and receive never meet, or the buffer has room for both lengths, and the checksum does not match.
_LARGE = [half for e in range(16, 24) for half in (2 << e - 1, 3 << e - 1)]  # at most half larger than needed
CAPACITIES = (1 << 8, 1 << 12, *_LARGE, *(1 << e for e in range(24, 37)))
"""Size of the buffer that is posted for a message, by size class."""
_CLASSES = 32
CHANNELS = (1 << 31) // _CLASSES


@dataclass(frozen=True)
class Kind:
    """A kind of message (`name`: plural) for up to `members` users in a process group, with `width` channels each."""

    name: str
    first: int
    members: int
    width: int

    def channels(self, member: int) -> range:
        """Channels of one member, counted from 0; RuntimeError if all are taken."""
        if not 0 <= member < self.members:
            raise RuntimeError(
                f"this process group has had {self.members} {self.name}, and no more are allowed: "
                "make others in another group (torch.distributed.new_group)"
            )
        return range(self.first + member * self.width, self.first + (member + 1) * self.width)

    @property
    def end(self) -> int:
        return self.first + self.members * self.width


# A program may use tags below 2^27 for its own messages.
PROGRAM = Kind("tags", 0, 1, 1 << 22)
# Never sent: `sever` posts receives for them, whose timeouts close connections. 32 tags, for as many network devices.
NEVER = Kind("groups", PROGRAM.end, 1, 1)
# Conversations of two ranks (`Messages`). Consecutive messages have different channels, so that a message which is not
# received is not mistaken for the next.
CONVERSATIONS = Kind("conversations", NEVER.end, 1 << 16, 32)
ANNOUNCEMENTS = Kind("pipelines", CONVERSATIONS.end, 32, 1)
# A receive may stay posted for a message that never comes, so pipelines of a group do not share channels, nor do two
# configurations of a pipeline.
PIPELINES = Kind("pipelines", ANNOUNCEMENTS.end, 32, 3 << 19)
# The member is a digest of call and layer.
COLLECTIVES = Kind("calls", PIPELINES.end, 1 << 9, 1 << 14)
# Member: the communicator; channel: direction and number.
ENGINES = Kind("communicators of other engines", COLLECTIVES.end, 64, 64)
# Messages of one size between neighbours, in a trial of a layout.
LAYOUTS = Kind("trials", ENGINES.end, 1, 1)

KINDS = (PROGRAM, NEVER, CONVERSATIONS, ANNOUNCEMENTS, PIPELINES, COLLECTIVES, ENGINES, LAYOUTS)


def capacity(nbytes: int) -> int:
    """Bytes of the buffer for a message of `nbytes`; ValueError above 2^36."""
    return CAPACITIES[_size_class(nbytes)]


def tag(channel: int, nbytes: int) -> int:
    """Tag of a message of `nbytes`, as its receive is posted, on a channel."""
    return channel * _CLASSES + _size_class(nbytes)


def _size_class(nbytes: int) -> int:
    if nbytes > CAPACITIES[-1]:
        raise ValueError(f"a message has {nbytes} bytes; allowed: at most {CAPACITIES[-1]}")
    return bisect_left(CAPACITIES, nbytes)
