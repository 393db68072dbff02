"""Hear from another rank why it does not come, before the ranks have met; `decline` tells the others.

A line under one key of the store: other ranks write it into rank 0's store, and rank 0 keeps a store for it. In a run
with a secret it counts if it is signed with that, and otherwise is only shown; in a run without one any line counts, as
alarms do. There is no attempt yet that it could be signed for, so whoever has recorded it may repeat it: that keeps a
run from starting, as closing the port would.
"""

import contextlib
import json
from typing import Any

from lowbit import escape
from lowbit.escape import one_line
from lowbit.wire.store import peek
from lowbit_run.config import ConfigError
from lowbit_run.job.peers import Cause

log = escape.logger(__name__)

KEY, READ, SIGNED = "refused", "refused/read", "before the ranks have met"
LONGEST, _MOST_BYTES = 1000, 1 << 14  # characters of a text, bytes that are read


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
        written = peek(self._store, KEY)[:_MOST_BYTES]
        if not written or written == self._shown:
            return
        if cause := Cause.read(written, self._secret, [SIGNED]):
            with contextlib.suppress(RuntimeError):  # the store is gone, too
                self._store.set(f"{READ}/{self._rank}", "1")
            error = RefusedError(f"rank {cause.rank} does not come: {one_line(cause.text)}")
            error.told = self._rank > 0  # rank 0 has the store, and stays until the others have read it, too
            raise error
        self._shown = written
        with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
            text = one_line(str(json.loads(written)[1]), LONGEST)
            log.warning("somebody without this run's secret wrote that a rank does not come: %s", text)
