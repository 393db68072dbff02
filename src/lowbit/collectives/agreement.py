"""All ranks prove, before the first byte, that they mean the same by what they are about to send.

Peers that disagree on a format do not fail: they wait for bytes that never come, or decode garbage. So each of them
states facts ("boundary 0 forward codec" is such and such) and compares them with everybody else's. The facts travel
through the store of the process group, not through a collective: the store has time limits of its own, can tell who is
missing, and does not need the data path whose use is being agreed on.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist

from lowbit.collectives.failure import AgreementError
from lowbit.collectives.store import BoundedStore

Facts = Mapping[str, str]
"""What a member holds to be true, by name. Members need not state the same names, but the same values under them."""

_LINGER = 5.0  # seconds that a rank stays, after an error, so that all others can read the same
_GRACE = 1.0  # seconds that members in conflict wait for others, to show the whole of it
_AGREED = "agreed"
_POLL = 0.02  # seconds between two looks at who is still missing

_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


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
    agreement = Agreement(group, f"{topic}/{next_round(group, topic)}", timeout)
    agreement.state(rank, facts)
    agreement.check([f"rank {rank}" for rank in range(dist.get_world_size(group))])


class Agreement:
    """One comparison among members, of which a rank may speak for several (the stages of a pipeline).

    `state` never blocks and `check` waits for everybody, so a rank that first states the facts of all its members and
    checks afterwards cannot deadlock.

    Args:
        group: process group whose store carries the facts.
        topic: unique among the agreements of this group, and the same on every rank.
        timeout: seconds that `check` waits, and that each call of the store may take.
    """

    def __init__(self, group: dist.ProcessGroup, topic: str, timeout: float) -> None:
        self._store = BoundedStore(group, timeout)
        self._timeout = timeout
        self._prefix = f"lowbit/agreement/{topic}"
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def state(self, member: int, facts: Facts) -> None:
        """Make a member's facts known."""
        self._store.set(f"{self._prefix}/{member}", json.dumps(dict(facts)))
        self._store.set(f"{self._prefix}/came/{self._rank}", "")

    def exchange(self, facts, names):
        for m, f in facts.items():
            self.state(m, f)
        self.check(names)
        return {i: json.loads(self._store.get(f"{self._prefix}/{i}")) for i in range(len(names))}

    def check(self, names: Sequence[str]) -> None:
        """Wait for the facts of all members, numbered from 0, and compare them.

        Args:
            names: what to call each member in errors.

        Raises:
            AgreementError: a contradiction, or members that stated nothing in time.
            PeerError: the store did not answer in time.
        """
        stated = self._collect(len(names))
        problem = contradictions({names[i]: stated[i] for i in sorted(stated)})
        missing = [name for i, name in enumerate(names) if i not in stated]
        if missing and not problem:
            problem = (
                f"{_listed(missing)} stated nothing within {self._timeout:g} s: not started, ended early, "
                "busy for longer than that, or set up for something else"
            )
        # The first to conclude decides, so that all ranks go on, or all raise the same text.
        verdict = self._store.compare_set(f"{self._prefix}/verdict", "", problem or _AGREED)
        if verdict.decode() != _AGREED:
            self._linger()
            raise AgreementError(verdict.decode())

    def stated(self, members: int, *, known: Collection[int] = ()) -> dict[int, Facts]:
        """Facts that members have stated so far, by member, without those of `known` ones; never waits."""
        return {
            i: json.loads(self._store.get(f"{self._prefix}/{i}"))
            for i in set(range(members)).difference(known)
            if self._store.check(f"{self._prefix}/{i}")
        }

    def forget(self, member: int) -> None:
        """Leave nothing of a member in the store; only once all members have been through `check`."""
        keys = [str(member), f"came/{self._rank}", *(["verdict"] if member == 0 else [])]
        for key in keys:
            self._store.delete_key(f"{self._prefix}/{key}")

    def _collect(self, members: int) -> dict[int, Facts]:
        """Facts by member; those of a contradiction hardly wait for the others."""
        deadline = time.monotonic() + self._timeout
        stated: dict[int, Facts] = {}
        in_conflict = False
        while True:
            stated |= self.stated(members, known=stated)
            if len(stated) == members or time.monotonic() > deadline:
                return stated
            if not in_conflict and contradictions({str(i): facts for i, facts in stated.items()}):
                in_conflict, deadline = True, min(deadline, time.monotonic() + _GRACE)
            time.sleep(_POLL)

    def _linger(self) -> None:
        """Stay until every rank that came has the verdict: the store may live in this very process."""
        deadline = time.monotonic() + _LINGER
        with contextlib.suppress(RuntimeError):  # the store has gone already
            self._store.set(f"{self._prefix}/left/{self._rank}", "")
            while time.monotonic() < deadline and any(map(self._stays, range(self._ranks))):
                time.sleep(_POLL)

    def _stays(self, rank: int) -> bool:
        came, left = (f"{self._prefix}/{what}/{rank}" for what in ("came", "left"))
        return self._store.check(came) and not self._store.check(left)


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


def default_group() -> dist.ProcessGroup:
    """The default process group.

    Raises:
        RuntimeError: `torch.distributed.init_process_group` has not been called.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    return group


def next_round(group: dist.ProcessGroup, name: str) -> int:
    """0, 1, 2, ... for successive calls with a name: ranks that do the same things count alike."""
    counter = _rounds.setdefault(group, Counter())
    counter[name] += 1
    return counter[name] - 1


def _listed(members: Sequence[str]) -> str:
    return ", ".join(members[:-1]) + (" and " if len(members) > 1 else "") + members[-1]
