"""Who died: from the neighbour that a rank sees fail to the rank that failed first.

When a rank ends, only its neighbours notice; they end in turn, and the next ones see *them* go. Each rank that gives up
therefore leaves a note in the store of the process group, "I gave up on rank s", and follows the notes of others from
its own suspect on. The rank at the end of that chain left none: it is the one that died or hangs. Or it left word of
why it could not go on itself, and the others say the same.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_CLOSED_GRACE = 0.5  # seconds for the note of a suspect that gave up on somebody itself to arrive
_POLL = 0.05
_MOST_CHARACTERS = 2000  # of a reason
_LINGER = 5.0  # seconds at most that the rank with the store stays for the others to read it
_NOTHING = "lowbit: nothing"


class PeerError(RuntimeError):
    """A peer ended, or did not answer in time.

    Attributes:
        rank: the rank, within the group, that failed first as far as can be told; -1 where it cannot be.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class AgreementError(RuntimeError):
    """The members contradict each other, or some of them never came. The same text on every rank."""

    on_all_ranks = True


def described(error: BaseException) -> str:
    """An error on one line, behind what it came of: PyTorch's schedules wrap the errors of a model."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if error.__cause__ is None else f"{described(error.__cause__)}; {text}"


class FailureBoard:
    """Notes about failed peers, in the store of a process group.

    Args:
        group: the ranks concerned.
        topic: unique among the boards of this group, and the same on every rank.
        names: what to call each rank of the group in errors.
        timeout: seconds from the start of a wait in vain to the error.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str, names: Sequence[str], timeout: float) -> None:
        self._store = group.get_group_store()
        self.topic = topic
        self._prefix = f"lowbit/failure/{topic}"
        self._names = list(names)
        self._rank = dist.get_rank(group)
        self._timeout = timeout
        self._blames = False  # somebody else: a note says whom
        # Unless a launcher does, the job's first rank hosts the store; it need not be in this group.
        ranks = dist.get_process_group_ranks(group)
        self._host = ranks.index(0) if 0 in ranks else None

    @property
    def patience(self) -> timedelta:
        """How long a wait may last; the rest of the timeout is for finding out who is to blame."""
        return timedelta(seconds=0.8 * self._timeout)

    @contextlib.contextmanager
    def blaming(self, peer: int) -> Iterator[None]:
        """Turn a failure of communication with a rank into an error that names whoever failed first.

        Raises:
            PeerError, AgreementError: as `blame` gives it.
        """
        try:
            yield
        except (PeerError, AgreementError):  # made of one already
            raise
        except RuntimeError as error:
            raise self.blame(peer, error) from error

    def give_up(self, error: BaseException, sever: Callable[[], None]) -> None:
        """Leave word of why this rank cannot go on, then end its connections, at which the others look for the reason.

        Args:
            error: the reason, which stays untold where this rank has blamed another; sever: ends the connections.
        """
        if self._blames:
            return sever()
        agreement = isinstance(error, AgreementError)
        text = str(error) if agreement else described(error)
        note = {"reason": text[:_MOST_CHARACTERS], "agreement": agreement}
        told = threading.Event()
        telling = threading.Thread(target=self._tell, args=(note, told), daemon=True)
        telling.start()
        told.wait(0.2 * self._timeout)
        sever()
        telling.join(0.2 * self._timeout)

    def blame(self, suspect: int, cause: Exception) -> RuntimeError:
        """Find out who failed, after communication with rank `suspect` failed with `cause`.

        Returns:
            `PeerError`; `AgreementError` where that is why the first rank gave up.
        """
        self._blames, silent = True, "timed out" in str(cause).lower()
        chain, finished, reason = [suspect], threading.Event(), dict[str, Any]()
        # In a thread, because the store may be on a machine that no longer answers.
        args = (chain, silent, finished, reason)
        tracing = threading.Thread(target=self._trace, args=args, daemon=True)
        tracing.start()
        tracing.join(0.2 * self._timeout if silent else _CLOSED_GRACE + 0.5 * self._timeout)
        culprit = chain[-1]
        if reason.get("agreement"):
            error = AgreementError(str(reason["reason"]))
            error.on_all_ranks = False  # those that wait for this one do not know it yet
            return error
        if reason:
            return PeerError(f"{self._names[culprit]} gave up: {reason['reason']}", culprit)
        how = f"did not answer within {self._timeout:g} s" if silent else "closed its connection"
        text = f"{self._names[suspect]} {how}"
        if culprit != suspect:
            text += f", because {self._names[culprit]} had failed before"
        if not finished.is_set() and suspect != self._host:
            host = "the job's rank 0" if self._host is None else self._names[self._host]
            text += f"; so did the store, which {host} hosts unless a launcher does"
        # Gloo wraps the reason in a source position and advice.
        reason = re.sub(r"^\[[^]]*\] |\. This is typically.*", "", str(cause))
        return PeerError(f"{text} (seen by {self._names[self._rank]}: {reason})", culprit)

    def _tell(self, note: dict[str, Any], told: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the store ended with its rank
            self._note(f"{self._rank}", note)
            told.set()
            if self._rank == self._host:
                self._linger(self._rank, min(_LINGER, 0.1 * self._timeout))

    def _trace(self, chain: list[int], silent: bool, finished: threading.Event, reason: dict[str, Any]) -> None:
        """Extend `chain` by following notes, for as long as new ones may come, and take the last one's reason."""
        with contextlib.suppress(RuntimeError):  # the store ended with its rank
            self._note(f"{self._rank}", {"suspect": chain[0], "silent": silent})
            start = time.monotonic()
            while True:
                while note := self._read(f"{chain[-1]}"):
                    if "reason" in note:
                        reason |= note
                        break
                    silent = silent or bool(note["silent"])
                    if note["suspect"] in (self._rank, *chain):
                        break  # they wait for each other
                    chain.append(note["suspect"])
                grace = 0.1 * self._timeout if silent else _CLOSED_GRACE
                if reason or time.monotonic() > start + grace:
                    break
                time.sleep(_POLL)
            self._note(f"seen/{self._rank}", {})
            finished.set()
            if self._rank == self._host:
                self._linger(chain[-1], min(_LINGER, (0.1 if silent else 0.5) * self._timeout))

    def _linger(self, culprit: int, seconds: float) -> None:
        others = [rank for rank in range(len(self._names)) if rank != culprit]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(self._read(f"seen/{r}") is None for r in others):
            time.sleep(_POLL)

    def _note(self, key: str, note: dict[str, Any]) -> None:
        self._store.set(f"{self._prefix}/{key}", json.dumps(note))

    def _read(self, key: str) -> dict[str, Any] | None:
        """A note, unless it is none that a rank writes."""
        written = peek(self._store, f"{self._prefix}/{key}")
        try:
            note = json.loads(written) if written else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(note, dict):
            return None
        suspects = "silent" in note and note.get("suspect") in range(len(self._names))
        known = suspects or isinstance(note.get("reason"), str)
        return note if known or not note else None


def peek(store: Store, key: str) -> bytes:
    """What a store holds under a key, or nothing; never waits for the key.

    One round trip, where `check` takes one and `get` two: a `compare_set` that changes nothing says what is there, and
    what it was told to expect if nothing is.
    """
    value = store.compare_set(key, _NOTHING, _NOTHING)
    return b"" if value == _NOTHING.encode() else value
