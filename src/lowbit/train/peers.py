"""Who is gone: when communication fails, find out which rank was the cause, and let every rank end with its name."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lowbit.collectives import PeerError
from lowbit.collectives.agreement import next_round

_BEAT_SECONDS = 0.5
_STALE_SECONDS = 4.0  # at most; less where the run's own time limit is short
_LAST_WORDS_SECONDS = 5.0
_STORE_GONE = "rank 0 stopped answering: it, its launcher, or the network to its machine is gone"


class Peers:
    """Signs of life of all ranks, in the store that they met in.

    Each rank writes a beat twice a second from a thread of its own. Nobody looks at the beats while all goes well, so a
    busy machine can not stop a run. When communication fails, `explain` looks whose beat has stopped. The rank that
    finds the cause first writes it down as the alarm. Who is still blocked a few seconds after that, in a wait for
    a peer that is not coming, is ended: its process exits with the alarm on standard error.

    Args:
        group: the ranks concerned; their store carries the beats.
        timeout: seconds in which a failure is to be noticed and explained.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout: float) -> None:
        self._patience = min(_STALE_SECONDS, max(3 * _BEAT_SECONDS, 0.15 * timeout))
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._prefix = f"lowbit/peers/{next_round(group, 'peers')}"
        self._group = group
        self._store = self._connect()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lowbit-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the beats; the run is over."""
        self._closed.set()
        self._thread.join()

    def explain(self, error: BaseException) -> PeerError | None:
        """Why a call failed: the rank that caused it, or None if that is this one.

        Takes a few seconds, in which the beat of a peer that lives is heard. Afterwards all ranks know the cause.
        """
        try:
            cause = self._raise_alarm(self._cause_of(error))
        except (dist.DistError, RuntimeError):
            cause = _Cause(0, _STORE_GONE)
        return None if cause.rank == self.rank else PeerError(cause.text, cause.rank)

    def linger(self) -> None:
        """Give the others time to read the alarm, where this process may be the one that keeps the store."""
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(4 * _BEAT_SECONDS)

    def _connect(self) -> Store:
        """A connection of its own: a wait on one must not hold up the other."""
        store: Any = self._group.get_group_store()
        return PrefixStore(self._prefix, store.clone())

    def _cause_of(self, error: BaseException) -> _Cause:
        if isinstance(error, PeerError):  # found out already, by whoever talked to that peer
            return _Cause(error.rank, str(error))
        return self._silent_peer() or _Cause(
            self.rank, f"rank {self.rank} failed: {first_line(error)}"
        )

    def _silent_peer(self) -> _Cause | None:
        """The alarm, or the ranks whose beat has stopped; None if all others are alive."""
        before, start = self._beats(), time.monotonic()
        while time.monotonic() - start < self._patience:
            if alarm := _read_alarm(self._store):
                return alarm
            time.sleep(0.2)
        after = self._beats()
        silent = [r for r in range(self.ranks) if r != self.rank and before[r] == after[r]]
        if not silent:
            return None
        names = " and ".join(f"rank {r}" for r in silent)
        return _Cause(
            silent[0], f"{names} stopped answering: killed, or its machine or network is gone"
        )

    def _beats(self) -> list[bytes]:
        keys = [f"beat/{rank}" for rank in range(self.ranks)]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _raise_alarm(self, cause: _Cause) -> _Cause:
        """Write the cause down, unless another rank was first; returns what stands there."""
        written = self._store.compare_set("alarm", "", json.dumps(cause))
        return _Cause(*json.loads(written))

    def _beat(self) -> None:
        store, count = self._connect(), 0
        while not self._closed.wait(_BEAT_SECONDS):
            count += 1
            try:
                store.set(f"beat/{self.rank}", str(count))
                alarm = _read_alarm(store)
            except (dist.DistError, RuntimeError):
                return  # whoever needs the store finds out, too
            if alarm:
                return self._end_unless_closed(alarm)

    def _end_unless_closed(self, alarm: _Cause) -> None:
        if not self._closed.wait(_LAST_WORDS_SECONDS):
            sys.stderr.write(f"rank {self.rank}: error: {alarm.text}\n")
            sys.stderr.flush()
            os._exit(1)


class _Cause(NamedTuple):
    rank: int
    text: str


def _read_alarm(store: Store) -> _Cause | None:
    return _Cause(*json.loads(store.get("alarm"))) if store.check(["alarm"]) else None


def first_line(error: BaseException) -> str:
    """An error in one line: its type and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
