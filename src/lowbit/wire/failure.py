"""Find the rank that failed first, from the neighbour that a rank sees fail.

Each rank that gives up writes "I gave up on rank s" on a board in the group's store, and follows the others' notes: the
last of the chain died or hangs, or wrote why it gave up. Notes also state the lengths of messages in flight.
"""

import contextlib
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lowbit.wire.checksum import is_signed, run_secret, signature, this_attempt
from lowbit.wire.errors import AgreementError, PeerError, described
from lowbit.wire.pytorch import is_known, job_ranks
from lowbit.wire.store import Board, bounded, wait_until

_CLOSED_GRACE = 0.5  # seconds to wait for the note of a suspect that has itself given up on another rank
_POLL = 0.05
_MOST_CHARACTERS = 2000  # of a reason in a note
_MOST_MESSAGES = 256  # message lengths in a note
_LINGER = 5.0  # most seconds that the rank with the store stays so that the others can read it


class FailureBoard:
    """Notes about failed peers, in the store of a process group.

    `topic`: unique among the boards of this group, and the same on every rank. `names`: of its ranks, for errors.
    `timeout`: seconds from the start of a failed wait to the error, as given to `LowBitStage`, a collective, or `lowbit
    train` (`run.timeout_seconds`), which also ends ranks that fall silent (`lowbit_run/job/peers.py`).
    """

    def __init__(self, group: dist.ProcessGroup, topic: str, names: Sequence[str], timeout: float) -> None:
        key = f"lowbit/failure/{topic}"
        self._board = Board(group.get_group_store(), key)
        # Groups not made by torch.distributed (torchft's) join processes of several runs, each with its own attempts.
        self._place = (this_attempt() if is_known(group) else "", key)
        self.topic = topic
        self._rank, self._names = group.rank(), list(names)
        self.own_name = self._names[self._rank]
        self._timeout = timeout
        # Time limit of a wait; the rest of the timeout is for finding the rank to blame.
        self.patience = timedelta(seconds=0.8 * timeout)
        self._blames = self._gave_up = False  # whether this rank has written on whom, or why, it gave up
        self.in_flight: weakref.WeakKeyDictionary[MessageInFlight, None] = (
            weakref.WeakKeyDictionary()
        )  # under way; oldest first
        # If no launcher hosts the store, the job's first rank does; that rank need not be in this group.
        ranks = job_ranks(group)
        self._host = ranks.index(0) if 0 in ranks else None

    @contextlib.contextmanager
    def blaming(self, peer: int) -> Iterator[None]:
        """Turn a communication failure with a rank into the error that `blame` returns."""
        try:
            yield
        except (PeerError, AgreementError):
            raise
        except RuntimeError as error:
            raise self.blame(peer, error) from error

    def given_up(self) -> int | None:
        """A rank other than this one that gave up, or None; RuntimeError, TimeoutError: the store does not answer."""
        notes, _ = bounded(self._read, 0.2 * self._timeout)
        return next((rank for rank in notes if rank != self._rank), None)

    def give_up(self, error: BaseException, sever: Callable[[], None]) -> None:
        """Write why this rank cannot continue, then close its connections, so that the others look for the reason."""
        if self._blames or self._gave_up:
            # A second note would replace the first, which others may be following already.
            return sever()
        self._gave_up = True
        agreement = isinstance(error, AgreementError)
        text = (str(error) if agreement else described(error))[:_MOST_CHARACTERS]
        note = {"rank": self._rank, "reason": text, "agreement": agreement}
        # The note before the cut: peers look for a reason as soon as their connection closes.
        written = _within(0.2 * self._timeout, lambda: self._write(**note))
        sever()
        if written and self._rank == self._host:
            _within(0.2 * self._timeout, lambda: self._linger(self._rank, min(_LINGER, 0.1 * self._timeout)))

    def blame(self, suspect: int, cause: Exception | None) -> RuntimeError:
        """Return an error that names the first rank that failed, after communication with `suspect` failed."""
        self._blames, silent = True, "timed out" in str(cause or "").lower()
        trace = _BlameChain([suspect])
        # A wait that timed out has used up `patience`; a closed connection is noticed early, which leaves more time.
        limit = 0.2 * self._timeout if silent else _CLOSED_GRACE + 0.5 * self._timeout
        _within(limit, lambda: self._follow(trace, silent))
        culprit = trace.chain[-1]
        if trace.conflict:
            return PeerError(trace.conflict, suspect)
        if trace.note.get("agreement"):
            error = AgreementError(trace.note["reason"][:_MOST_CHARACTERS])
            error.on_all_ranks = False  # ranks that wait for this one have not raised it yet
            return error
        if trace.note:
            return PeerError(f"{self._names[culprit]} gave up: {trace.note['reason'][:_MOST_CHARACTERS]}", culprit)
        failed = f"did not answer within {self._timeout:g} s" if silent else "closed its connection"
        text = f"{self._names[suspect]} {failed if cause else 'gave up'}"
        if culprit != suspect:
            text += f", because {self._names[culprit]} had failed before"
        # Reading the board took longer than the limit, so the store did not answer either.
        if not trace.finished and suspect != self._host:
            host = "the job's rank 0" if self._host is None else self._names[self._host]
            text += f"; so did the store, which {host} hosts unless a launcher does"
        # Remove the source position and the advice that Gloo puts around the reason.
        reason = re.sub(r"^\[[^]]*\] |\. This is typically.*", "", str(cause or "its note"))
        return PeerError(f"{text} (seen by {self.own_name}: {reason})", culprit)

    def _follow(self, trace: "_BlameChain", silent: bool) -> None:
        chain = trace.chain
        # Not by iterating over the dictionary, which other threads change meanwhile.
        under_way = [message for ref in self.in_flight.keyrefs() if (message := ref()) is not None]
        messages = [message for message in under_way if message.route.peer == chain[0]][:_MOST_MESSAGES]
        lengths = [[message.route.channel, message.incoming, message.nbytes] for message in messages]
        self._write(rank=self._rank, suspect=chain[0], silent=silent, lengths=lengths)
        start = time.monotonic()
        while True:
            notes, _ = self._read()
            trace.conflict = self._conflict(messages, notes.get(chain[0], {}))
            while note := notes.get(chain[-1]):
                if "reason" in note:
                    trace.note = note
                    break
                silent = silent or bool(note["silent"])
                if note["suspect"] in (self._rank, *chain):
                    break  # a cycle: these ranks wait for each other
                chain.append(note["suspect"])
            # Time limits of ranks do not end at the same moment; a closed connection is seen at once.
            grace = 0.1 * self._timeout if silent else _CLOSED_GRACE
            if trace.conflict or trace.note or time.monotonic() > start + grace:
                break
            time.sleep(_POLL)
        # Lets the rank that hosts the store end: this one has read what it needs.
        self._write(seen=self._rank)
        trace.finished = True
        if self._rank == self._host:
            culprit = self._rank if trace.conflict else chain[-1]  # after a conflict both ends still read the notes
            self._linger(culprit, min(_LINGER, (0.1 if silent else 0.5) * self._timeout))

    def _conflict(self, messages: "Sequence[MessageInFlight]", note: dict[str, Any]) -> str:
        """Describe the first message whose other end states another length in its note; empty if there is none."""
        stated: dict[tuple[int, bool], int] = {}
        for line in note.get("lengths", ()) if note.get("suspect") == self._rank else ():
            match line:
                case [int(channel), bool(incoming), int(nbytes)]:
                    stated.setdefault((channel, incoming), nbytes)  # keeps the oldest
        for message in messages:
            # `pop`: only the oldest message of a channel is compared; without a statement lengths count as equal.
            theirs = stated.pop((message.route.channel, not message.incoming), message.nbytes)
            if theirs != message.nbytes:
                sent, expected = (theirs, message.nbytes) if message.incoming else (message.nbytes, theirs)
                receiver = self._rank if message.incoming else message.route.peer
                return wrong_length(message.route.about, sent, self._names[receiver], expected)
        return ""

    def _linger(self, culprit: int, seconds: float) -> None:
        """If this process keeps the store, wait until all others have read the notes."""
        others = set(range(len(self._names))) - {culprit}
        wait_until(lambda: others <= self._read()[1], seconds)

    def _write(self, **note: Any) -> None:
        self._board.append(**note, signature=signature(run_secret(), *self._place, note))

    def _read(self) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Return each rank's last note and the ranks that are done reading; unsigned lines are ignored."""
        notes: dict[int, dict[str, Any]] = {}
        done: set[int] = set()
        for line in self._board.entries():
            if not is_signed(line.pop("signature", None), run_secret(), *self._place, line):
                continue
            rank: Any = line.get("rank", line.get("seen"))
            if not self._is_rank(rank):
                continue
            if "seen" in line:
                done.add(rank)
            elif not isinstance(line.get("reason", ""), str) or not isinstance(line.get("lengths", []), list):
                continue
            elif "reason" in line or ("silent" in line and self._is_rank(line.get("suspect"))):
                notes[rank] = line
        return notes, done

    def _is_rank(self, value: object) -> bool:
        # Not `isinstance`, which accepts True.
        return type(value) is int and 0 <= value < len(self._names)


@dataclass(frozen=True)
class Route:
    """Peer (rank within the group) and channel (`lowbit.wire.tags`) of a message, and its name in errors."""

    peer: int
    channel: int
    about: str = field(default="a message", compare=False)


# eq=False: the board's dictionary holds messages by identity; two may have equal fields.
@dataclass(eq=False)
class MessageInFlight:
    """A message under way, listed by the board: if it never arrives, each of its ends states its length there.

    `nbytes`: length with the checksum, as the receiver expects it. `incoming`: whether this rank receives it.
    """

    board: FailureBoard
    route: Route
    nbytes: int
    incoming: bool

    def __post_init__(self) -> None:
        self.board.in_flight[self] = None

    def done(self) -> None:
        self.board.in_flight.pop(self, None)


def wrong_length(about: str, sent: int, receiver: str, expected: int) -> str:
    """Format the error for a message whose length is not the one that its receiver expects."""
    return f"{about} has {sent} bytes with its checksum; {receiver} expects {expected}"


@dataclass
class _BlameChain:
    """A chain of ranks that gave up on each other, the last one's note, and a message with two stated lengths."""

    chain: list[int]
    conflict: str = ""
    note: dict[str, Any] = field(default_factory=dict)
    finished: bool = False


def _within(seconds: float, call: Callable[[], None]) -> bool:
    """Whether a call of the store succeeds in time: it may be gone, or on a machine that no longer answers."""
    with contextlib.suppress(TimeoutError, RuntimeError):
        bounded(call, seconds)
        return True
    return False
