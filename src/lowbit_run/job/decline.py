"""Tell the ranks that wait for this one why it does not come, before the ranks have met (`refusal`)."""

import contextlib
import os
import sys
import time
from functools import partial
from typing import Any

from lowbit.escape import one_line
from lowbit.wire.checksum import run_secret
from lowbit.wire.store import bounded, peek, wait_until
from lowbit_run.job.peers import Cause, launcher_keeps_store
from lowbit_run.job.process_group import have_met, reach
from lowbit_run.job.refusal import KEY, LONGEST, READ, SIGNED

_PATIENCE = 60.0  # seconds in which the other ranks must come to read it: they may still load modules and text
_CALL_SECONDS = 2.0
_QUIET_SECONDS = 1.0


def tell(text: str) -> None:
    """Tell the other ranks of the environment why this one does not come, unless they have met; for seconds only."""
    rank, ranks = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if launcher_keeps_store() or ranks == "1":
        return  # the launcher ends the others, or there are none
    with contextlib.suppress(Exception, KeyboardInterrupt):  # whatever is wrong here is what is told
        if not have_met():  # RANK and WORLD_SIZE may be what is wrong
            count = int(ranks) if ranks.isdigit() else 2
            say(text, int(rank) if rank.isdigit() and int(rank) < count else 1, count)


def say(text: str, rank: int, ranks: int) -> None:
    """Write a text into the store as this rank, and wait for those who read it: rank 0 in its own store."""
    line, begin, quiet = Cause(rank, one_line(text, LONGEST)).signed(run_secret(), SIGNED), time.monotonic(), True

    def told() -> bool:
        nonlocal quiet
        if quiet and time.monotonic() - begin > _QUIET_SECONDS:
            sys.stderr.write(f"rank {rank}: staying up to {_PATIENCE:g} s to tell the other ranks; Ctrl-C ends it\n")
            quiet = False
        if rank == 0:
            return store.check([f"{READ}/{other}" for other in range(1, ranks)])
        with contextlib.suppress(RuntimeError, TimeoutError):  # rank 0 may come later
            _write(reach(rank, timeout=_CALL_SECONDS, patience=_CALL_SECONDS), line, rank)
            return True
        return False

    if rank == 0:
        store = reach(0, timeout=_CALL_SECONDS, patience=_CALL_SECONDS)
        _write(store, line, rank)
    wait_until(told, _PATIENCE, pause=0.2)


def _write(store: Any, line: str, rank: int) -> None:
    if not Cause.read(peek(store, KEY), run_secret(), [SIGNED]):  # the first one counts
        bounded(partial(store.set, KEY, line), _CALL_SECONDS)
    bounded(partial(store.set, f"{READ}/{rank}", "1"), _CALL_SECONDS)
    bounded(partial(peek, store, KEY), _CALL_SECONDS)  # an answer: the store has the line
