"""All ranks compare, before the first byte, what they are about to send.

Peers that disagree on a format do not fail: they wait for bytes that never come, or decode garbage. So each of them
states facts ("boundary 0 forward codec" is such and such) and compares them with everybody else's. The facts travel
through the store of the process group, not through a collective: the store has time limits of its own, shows who is
missing, and does not need the data path whose use is being agreed on.

An agreement is a board in the store. Each rank appends one line, which waits for no answer, and reads the board until
all have. A rank that gives up appends a line, too: the agreement has failed if it comes before the last statement. So
no rank is special, and all conclude the same. Ranks that start together need at most two round trips to the store.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Never

import torch.distributed as dist

from lowbit.ranks.errors import AgreementError
from lowbit.ranks.groups import next_round, plain, rank_names
from lowbit.ranks.statements import Facts, Ledger, Statements, listed
from lowbit.ranks.store import Board, BoundedStore, wait_until

_LINGER = 5.0  # seconds that a rank stays, after an error, so that all others can read the same
_GRACE = 1.0  # seconds that members in conflict wait for others, to show the whole of it
# Seconds between two looks at the board: a share of those waited.
_SHORTEST, _LONGEST, _SHARE = 0.01, 0.5, 0.1

_ledgers: weakref.WeakKeyDictionary[dist.ProcessGroup, Ledger] = weakref.WeakKeyDictionary()


def agree(
    group: dist.ProcessGroup | None, facts: Facts | str, timeout: float = 120.0, *, topic: str = "configuration"
) -> None:
    """Wait for all ranks of a group and compare their facts; every rank calls this.

    Args:
        group: the ranks concerned; None: the default group.
        facts: what this rank states; a string is the only fact, named after the topic.
        timeout: seconds to wait for the other ranks.
        topic: tells agreements about different things in the same group apart.

    Raises:
        AgreementError: two ranks state different values under one name, or a rank did not come in time.
    """
    group = plain(group)
    facts = {topic: facts} if isinstance(facts, str) else facts
    names = [f"rank {rank}" for rank in range(group.size())]
    Agreement(group, f"{topic}/{next_round(group, topic)}", timeout).exchange({group.rank(): facts}, names)


class Agreement:
    """One comparison among members, of which a rank may speak for several (the stages of a pipeline), or for none.

    Args:
        group: process group whose store carries the facts.
        topic: unique among the agreements of this group, and the same on every rank.
        timeout: seconds to wait for the other ranks, and that each call of the store may take.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str, timeout: float) -> None:
        self._store = BoundedStore(group, timeout)
        self._key = f"lowbit/agreement/{topic}"
        self._board = Board(self._store, self._key)
        self._timeout = timeout
        self._rank, self._ranks = group.rank(), rank_names(group)
        self._ledger = _ledgers.setdefault(group, Ledger())
        self._stated = False

    def exchange(self, facts: Mapping[int, Facts], names: Sequence[str]) -> dict[int, Facts]:
        """State facts, wait for those of all ranks, and compare them; to be called by every rank of the group, once.

        Args:
            facts: of all members that this rank speaks for, by their numbers.
            names: of all members, for errors; numbers count from 0.

        Returns:
            The facts of all members, by number.

        Raises:
            AgreementError: a contradiction, or members that stated nothing in time; the same text on every rank.
            PeerError: the store did not answer in time.
        """
        self._state(facts, names, self._ledger.begin(self._key, len(self._ranks)))
        return self._conclude(names)

    def look(self, facts: Mapping[int, Facts], names: Sequence[str]) -> None:
        """State facts, and compare them with those that others have stated so far, without waiting for any.

        Beside a call that should end by itself: others may never state anything. Call `forget` once it is over.

        Raises:
            AgreementError, PeerError: as `exchange`, which others may be in.
        """
        if not self._stated:
            self._state(facts, names)
        statements = self._read()
        if statements.ended or statements.problem():
            self._conclude(names)

    def forget(self) -> None:
        """Delete the board after `look`; that of an `exchange` is deleted in a later one."""
        self._store.delete_key(self._key)

    def linger(self) -> None:
        """Stay until every rank that came has read how it ended: the store may live in this process, which ends now.

        After an `exchange` whose outcome is an error; to be called by every rank.
        """

        def all_left() -> bool:
            statements = self._read()
            return statements.came <= statements.left

        with contextlib.suppress(RuntimeError):  # the store has gone already
            self._board.append(left=self._rank)
            wait_until(all_left, _LINGER, pause=_SHORTEST)

    def give_up(self, why: str) -> None:
        """Instead of `exchange`: end it for the ranks that are waiting in it, with an error of this text."""
        with contextlib.suppress(RuntimeError):  # the store has gone already
            self._board.append(ended=why)

    def _state(self, facts: Mapping[int, Facts], names: Sequence[str], over: Sequence[str] = ()) -> None:
        members = {member: [names[member], dict(stated)] for member, stated in facts.items()}
        self._board.append(rank=self._rank, count=len(names), members=members, over=over)
        self._stated = True

    def _read(self) -> Statements:
        return Statements.read(self._board.lines(), self._ranks)

    def _conclude(self, names: Sequence[str]) -> dict[int, Facts]:
        """Read until all ranks have stated something, one gave up, or this one does."""
        start = time.monotonic()
        deadline, in_conflict, given_up = start + self._timeout, False, ""
        while True:
            statements = self._read()
            problem = statements.problem()
            if statements.complete:
                if missing := statements.missing(names):
                    problem = problem or f"no rank reports for {listed(missing)}"
                if problem:
                    self._fail(problem, statements)
                self._end(statements)
                return {member: facts for member, (_, facts) in sorted(statements.members().items())}
            if ended := statements.ended or given_up:
                self._fail(ended, statements)
            now = time.monotonic()
            if problem and not in_conflict:  # hardly wait for the others
                in_conflict, deadline = True, min(deadline, now + _GRACE)
            if now >= deadline:  # unless the last statement comes first
                absent = f"{listed(statements.missing(names))} did not report within {self._timeout:g} s: not started, "
                given_up = problem or absent + "ended early, busy for longer than that, or set up for something else"
                self._board.append(ended=given_up)
                continue
            pause = min(_LONGEST, max(_SHORTEST, _SHARE * (now - start)))
            time.sleep(min(pause, deadline - now))

    def _fail(self, text: str, statements: Statements) -> Never:
        self._end(statements)
        self.linger()
        raise AgreementError(text)

    def _end(self, statements: Statements) -> None:
        read_by_all = self._ledger.end(self._key, self._rank, statements)
        if self._rank == 0:  # most often near the store, so that this takes least
            for key in read_by_all:
                self._store.delete_key(key)
