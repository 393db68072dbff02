"""Brings the machines together in the store that `lowbit train` would use, where they exchange messages."""

import contextlib
import errno
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from lowbit.escape import Printable
from lowbit.wire.checksum import begin_attempt, run_secret
from lowbit.wire.errors import first_line
from lowbit.wire.store import bounded, peek, wait_until
from lowbit_run.doctor.facts import StatementError, read
from lowbit_run.doctor.settings import DoctorSettings
from lowbit_run.job.process_group import MeetingError, is_own, prove, reach

_CALL_SECONDS = 10.0  # of a call of the store
_TRY_SECONDS = 5.0  # to connect once
_PROVE_SECONDS = 30.0
_OPEN_SECONDS = 3600.0  # in which the first machine stops waiting for others
_END_SECONDS = 5.0
_PAUSE = 0.1
_MOST_BYTES = 1 << 20  # of a statement
_Class = TypeVar("_Class")


class DoctorError(Printable, ConnectionError):
    """The machines cannot meet there at all."""


class FirstMachineError(Printable, ConnectionError):
    """The first machine cannot be reached, or is gone."""


class Meeting:
    """A meeting of the machines, seen from this one. Every wait has a time limit.

    Attributes:
        rank, ranks: of this machine, and how many came. store: theirs.
        attempt: random name of the meeting, the same on all machines.
        strangers: names of the machines that do not know the secret.

    Raises:
        DoctorError: trying again cannot help. FirstMachineError: trying again may help.
    """

    def __init__(self, settings: DoctorSettings, name: str) -> None:
        self.strangers: list[str] = []
        self.attempt = ""
        self.rank, self.store = _join(settings)
        too_late = DoctorError(
            f"the machines at {settings.where} have met without this one; allowed: to start again on all machines"
        )
        if self.rank >= settings.count:
            raise too_late
        self._call(self.store.set, f"hello/{self.rank}", secrets.token_hex(16))
        self._call(self.store.set, f"name/{self.rank}", name)
        self.ranks = self._count(settings)
        if self.rank >= self.ranks:
            raise too_late
        try:
            knows = partial(prove, secret=run_secret(), patience=_PROVE_SECONDS)
            self.attempt = bounded(lambda: knows(self.store, self.rank, self.ranks), 2 * _PROVE_SECONDS)
            begin_attempt(self.attempt)
        except MeetingError as error:
            if not error.strangers:
                raise
            names = [self._call(peek, self.store, f"name/{rank}") for rank in error.strangers]
            self.strangers = [name.decode(errors="replace")[:60] for name in names]
        except (TimeoutError, RuntimeError) as error:
            raise FirstMachineError(f"the first machine is gone: {first_line(error)}") from None

    def exchange(self, value: Any, seconds: float) -> dict[int, Any]:
        """Publish a message, and return the messages of the same class from all machines that publish in time, by rank.

        Raises:
            FirstMachineError: the first machine is gone. StatementError: a machine stated something invalid.
        """
        cls, topic = type(value), type(value).__name__
        keys = {rank: f"{topic}/{rank}" for rank in range(self.ranks)}
        self._call(self.store.set, keys[self.rank], json.dumps(vars(value)))
        wait_until(lambda: self._call(self.store.check, [*keys.values()]), seconds, pause=_PAUSE)
        stated: dict[int, Any] = {}
        for rank, key in keys.items():
            if text := self._call(peek, self.store, key):
                try:
                    stated[rank] = read(cls, json.loads(text) if len(text) < _MOST_BYTES else None)
                except (ValueError, RecursionError, StatementError) as error:
                    raise StatementError(f"machine {rank} (0: the first): {first_line(error)}") from None
        return stated

    def close(self) -> None:
        """Wait briefly until all machines have read what they need from this one: the store, and the last messages."""
        keys = [f"end/{rank}" for rank in range(self.ranks)]
        with contextlib.suppress(FirstMachineError):  # the first machine has seen all keys
            self._call(self.store.set, keys[self.rank], "1")
            wait_until(lambda: self._call(self.store.check, keys), _END_SECONDS, pause=_PAUSE)

    def _count(self, settings: DoctorSettings) -> int:
        """How many machines have come: the first waits for the others, and announces it."""
        if self.rank:
            say("met the first machine, which waits for the others")
            wait_until(lambda: self._call(self.store.check, ["ranks"]), _OPEN_SECONDS, pause=_PAUSE)
            text = self._call(peek, self.store, "ranks")
            return int(text) if text.isdigit() and len(text) < 4 else 0
        if settings.count > 1:
            say(f"waiting up to {settings.wait:.0f} s for {settings.count - 1} more to start it with {settings.where}")
        joined = partial(self._call, self.store.add, "seats", 0)
        wait_until(lambda: joined() >= settings.count - 1, settings.wait, pause=_PAUSE)
        ranks = 1 + min(settings.count - 1, max(0, joined()))
        self._call(self.store.set, "ranks", str(ranks))
        return ranks

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the store, with a time limit; FirstMachineError: no answer, or the connection has ended."""
        try:
            return bounded(lambda: call(*args), _CALL_SECONDS)
        except (TimeoutError, RuntimeError) as error:
            raise FirstMachineError(f"the first machine is gone: {first_line(error)}") from None


def say(text: str) -> None:
    """Log the progress of the check."""
    sys.stderr.write(f"lowbit doctor: {text}\n")
    sys.stderr.flush()


def _join(settings: DoctorSettings) -> tuple[int, Store]:
    """Join the meeting; return this machine's rank and the store, which runs on the first machine."""
    host, port = settings.place
    os.environ.update({"MASTER_ADDR": host, "MASTER_PORT": str(port)})
    taken = False
    if is_own(host):
        try:
            return 0, reach(0, timeout=_CALL_SECONDS, patience=_TRY_SECONDS)
        except MeetingError as error:
            cause = error.__cause__
            # Several "machines" may run on this host: the first of them may hold the port.
            taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
            if not taken:
                raise DoctorError(f"this machine cannot listen at {settings.where}: {cause}") from None
    deadline, quiet = time.monotonic() + settings.wait, False
    while True:
        try:
            store = reach(1, timeout=_CALL_SECONDS, patience=min(_TRY_SECONDS, settings.wait))
            return bounded(partial(store.add, "seats", 1), _CALL_SECONDS), store
        except (TimeoutError, RuntimeError) as error:
            if taken:
                text = f"{settings.where} is taken by another program ({first_line(error)}); allowed: a free port"
                raise DoctorError(text) from None
            if time.monotonic() > deadline:
                text = f"port {port} of {host} cannot be reached from here within {settings.wait:g} s: {error}"
                raise FirstMachineError(text) from None
            if not quiet:
                say(f"waiting up to {settings.wait:.0f} s for the first machine at {settings.where}: {error}")
                quiet = True
            time.sleep(5 * _PAUSE)
