"""Why a run ends: the first signed cause, which all ranks that still hear the store end with."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from lowbit.ranks.store import Board


class Cause(NamedTuple):
    """Why a run ends: the rank that failed first (-1: none in particular), and how, in a sentence.

    `alone`: it waited for others in vain, so that another attempt would, too.
    """

    rank: int
    text: str
    alone: bool = False

    def signed(self, secret: bytes) -> str:
        """As it is written to the store."""
        return json.dumps([*self, self._signature(secret)])

    @classmethod
    def read(cls, written: object, secret: bytes) -> Cause | None:
        """The cause in what somebody wrote; None if nobody who knows the secret did."""
        with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
            rank, text, alone, signature = json.loads(written)  # pyright: ignore[reportArgumentType]
            cause = cls(int(rank), str(text), bool(alone))
            if hmac.compare_digest(cause._signature(secret), str(signature)):
                return cause
        return None

    def _signature(self, secret: bytes) -> str:
        return hmac.new(secret, json.dumps(self).encode(), hashlib.sha256).hexdigest()


class Alarm:
    """The board for causes and for the ranks that have read them. Unsigned causes are ignored.

    Args:
        store: the part of a store for this attempt at the run (`store.of_attempt`). secret: of the run.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self._board, self._secret = Board(store, "alarm"), secret

    def sound(self, cause: Cause) -> Cause | None:
        """Write a cause; returns the first one, with which all ranks end."""
        self._board.append(cause=cause.signed(self._secret))
        return self.read()[0]  # and so this process may end: the store has the line

    def acknowledge(self, rank: int) -> None:
        """Note that a rank knows the cause."""
        self._board.append(read=rank)

    def read(self) -> tuple[Cause | None, set[int]]:
        """The first cause, if there is one, and the ranks that know it; one round trip."""
        entries = self._board.entries()
        causes = (Cause.read(entry["cause"], self._secret) for entry in entries if "cause" in entry)
        readers = {entry["read"] for entry in entries if isinstance(entry.get("read"), int)}
        return next((cause for cause in causes if cause), None), readers
