"""All ranks compare, before the first byte, what they are about to send: else they would hang, or decode garbage.

Each rank appends its facts as a line to a board in the group's store, and reads the board until all have: at most two
round trips. A rank that gives up appends a line, too. All read the lines in one order, and so conclude the same.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Never

import torch.distributed as dist

from lowbit import escape
from lowbit.wire.errors import AgreementError
from lowbit.wire.pytorch import next_round, rank_names, unwrapped_group
from lowbit.wire.store import Board, BoundedStore, is_kept_here, wait_until

_LINGER = 5.0  # seconds that the rank with the store stays before it raises, so that the others can read the outcome
_QUIET_SECONDS = 2.0  # seconds of staying for others before a log line reports it
_GRACE = 1.0  # seconds that members in conflict wait for others, so that the error shows all contradictions
# Seconds between two reads of the board: this share of the time waited so far, within the bounds.
_SHORTEST, _LONGEST, _SHARE = 0.01, 0.5, 0.1

log = escape.logger(__name__)

_unread: list[tuple[Board, list[str], float]] = []  # failed agreements in a store kept here: board, ranks, deadline

# The last board of each series of agreements that ended well: all ranks have read it once they state in the next one.
_last: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = weakref.WeakKeyDictionary()


def agree(
    group: dist.ProcessGroup | None, facts: Facts | str, timeout: float = 120.0, *, topic: str = "configuration"
) -> None:
    """Wait for all ranks of a group and compare their facts; every rank calls this.

    Args:
        group: the ranks concerned; None: the default group.
        facts: what this rank states; a string is the only fact, named after the topic.
        timeout: seconds to wait for the other ranks.
        topic: distinguishes agreements about different things in the same group.

    Raises:
        AgreementError: two ranks state different values under one name, or a rank did not come in time.
    """
    group = unwrapped_group(group)
    facts = {topic: facts} if isinstance(facts, str) else facts
    names = [f"rank {rank}" for rank in range(group.size())]
    Agreement(group, f"{topic}/{next_round(group, topic)}", timeout).exchange({group.rank(): facts}, names)


class Agreement:
    """One comparison among members. A rank may speak for several of them (the stages of a pipeline), or for none.

    `topic`: "series/name", unique among the group's agreements, the same on every rank; a rank makes those of a series
    one after the other. `timeout`: seconds to wait for the other ranks, and limit of each call of the store.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str, timeout: float) -> None:
        # Not a collective: the store has time limits, shows who is missing, and is apart from the path in question.
        self._store = BoundedStore(group, timeout)
        self._kept = group.get_group_store()
        self._key = f"lowbit/agreement/{topic}"
        self._board = Board(self._store, self._key)
        self._timeout = timeout
        self._rank, self._ranks = group.rank(), rank_names(group)
        self._series, self._last = topic.rpartition("/")[0], _last.setdefault(group, {})
        self._stated = False
        self._deadline = time.monotonic() + timeout

    def exchange(self, facts: Mapping[int, Facts], names: Sequence[str]) -> dict[int, Facts]:
        """State facts, wait for those of all ranks, and compare them; every rank of the group calls this once.

        `facts`: of all members that this rank speaks for, by number; those of all are returned. `names`: of all.
        AgreementError, the same on every rank: a contradiction, or members stated nothing in time.
        """
        self._state(facts, names)
        return self._conclude(names)

    def look(self, facts: Mapping[int, Facts], names: Sequence[str]) -> None:
        """State facts, and compare them with those stated so far, without waiting; call `forget` afterwards."""
        if not self._stated:
            self._state(facts, names)
        statements = Statements.read(self._board, self._ranks)
        if statements.ended or statements.problem():
            self._conclude(names)

    def forget(self) -> None:
        """Delete the board after `look`; that of an `exchange` is deleted by the next one of its series."""
        self._store.delete_key(self._key)

    def linger(self) -> None:
        """Note that this rank has read the outcome; if this process keeps the store, stay until the others have, too.

        Every rank calls it after an `exchange` that failed. It waits for ranks that have come; `stay` for all others.
        """
        with contextlib.suppress(RuntimeError):  # the store has gone already
            self._board.append(left=self._rank)
        # A rank that has left reads no more. If the store went before, PyTorch would print lines of C++ in the others.
        if is_kept_here(self._kept):
            board = Board(self._kept, self._key)  # without threads, which cannot start while this process ends
            seen = partial(Statements.read, board, self._ranks)
            wait_until(lambda: (statements := seen()).came <= statements.left, _LINGER, pause=_SHORTEST)
            if _strangers(board, self._ranks):
                _unread.append((board, self._ranks, self._deadline))

    def give_up(self, why: str) -> None:
        """Fail the agreement, instead of joining `exchange`: ranks that wait in it raise an error with this text."""
        with contextlib.suppress(RuntimeError):  # the store has gone already
            self._board.append(ended=why)

    def _state(self, facts: Mapping[int, Facts], names: Sequence[str]) -> None:
        members = {member: [names[member], dict(stated)] for member, stated in facts.items()}
        self._board.append(rank=self._rank, count=len(names), members=members)
        self._stated = True

    def _conclude(self, names: Sequence[str]) -> dict[int, Facts]:
        """Read the board until all ranks have stated something, one has given up, or this one gives up."""
        start = time.monotonic()
        deadline, in_conflict, given_up = start + self._timeout, False, ""
        while True:
            statements = Statements.read(self._board, self._ranks)
            problem = statements.problem()
            if statements.complete:
                if missing := statements.missing(names):
                    problem = problem or f"no rank reports for {listed(missing)}"
                if problem:
                    self._fail(problem)
                previous, self._last[self._series] = self._last.get(self._series), self._key
                # All ranks have come to this agreement, so none reads the board of the previous one any more.
                if previous and self._rank == 0:  # usually the rank closest to the store
                    self._store.delete_key(previous)
                return {member: facts for member, (_, facts) in sorted(statements.members().items())}
            if ended := statements.ended or given_up:
                self._fail(ended)
            now = time.monotonic()
            if problem and not in_conflict:  # wait only a little longer for the others
                in_conflict, deadline = True, min(deadline, now + _GRACE)
            if now >= deadline:  # give up; does not count if the last statement gets onto the board before this line
                absent = f"{listed(statements.missing(names))} did not report within {self._timeout:g} s: not started, "
                given_up = problem or absent + "ended early, busy for longer than that, or set up for something else"
                # Then read again: the order of lines decides, and the last statement may stand before this line.
                self._board.append(ended=given_up)
                continue
            # Poll ever less often: all ranks share one store.
            pause = min(_LONGEST, max(_SHORTEST, _SHARE * (now - start)))
            time.sleep(min(pause, deadline - now))

    def _fail(self, text: str) -> Never:
        self.linger()
        raise AgreementError(text)


@atexit.register
def stay() -> None:
    """Keep this process, and so its store, for ranks that may read of a failed agreement within its time limit."""
    start = time.monotonic()
    with contextlib.suppress(RuntimeError, KeyboardInterrupt):
        while _unread:
            board, ranks, deadline = _unread.pop()
            announced = False
            while (late := _strangers(board, ranks)) and (left := deadline - time.monotonic()) > 0:
                if not announced and time.monotonic() > start + _QUIET_SECONDS:
                    log.warning("staying up to %.0f s, so that %s can read why the run ended", left, listed(late))
                    announced = True
                time.sleep(_LONGEST / 5)


def _strangers(board: Board, ranks: Sequence[str]) -> list[str]:
    """Names of ranks that have not read the outcome of an agreement; empty if its board is gone."""
    statements = Statements.read(board, ranks)
    left = statements.left if statements.came or statements.ended else range(len(ranks))
    return [name for rank, name in enumerate(ranks) if rank not in left]


Facts = Mapping[str, str]
"""Values by name. Members may state different names, but must state the same values under common ones."""


@dataclass
class Statements:
    """The lines of an agreement, in order; `ranks` are the names of the group's ranks, for errors.

    `stated`: before the end, by rank: the number of members, and name and facts of its own. `ended`: why the agreement
    failed early; empty if it did not. `came`, `left`: ranks that stated anything, and that have read the outcome.
    """

    ranks: Sequence[str]
    stated: dict[int, tuple[int, dict[int, tuple[str, Facts]]]] = field(default_factory=dict)
    ended: str = ""
    came: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, board: Board, ranks: Sequence[str]) -> Statements:
        statements = cls(ranks)
        for line in board.lines():
            try:
                statements._add(json.loads(line))
            # ArithmeticError: a rank of 1e999; RecursionError: deep lists. The lines are untrusted.
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
                statements._end(f"the store holds {line[:80]!r}, which no rank of this run wrote")
        return statements

    def _add(self, line: dict[str, Any]) -> None:
        if "ended" in line:
            self._end(str(line["ended"]) or "a rank gave up")
        elif "left" in line:
            self.left.add(int(line["left"]))
        else:
            rank, count, members = int(line["rank"]), int(line["count"]), {}
            for member, (name, facts) in line["members"].items():
                texts = [name, *facts.keys(), *facts.values()]
                if not all(isinstance(text, str) for text in texts) or not 0 <= int(member) < count:
                    raise ValueError(member)
                members[int(member)] = name, facts
            if not 0 <= rank < len(self.ranks):
                raise ValueError(rank)
            self.came.add(rank)
            if not self.ended:
                # The first statement counts: others may have concluded from it.
                self.stated.setdefault(rank, (count, members))

    def _end(self, why: str) -> None:
        # Once all have stated their facts, a rank that gives up cannot undo what others conclude.
        if not self.complete:
            self.ended = self.ended or why

    @property
    def complete(self) -> bool:
        return len(self.stated) == len(self.ranks)

    def members(self) -> dict[int, tuple[str, Facts]]:
        return {m: named for _, members in self.stated.values() for m, named in members.items()}

    def problem(self) -> str:
        """Describe how the statements so far contradict each other; empty if they do not."""
        stated = sorted(
            (member, self.ranks[rank], *name_and_facts)
            for rank, (_, members) in self.stated.items()
            for member, name_and_facts in members.items()
        )
        if problem := contradictions({name: facts for _, _, name, facts in stated}):
            return problem
        counts = {self.ranks[rank]: {"members": str(count)} for rank, (count, _) in sorted(self.stated.items())}
        if problem := contradictions(counts):
            return problem
        for (member, rank, name, _), (other, another, _, _) in itertools.pairwise(stated):
            if member == other:
                return f"{rank} and {another} both report for {name}"
        return ""

    def missing(self, names: Sequence[str]) -> list[str]:
        """Members that no rank has spoken for; if there are none, ranks that have stated nothing."""
        stated = self.members()
        members = [name for member, name in enumerate(names) if member not in stated]
        return members or [name for rank, name in enumerate(self.ranks) if rank not in self.stated]


def contradictions(stated: Mapping[str, Facts]) -> str:
    """Describe every name under which members state different values; empty if there are none."""
    lines = []
    for name in dict.fromkeys(name for facts in stated.values() for name in facts):
        members_by_value: dict[str, list[str]] = {}
        for member, facts in stated.items():
            if name in facts:
                members_by_value.setdefault(facts[name], []).append(member)
        if len(members_by_value) > 1:
            values = "; ".join(f"{value} on {listed(members)}" for value, members in members_by_value.items())
            lines.append(f"  {name}: {values}")
    return "\n".join(["the ranks do not agree:", *lines]) if lines else ""


def listed(names: Sequence[str]) -> str:
    """Join names as "a, b and c"."""
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
