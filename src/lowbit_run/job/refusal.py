"""Tell the ranks that wait for this one why it does not come, and hear it from others, before the ranks have met.

A line under one key of the store: other ranks write it into rank 0's store, and rank 0 keeps a store for it. It counts
if it is signed with the run's secret; otherwise it is only shown. There is no attempt yet that it could be signed for,
so whoever has recorded it may repeat it: that keeps a run from starting, as closing the port would.
"""

import contextlib
import json
import os
import sys
import time
from functools import partial
from typing import Any

from lowbit import escape
from lowbit.escape import one_line
from lowbit.wire.checksum import run_secret
from lowbit.wire.store import bounded, peek, wait_until
from lowbit_run.config import ConfigError
from lowbit_run.job.peers import Cause, launcher_keeps_store

log = escape.logger(__name__)

_KEY, _READ, _SIGNED = "refused", "refused/read", "before the ranks have met"
_PATIENCE = 20.0  # seconds in which the other ranks must come to read it: they may still load modules and text
_CALL_SECONDS = 2.0
_LONGEST, _MOST_BYTES = 1000, 1 << 14  # characters of a text, bytes that are read
_QUIET_SECONDS = 1.0


class RefusedError(ConfigError):
    """Another rank does not come: it has refused its settings; the same on all ranks that have come."""

    on_all_ranks = True
    told = False


class Listener:
    """Hears what another rank has refused; `hear` is called while this one waits for it."""

    def __init__(self, store: Any, rank: int, secret: bytes) -> None:
        self._store, self._rank, self._secret = store, rank, secret
        self._shown = b""

    def hear(self) -> None:
        """Raise RefusedError if a rank with the run's secret has refused; show what was written without the secret."""
        written = peek(self._store, _KEY)[:_MOST_BYTES]
        if not written or written == self._shown:
            return
        if cause := Cause.read(written, self._secret, [_SIGNED]):
            with contextlib.suppress(RuntimeError):  # the store is gone, too
                self._store.set(f"{_READ}/{self._rank}", "1")
            error = RefusedError(f"rank {cause.rank} does not come: {one_line(cause.text)}")
            error.told = self._rank > 0  # rank 0 has the store, and stays until the others have read it, too
            raise error
        self._shown = written
        with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
            text = one_line(str(json.loads(written)[1]), _LONGEST)
            log.warning("somebody without this run's secret wrote that a rank does not come: %s", text)


def tell(text: str) -> None:
    """Tell the other ranks of the environment why this one does not come, unless they have met; for seconds only."""
    rank, ranks = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if launcher_keeps_store() or ranks == "1":
        return  # the launcher ends the others, or there are none
    with contextlib.suppress(Exception, KeyboardInterrupt):  # whatever is wrong here is what is told
        from lowbit_run.job.process_group import have_met

        if not have_met():  # RANK and WORLD_SIZE may be what is wrong
            say(text, int(rank) if rank.isdigit() else 1, int(ranks) if ranks.isdigit() else 2)


def say(text: str, rank: int, ranks: int) -> None:
    """Write a text into the store as this rank, and wait for those who read it: rank 0 in its own store."""
    from lowbit_run.job.process_group import reach

    line, begin, quiet = Cause(rank, one_line(text, _LONGEST)).signed(run_secret(), _SIGNED), time.monotonic(), True

    def told() -> bool:
        nonlocal quiet
        if quiet and time.monotonic() - begin > _QUIET_SECONDS:
            sys.stderr.write(f"rank {rank}: staying up to {_PATIENCE:g} s to tell the other ranks; Ctrl-C ends it\n")
            quiet = False
        if rank == 0:
            return store.check([f"{_READ}/{other}" for other in range(1, ranks)])
        with contextlib.suppress(RuntimeError, TimeoutError):  # rank 0 may come later
            _write(reach(rank, timeout=_CALL_SECONDS, patience=_CALL_SECONDS), line, rank)
            return True
        return False

    if rank == 0:
        store = reach(0, timeout=_CALL_SECONDS, patience=_CALL_SECONDS)
        _write(store, line, rank)
    wait_until(told, _PATIENCE, pause=0.2)


def _write(store: Any, line: str, rank: int) -> None:
    if not Cause.read(peek(store, _KEY), run_secret(), [_SIGNED]):  # the first one counts
        bounded(partial(store.set, _KEY, line), _CALL_SECONDS)
    bounded(partial(store.set, f"{_READ}/{rank}", "1"), _CALL_SECONDS)
    bounded(partial(peek, store, _KEY), _CALL_SECONDS)  # an answer: the store has the line
