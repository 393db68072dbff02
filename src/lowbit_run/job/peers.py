"""Failure detection: heartbeats of all ranks, an alarm with the first cause, and a watchdog that ends hung processes.

The beat thread alone calls the store. The guard thread calls nothing that can block: it adds up silence in turns of its
own (a process that was stopped blames nobody), and after the time limit or an unheeded alarm it ends the process.
"""

import contextlib
import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from lowbit.escape import MOST_CHARACTERS, lines, one_line
from lowbit.wire.checksum import is_signed, signature, this_attempt
from lowbit.wire.errors import AgreementError, PeerError, first_line
from lowbit.wire.store import Board
from lowbit_run.job.exit_codes import ALONE, FAILED
from lowbit_run.job.output import end

_BEAT_SECONDS = 0.5
_TURN_SECONDS = 0.2
_LONGEST_TURN = 1.0  # seconds of a turn that count: if it took longer, this process was stopped meanwhile
_SHARE = 0.9  # share of the time limit after which silence ends the run, so that it has ended within the limit
_CLOSE_SECONDS = 0.5  # to wait for each thread after a failure
_GRACE_SECONDS = 5.0  # most seconds from an alarm to the end of a process that is still blocked


def launcher_keeps_store() -> bool:
    """Whether torchrun or our launcher hosts the store, so that it outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Cause(NamedTuple):
    """Why a run ends: the rank that failed first (-1: none in particular), and a sentence that describes the failure.

    `alone`: the rank waited in vain for others, as another attempt would.
    """

    rank: int
    text: str
    alone: bool = False

    def signed(self, secret: bytes, attempt: str) -> str:
        return json.dumps([*self, signature(secret, attempt, *self)])

    @classmethod
    def read(cls, written: object, secret: bytes, attempts: Iterable[str]) -> "Cause | None":
        """Parse a signed text; None unless it was signed with the secret in one of these attempts."""
        with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
            rank, text, alone, signed = json.loads(written)  # pyright: ignore[reportArgumentType]
            cause = cls(int(rank), str(text), bool(alone))
            if any(is_signed(signed, secret, attempt, *cause) for attempt in attempts):
                return cause._replace(text=lines(cause.text[:MOST_CHARACTERS]))
        return None


class Alarm:
    """A board with the causes of a failure and the ranks that have read them.

    A cause that is not signed for this attempt is ignored: it may be replayed from an earlier one. `store`: its part
    for this attempt (`store.of_attempt`). `attempts`: accepted names of the attempt; the last one is used to sign.
    """

    def __init__(self, store: Store, secret: bytes, attempts: Sequence[str]) -> None:
        self.board, self._secret, self._attempts = Board(store, "alarm"), secret, attempts

    def sound(self, cause: Cause) -> Cause | None:
        """Write a cause, and return the first one on the board, with which all ranks end."""
        self.board.append(cause=cause.signed(self._secret, self._attempts[-1]))
        return self.read()[0]  # waits for an answer: then the store has the line, and this process may end

    def read(self) -> tuple[Cause | None, set[int]]:
        """Return the first cause, if any, and the ranks that have read it; one round trip."""
        entries, attempts = self.board.entries(), tuple(self._attempts)
        causes = (Cause.read(entry["cause"], self._secret, attempts) for entry in entries if "cause" in entry)
        readers = {entry["read"] for entry in entries if isinstance(entry.get("read"), int)}
        return next((cause for cause in causes if cause), None), readers


class AbsentError(PeerError):
    """Another rank has waited for ranks that did not come in time."""


class Peers:
    """This rank's beat and guard threads; every rank has one such object, on the same store.

    `store`: this attempt's part, cloned for a separate connection. `timeout`: seconds of silence of a peer or the store
    within which the run ends.
    """

    def __init__(self, store: Store, *, rank: int, ranks: int, timeout: float, secret: bytes = b"") -> None:
        self.rank, self.ranks = rank, ranks
        self._limit = _SHARE * timeout
        self._patience = min(4.0, max(3 * _BEAT_SECONDS, 0.15 * timeout))
        self._grace = min(_GRACE_SECONDS, 1.0 + 0.1 * timeout)
        self._secret, self._attempts = secret, [this_attempt()]
        self._store: Any = store  # PyTorch's stubs lack `clone`
        self._beats: dict[int, bytes] = {}
        self._silence: dict[int, float] = {}  # seconds without a heartbeat, for each peer that has sent one
        self._store_silence = 0.0
        self._store_lost = False
        self._proposed: Cause | None = None
        self._cause: Cause | None = None
        self._known = threading.Event()  # set once the cause is known
        self._read_by_all = threading.Event()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"lowbit-{name}", daemon=True)
            for name, work in (("guard", self._guard), ("beat", self._beat))
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, attempt: str) -> None:
        """Sign alarms with the name agreed on, before other ranks know it; earlier alarms count until `settle`."""
        self._attempts.append(attempt)

    def settle(self) -> None:
        del self._attempts[:-1]

    def close(self, *, failed: bool = False) -> None:
        self._closed.set()
        # A thread inside PyTorch aborts the interpreter when it ends; after a failure the store may never answer.
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS if failed else self._limit)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn an error in the block into the one with which all ranks end; stop watching at its end."""
        failed = True
        try:
            yield
            failed = False
        except AgreementError:
            raise  # the same on all ranks
        except Exception as error:
            if getattr(error, "on_all_ranks", False):
                raise
            cause = self.explain(error)
            if self.rank == 0 and not launcher_keeps_store():  # give the others time to read the alarm
                self._read_by_all.wait(self._grace)
            if cause is None:
                raise
            raise cause from error
        finally:
            self.close(failed=failed)

    def explain(self, error: BaseException) -> PeerError | None:
        """Return the error that names the cause of a failed call; None if `error` names it itself.

        Within a few seconds, enough to receive a heartbeat. Then all ranks that can reach the store know the cause.
        """
        names_ranks = isinstance(error, ConnectionError)
        text = lines(str(error) if names_ranks else f"rank {self.rank} failed: {first_line(error)}")[:MOST_CHARACTERS]
        cause = mine = Cause(self.rank, text, getattr(error, "alone", False))
        if isinstance(error, PeerError):  # the cause is known already
            cause = Cause(error.rank, str(error))
        elif not mine.alone:
            cause = self._silent_peer() or mine
        self._proposed = cause
        if self._known.wait(self._patience) and self._cause is not None:
            cause = self._cause
        elif cause is mine and isinstance(error, RuntimeError):
            cause = self._store_gone()
        if cause.text in (text, str(error)):
            return None
        # Do not compare ranks: a `PeerError` has a rank within its group, and others may wrongly blame this rank.
        kind = AbsentError if cause.alone else PeerError
        return kind(cause.text, cause.rank)

    def _silent_peer(self) -> Cause | None:
        """Return the known cause, or one that names ranks without heartbeat; None if all others are alive."""
        deadline = time.monotonic() + self._patience + _BEAT_SECONDS
        while time.monotonic() < deadline and not self._store_lost:
            if self._known.wait(_TURN_SECONDS):
                return self._cause
            if cause := self._silent_for(self._patience):
                return cause
        return None

    def _silent_for(self, seconds: float) -> Cause | None:
        # A copy, because the beat thread adds peers meanwhile.
        silent = sorted(rank for rank, quiet in list(self._silence.items()) if quiet > seconds)
        if not silent or self._store_silence > seconds / 2:  # no peer could be heard
            return None
        names = " and ".join(f"rank {rank}" for rank in silent)
        return Cause(silent[0], f"{names} stopped answering: killed or stopped, or its machine or network is gone")

    def _store_gone(self) -> Cause:
        if self.rank == 0:
            return Cause(-1, "the store where the ranks meet stopped answering: its launcher is gone")
        return Cause(0, "rank 0 stopped answering: it, its launcher, or the network to its machine is gone")

    def _beat(self) -> None:
        try:
            store = self._store.clone()
            alarm = Alarm(store, self._secret, self._attempts)
            for count in itertools.count():
                self._exchange(store, alarm, count)
                self._store_silence = 0.0
                if self._closed.wait(_BEAT_SECONDS):
                    return
        except RuntimeError:  # the connection is closed
            self._store_lost = True

    def _exchange(self, store: Any, alarm: Alarm, count: int) -> None:
        store.set(f"beat/{self.rank}", str(count))
        if self._cause is None and self._proposed is not None:
            alarm.sound(self._proposed)
        cause, readers = alarm.read()
        if self._cause is None and cause is not None:
            self._cause = cause
            alarm.board.append(read=self.rank)
            self._known.set()
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        heard = [r for r in others if r in self._beats or store.check([f"beat/{r}"])]
        beats = store.multi_get([f"beat/{r}" for r in heard]) if heard else []
        for rank, beat in zip(heard, beats, strict=True):
            if self._beats.get(rank) != beat:
                self._beats[rank], self._silence[rank] = beat, 0.0
        waiting = {rank for rank in others if self._silence.get(rank, math.inf) < self._patience}
        if self._cause is not None and waiting <= readers:
            self._read_by_all.set()

    def _guard(self) -> None:
        last, known = time.monotonic(), 0.0
        while not self._closed.wait(_TURN_SECONDS):
            now = time.monotonic()
            turn, last = min(now - last, _LONGEST_TURN), now
            self._store_silence += turn
            for rank in list(self._silence):
                self._silence[rank] += turn
            known += turn if self._known.is_set() or self._store_lost else 0.0
            if known > self._grace or self._store_silence > self._limit:
                break
            self._proposed = self._proposed or self._silent_for(self._limit)
        if not self._closed.is_set():
            cause = self._cause or self._store_gone()
            sys.stderr.write(f"rank {self.rank}: error: {one_line(cause.text)}\n")
            end(ALONE if cause.alone else FAILED)
