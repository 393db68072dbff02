"""Parse the statements of ranks in an agreement from the lines of its board, which are untrusted input."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, str]
"""Values by name. Members may state different names, but must state the same values under common ones."""


@dataclass(frozen=True)
class _Statement:
    """A rank's statement: number of members, names and facts of its own members, agreements that it has ended."""

    count: int
    members: dict[int, tuple[str, Facts]]
    over: list[str]

    @classmethod
    def read(cls, line: dict[str, Any]) -> _Statement:
        count = int(line["count"])
        members = {}
        for member, (name, facts) in line["members"].items():
            texts = [name, *facts.keys(), *facts.values()]
            if not all(isinstance(text, str) for text in texts) or not 0 <= int(member) < count:
                raise ValueError(member)
            members[int(member)] = name, facts
        return cls(count, members, [str(key) for key in line["over"]])


@dataclass
class Statements:
    """The lines of an agreement, in order; `ranks` are the names of the group's ranks, for errors.

    `stated`: statements before the end, by rank. `ended`: why the agreement failed early; empty if it did not. `came`,
    `left`: ranks that stated anything, and those that have read the outcome.
    """

    ranks: Sequence[str]
    stated: dict[int, _Statement] = field(default_factory=dict)
    ended: str = ""
    came: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)

    @classmethod
    def read(cls, lines: Iterable[bytes], ranks: Sequence[str]) -> Statements:
        """Parse the statements in these lines, up to the end of the agreement."""
        statements = cls(ranks)
        for line in lines:
            try:
                statements._add(json.loads(line))
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
                statements._end(f"the store holds {line[:80]!r}, which no rank of this run wrote")
        return statements

    def _add(self, line: dict[str, Any]) -> None:
        if "ended" in line:
            self._end(str(line["ended"]) or "a rank gave up")
        elif "left" in line:
            self.left.add(int(line["left"]))
        else:
            rank, statement = int(line["rank"]), _Statement.read(line)
            if not 0 <= rank < len(self.ranks):
                raise ValueError(rank)
            self.came.add(rank)
            if not self.ended:
                self.stated.setdefault(rank, statement)

    def _end(self, why: str) -> None:
        if not self.complete:
            self.ended = self.ended or why

    @property
    def complete(self) -> bool:
        """Whether every rank has stated something."""
        return len(self.stated) == len(self.ranks)

    def members(self) -> dict[int, tuple[str, Facts]]:
        return {m: named for statement in self.stated.values() for m, named in statement.members.items()}

    def problem(self) -> str:
        """Describe how the statements so far contradict each other; empty if they do not."""
        stated = sorted(
            (member, self.ranks[rank], *name_and_facts)
            for rank, statement in self.stated.items()
            for member, name_and_facts in statement.members.items()
        )
        if problem := contradictions({name: facts for _, _, name, facts in stated}):
            return problem
        counts = {self.ranks[rank]: {"members": str(s.count)} for rank, s in sorted(self.stated.items())}
        if problem := contradictions(counts):
            return problem
        for (member, rank, name, _), (other, another, _, _) in itertools.pairwise(stated):
            if member == other:
                return f"{rank} and {another} both report for {name}"
        return ""

    def absent(self) -> list[str]:
        """Names of all ranks that have not read the outcome."""
        return [name for rank, name in enumerate(self.ranks) if rank not in self.left]

    def missing(self, names: Sequence[str]) -> list[str]:
        """Members that no rank has spoken for; if there are none, ranks that have stated nothing."""
        stated = self.members()
        members = [name for member, name in enumerate(names) if member not in stated]
        return members or [name for rank, name in enumerate(self.ranks) if rank not in self.stated]


class Ledger:
    """Track which ranks have read the boards of a group's agreements; a board that all have read can be deleted.

    Each statement of a rank lists the agreements that it has ended. So a board is never deleted before a rank has read
    it, in whatever order threads process their agreements.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over: list[str] = []  # agreements that this rank has ended and not yet listed in a statement
        self._unread: dict[str, set[int]] = {}  # ranks that may still read a board, by its key

    def begin(self, key: str, ranks: int) -> list[str]:
        """Register a board that `ranks` ranks will read; returns the agreements that are over, to be stated."""
        with self._lock:
            self._unread[key] = set(range(ranks))
            over, self._over = self._over, []
        return over

    def end(self, key: str, rank: int, statements: Statements) -> list[str]:
        """Record that this rank has read a board, and what the others have ended; returns boards that all have read."""
        with self._lock:
            self._over.append(key)
            over = {r: statement.over for r, statement in statements.stated.items() if r != rank}
            for reader, keys in [(rank, [key]), *over.items()]:
                for read in keys:
                    self._unread.get(read, set()).discard(reader)
            done = [key for key, readers in self._unread.items() if not readers]
            for read in done:
                del self._unread[read]
        return done


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
