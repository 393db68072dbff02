"""All ranks prove, before the first byte, that they mean the same by what they are about to send.

Peers that disagree on a format do not fail: they wait for bytes that never come, or decode garbage. So each of them
states facts ("boundary 0 forward codec" is such and such) and compares them with everybody else's. The facts travel
through the store of the process group, not through a collective: the store has time limits of its own, can tell who is
missing, and does not need the data path whose use is being agreed on.

An agreement is a log under one key of the store. Each rank appends one line, which waits for no answer, and reads the
log until all have. The order of the lines decides: a rank that gives up appends a line, too, and the agreement has
failed if that line comes before the last statement. So no rank is special, and all conclude the same. For ranks that
start together it takes at most two round trips to the store, however many they are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import torch.distributed as dist

from lowbit.ranks.errors import AgreementError
from lowbit.ranks.groups import default_group, next_round
from lowbit.ranks.store import BoundedStore

Facts = Mapping[str, str]
"""What a member holds to be true, by name. Members need not state the same names, but the same values under them."""

_LINGER = 5.0  # seconds that a rank stays, after an error, so that all others can read the same
_GRACE = 1.0  # seconds that members in conflict wait for others, to show the whole of it
# Seconds between two looks at the log: a share of those waited.
_SHORTEST, _LONGEST, _SHARE = 0.01, 0.5, 0.1

_ledgers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Ledger] = weakref.WeakKeyDictionary()


def agree(
    group: dist.ProcessGroup | None,
    facts: Facts | str,
    timeout: float = 120.0,
    *,
    topic: str = "configuration",
) -> None:
    """Wait for all ranks of a group and compare what they state; to be called by each of them.

    Args:
        group: the ranks concerned; None: the default group.
        facts: what this rank states; a string is the only fact, named after the topic.
        timeout: seconds to wait for the other ranks.
        topic: tells agreements about different things in the same group apart.

    Raises:
        AgreementError: two ranks state different values under one name, or a rank did not come in time.
    """
    group = group or default_group()
    facts = {topic: facts} if isinstance(facts, str) else facts
    rank = dist.get_rank(group)
    names = [f"rank {rank}" for rank in range(dist.get_world_size(group))]
    Agreement(group, f"{topic}/{next_round(group, topic)}", timeout).exchange({rank: facts}, names)


class Agreement:
    """One comparison among members, of which a rank may speak for several (the stages of a pipeline), or for none.

    Args:
        group: process group whose store carries the facts.
        topic: unique among the agreements of this group, and the same on every rank.
        timeout: seconds to wait for the other ranks, and that each call of the store may take.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str, timeout: float) -> None:
        self._store = BoundedStore(group, timeout)
        self._timeout = timeout
        self._key = f"lowbit/agreement/{topic}"
        self._rank = dist.get_rank(group)
        self._ranks = [f"rank {rank}" for rank in dist.get_process_group_ranks(group)]
        self._ledger = _ledgers.setdefault(group, _Ledger())
        self._stated = False

    def exchange(self, facts: Mapping[int, Facts], names: Sequence[str]) -> dict[int, Facts]:
        """State facts, wait for those of all ranks, and compare them; to be called by every rank of the group, once.

        Args:
            facts: of all members that this rank speaks for, by their numbers.
            names: what to call each member in errors; numbers count from 0.

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
            AgreementError, PeerError: as `exchange`, with which the others may meet this.
        """
        if not self._stated:
            self._state(facts, names)
        log = self._read()
        if log.ended or log.problem(self._ranks):
            self._conclude(names)

    def forget(self) -> None:
        """Leave nothing in the store after `look`; what `exchange` leaves goes with a later one."""
        self._store.delete_key(self._key)

    def linger(self) -> None:
        """Stay until every rank that came has read how it ended: the store may live in this process, which ends now.

        After an `exchange` whose outcome is an error; to be called by every rank.
        """
        deadline = time.monotonic() + _LINGER
        with contextlib.suppress(RuntimeError):  # the store has gone already
            self._append(left=self._rank)
            while not (log := self._read()).came <= log.left and time.monotonic() < deadline:
                time.sleep(_SHORTEST)

    def give_up(self, why: str) -> None:
        """Instead of `exchange`: end it for the ranks that are waiting in it, with an error of this text."""
        with contextlib.suppress(RuntimeError):  # the store has gone already
            self._append(ended=why)

    def _state(self, facts: Mapping[int, Facts], names: Sequence[str], over: Sequence[str] = ()) -> None:
        members = {i: [names[i], dict(stated)] for i, stated in facts.items()}
        self._append(rank=self._rank, count=len(names), members=members, over=over)
        self._stated = True

    def _conclude(self, names: Sequence[str]) -> dict[int, Facts]:
        """Read until all ranks have stated something, one gave up, or this one does."""
        start = time.monotonic()
        give_up, in_conflict, given_up = start + self._timeout, False, ""
        while True:
            log = self._read()
            problem = log.problem(self._ranks)
            if len(log.stated) == len(self._ranks):
                if problem := problem or log.uncovered(names):
                    self._fail(problem, log)
                self._over(log)
                return {member: facts for member, (_, facts) in sorted(log.members().items())}
            if ended := log.ended or given_up:
                self._fail(ended, log)
            now = time.monotonic()
            if problem and not in_conflict:  # hardly wait for the others
                in_conflict, give_up = True, min(give_up, now + _GRACE)
            if now >= give_up:  # unless the last statement comes first
                given_up = problem or self._absence(log, names)
                self._append(ended=given_up)
                continue
            pause = min(_LONGEST, max(_SHORTEST, _SHARE * (now - start)))
            time.sleep(min(pause, give_up - now))

    def _absence(self, log: _Log, names: Sequence[str]) -> str:
        stated = log.members()
        missing = [name for i, name in enumerate(names) if i not in stated] or [
            name for rank, name in enumerate(self._ranks) if rank not in log.stated
        ]
        return (
            f"{_listed(missing)} stated nothing within {self._timeout:g} s: not started, ended early, "
            "busy for longer than that, or set up for something else"
        )

    def _fail(self, text: str, log: _Log) -> Never:
        self._over(log)
        self.linger()
        raise AgreementError(text)

    def _over(self, log: _Log) -> None:
        read = self._ledger.end(self._key, self._rank, log)
        if self._rank == 0:  # most often near the store, so that this takes least
            for key in read:
                self._store.delete_key(key)

    def _append(self, **line: Any) -> None:
        self._store.append(self._key, json.dumps(line) + "\n")

    def _read(self) -> _Log:
        log = _Log(len(self._ranks))
        for line in self._store.read(self._key).splitlines():
            log.add(line)
        return log


@dataclass
class _Log:
    """What the lines of an agreement come to, in their order. Anybody may have written them.

    Attributes:
        stated: what each rank stated, before the end. ended: why the agreement failed before all had; empty if not.
        came, left: ranks that stated anything, and those that know how it ended.
    """

    ranks: int
    stated: dict[int, _Statement] = field(default_factory=dict)
    ended: str = ""
    came: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)

    def add(self, line: bytes) -> None:
        try:
            self._add(json.loads(line))
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ):
            self._end(f"the store holds {line[:80]!r}, which is no statement of a rank: damaged, or not ours")

    def _add(self, written: dict[str, Any]) -> None:
        if "ended" in written:
            self._end(str(written["ended"]) or "a rank gave up")
        elif "left" in written:
            self.left.add(int(written["left"]))
        else:
            rank, statement = int(written["rank"]), _Statement.read(written)
            if not 0 <= rank < self.ranks:
                raise ValueError(rank)
            self.came.add(rank)
            if not self.ended:
                self.stated.setdefault(rank, statement)

    def _end(self, why: str) -> None:
        if len(self.stated) < self.ranks:
            self.ended = self.ended or why

    def members(self) -> dict[int, tuple[str, Facts]]:
        """Name and facts of each member."""
        return {m: said for each in self.stated.values() for m, said in each.members.items()}

    def problem(self, ranks: Sequence[str]) -> str:
        """How the statements so far contradict each other; empty if they do not. ranks: their names."""
        said = [
            (member, ranks[rank], *told) for rank, each in self.stated.items() for member, told in each.members.items()
        ]
        said.sort()
        if problem := contradictions({name: facts for _, _, name, facts in said}):
            return problem
        stated = sorted(self.stated.items())
        if problem := contradictions({ranks[r]: {"members": str(s.count)} for r, s in stated}):
            return problem
        for (member, rank, name, _), (other, another, _, _) in itertools.pairwise(said):
            if member == other:
                return f"{rank} and {another} both speak for {name}"
        return ""

    def uncovered(self, names: Sequence[str]) -> str:
        """Members that no rank spoke for, in words, once all ranks have stated something."""
        stated = self.members()
        missing = [name for member, name in enumerate(names) if member not in stated]
        return f"no rank speaks for {_listed(missing)}" if missing else ""


@dataclass(frozen=True)
class _Statement:
    """What one rank stated: how many members there are, names and facts of its own, and agreements that are over."""

    count: int
    members: dict[int, tuple[str, Facts]]
    over: list[str]

    @classmethod
    def read(cls, written: dict[str, Any]) -> _Statement:
        count = int(written["count"])
        members = {}
        for member, (name, facts) in written["members"].items():
            texts = [name, *facts.keys(), *facts.values()]
            if not all(isinstance(text, str) for text in texts) or not 0 <= int(member) < count:
                raise ValueError(member)
            members[int(member)] = name, facts
        return cls(count, members, [str(key) for key in written["over"]])


class _Ledger:
    """Which ranks have read the logs of a group: what all have read can go.

    Each rank tells the others which agreements are over for it when it states something in the next one. So a log is
    never deleted under a rank that has yet to read it, in whatever order threads go through their agreements.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over: list[str] = []  # here, which the others are still to be told
        self._unread: dict[str, set[int]] = {}  # ranks that may still read a log, by its key

    def begin(self, key: str, ranks: int) -> list[str]:
        """Note a log that `ranks` ranks will read; returns what to tell the others."""
        with self._lock:
            self._unread[key] = set(range(ranks))
            over, self._over = self._over, []
        return over

    def end(self, key: str, rank: int, log: _Log) -> list[str]:
        """Note that this rank has read a log, and what the others told in it; returns logs that all have read."""
        with self._lock:
            told = {r: statement.over for r, statement in log.stated.items() if r != rank}
            self._over.append(key)
            for reader, keys in [(rank, [key]), *told.items()]:
                for read in keys:
                    self._unread.get(read, set()).discard(reader)
            done = [key for key, readers in self._unread.items() if not readers]
            for read in done:
                del self._unread[read]
        return done


def contradictions(stated: Mapping[str, Facts]) -> str:
    """Describe every name under which members state different values; empty if there is none."""
    names = dict.fromkeys(name for facts in stated.values() for name in facts)
    lines = []
    for name in names:
        who: dict[str, list[str]] = {}
        for member, facts in stated.items():
            if name in facts:
                who.setdefault(facts[name], []).append(member)
        if len(who) > 1:
            told = "; ".join(f"{value} on {_listed(members)}" for value, members in who.items())
            lines.append(f"  {name}: {told}")
    return "\n".join(["the ranks do not agree:", *lines]) if lines else ""


def _listed(members: Sequence[str]) -> str:
    return ", ".join(members[:-1]) + (" and " if len(members) > 1 else "") + members[-1]
