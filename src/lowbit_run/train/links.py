"""The links between the machines of a run: what crosses each in a step, their connections and congestion control.

TCP takes a lost packet for a sign of congestion and slows down: with CUBIC, the default of most systems, a packet lost
in a thousand costs seven eighths of 100 Mbit/s at a round trip of 40 ms. So all ranks watch how much they send again.
If a link loses packets, they use BBR, which does not slow down for single losses. If a machine does not permit that,
they use as many connections for each pair of ranks as make the slowest link faster. Later losses can add connections
or BBR, but never take connections away, so that nothing goes back and forth.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from lowbit.wire.connections import (
    ADVICE,
    FASTER,
    Segments,
    can_count,
    congestion_control,
    connect_more,
    ends,
    is_lossy,
    segments,
    set_congestion_control,
)
from lowbit.wire.messages import gather_json, neighbours, round_trip, send_rate, take_rate
from lowbit.wire.pytorch import default_group
from lowbit_run.train.layout import Pair, PipelineLayout

if TYPE_CHECKING:
    from lowbit_run.train.members import Members


OUTSIDE = -1
"""Stands for replicas that are runs of their own, in place of a rank or machine."""

_COUNTS = (4, 16)  # tried in this order
_FASTER = 1.25  # by which the slowest link must gain for more connections
_EARLY = (3, 10, 30)  # steps after which links are looked at, in addition to every `_EVERY`
_EVERY = 100
_TRIAL_SECONDS = 1.0  # of the probe of a link with another number of connections


def link_name(source: int, target: int) -> str:
    """Name one direction of a link by the first ranks of its machines."""
    return f"{source} to {'other replicas' if target == OUTSIDE else target}"


class Links:
    """Counts bytes by link, and waiting by machine. A machine is named by its first rank.

    Args:
        count: number of pipelines. machines: name of the machine of each rank.
        elastic: other replicas are runs of their own.
    """

    def __init__(self, layout: PipelineLayout, count: int, machines: Sequence[str], *, elastic: bool = False) -> None:
        self._layout, self._pipelines = layout, count
        self.rates: dict[str, float] = {}  # Mbit/s by name, as last measured
        self.machine_of = [machines.index(name) for name in machines]
        self.machines = sorted(set(self.machine_of))
        self.pairs = sorted({(a, b) for a, b in map(self._ends, self._routes()) if a != b})
        self.pairs += [(machine, OUTSIDE) for machine in self.machines if elastic]

    @property
    def count(self) -> int:
        """Number of values that `values` returns."""
        return len(self.pairs) + len(self.machines)

    def values(self, rank: int, sent: Mapping[int, float], waited: float) -> list[float]:
        """Return what this rank adds to the sums: bytes by link, and its share of its machine's mean waiting time."""
        nbytes = dict.fromkeys(self.pairs, 0.0)
        for target, size in sent.items():
            if (pair := self._ends((rank, target))) in nbytes:
                nbytes[pair] += size
        here = self.machine_of[rank]
        share = waited / self.machine_of.count(here)
        return [*nbytes.values(), *(share if machine == here else 0.0 for machine in self.machines)]

    def named(self, sums: Sequence[float]) -> tuple[dict[str, int], dict[str, float]]:
        """Name the sums of `values` over all ranks: bytes by link, and seconds of waiting by machine."""
        links = {link_name(*pair): round(size) for pair, size in zip(self.pairs, sums, strict=False)}
        waits = sums[len(self.pairs) :]
        return links, {str(machine): seconds for machine, seconds in zip(self.machines, waits, strict=True)}

    def by_link(self, rates: Mapping[tuple[int, int], float]) -> dict[str, float]:
        """Return the highest rate of each link, given the rates between pairs of ranks."""
        fastest: dict[str, float] = {}
        for pair, rate in rates.items():
            name = link_name(*self._ends(pair))
            fastest[name] = max(rate, fastest.get(name, 0.0))
        return fastest

    def _ends(self, route: tuple[int, int]) -> tuple[int, int]:
        return self.machine_of[route[0]], OUTSIDE if route[1] == OUTSIDE else self.machine_of[route[1]]

    def _routes(self) -> Iterator[tuple[int, int]]:  # (sender, receiver)
        ranks = self._layout.ranks
        for first in range(0, self._pipelines * ranks, ranks):
            for boundary in range(self._layout.stages - 1):
                ends = (first + self._layout.rank_of(boundary), first + self._layout.rank_of(boundary + 1))
                yield from (ends, (ends[1], ends[0]))
            for rank in range(first, first + ranks):  # announcements, a tied embedding; the sums of a step
                yield from ((first, rank), (rank, first), (0, rank), (rank, 0))
        for place in range(ranks):
            yield from permutations(range(place, self._pipelines * ranks, ranks), 2)


class Probes:
    """Measures distances and rates of a run; every rank makes one and calls the same methods.

    Attributes:
        trips: for each pipeline, seconds of a round trip by pair of neighbours.
        rates: Mbit/s by (sender, receiver) ranks of the run on different machines, as last measured.
    """

    def __init__(self, members: "Members") -> None:
        self._members = members
        self._messages = cache(members.messages)  # opened once: a group has a limited number of conversations
        self.trips = self.measure_distance()
        self.rates: dict[Pair, float] = {}

    @property
    def round_trip(self) -> float | None:
        """Longest round trip between neighbours of a pipeline, in seconds; None on one rank."""
        return max((seconds for pipeline in self.trips for seconds in pipeline.values()), default=None)

    def measure_distance(self) -> list[dict[Pair, float]]:
        """Measure round trips between neighbours of each pipeline, in seconds."""
        ranks = self._members.layout.ranks
        if ranks == 1:
            return []
        messages = self._messages("distance")
        measured = [
            (other, round_trip(messages, other).seconds)
            for pair in neighbours(messages.ranks) for other in pair if messages.rank in pair and other != messages.rank
        ]  # fmt: skip
        trips: list[dict[Pair, float]] = [{} for _ in range(self._members.replicas.count)]
        for rank, of_rank in enumerate(gather_json(measured, self._members.side)):
            pipeline, place = divmod(rank, ranks)
            for other, seconds in of_rank:
                trips[pipeline][min(place, other), max(place, other)] = seconds
        return trips

    def update_rates(self) -> None:
        """Measure the links again, also for metrics and the progress display."""
        self.rates = self.measure_links()
        self.publish()

    def publish(self) -> None:
        """Let metrics and the progress display have the rates."""
        links = self._members.links
        links.rates.update(links.by_link(self.rates))

    def slowest_rate(self) -> float:
        """Measure the links again, and return the lowest rate in Mbit/s; 0 if no pipeline crosses one."""
        self.rates = self.measure_links(seconds=_TRIAL_SECONDS)
        return min(self.rates.values(), default=0.0)

    def measure_links(self, seconds: float = 0.0) -> dict[Pair, float]:
        """Measure Mbit/s between neighbours on different machines for at least `seconds`, by (sender, receiver)."""
        links, ranks, index = self._members.links, self._members.layout.ranks, self._members.replicas.index
        if not links.pairs:
            return {}
        first, trips = index * ranks, self.trips[index] if self.trips else {}
        messages, machine_of = self._messages("probe"), links.machine_of[first : first + ranks]
        measured = []
        for pair in neighbours(ranks):
            if messages.rank in pair and machine_of[pair[0]] != machine_of[pair[1]]:
                for sender, receiver in (pair, pair[::-1]):
                    if messages.rank == receiver:
                        take_rate(messages, sender)
                    else:
                        rate = send_rate(messages, receiver, trip=trips[min(pair), max(pair)], seconds=seconds)
                        measured.append((first + sender, first + receiver, rate))
        gathered = gather_json(measured, self._members.side)
        return {(source, target): rate for of_rank in gathered for source, target, rate in of_rank}


class Loss(NamedTuple):
    """The share of segments that one rank has to send again, their number, and the rank's congestion control."""

    share: float
    again: int
    control: str
    known: bool = True


class Losses:
    """What all ranks had to send again since they last asked; every rank makes one, and all ask at the same time."""

    def __init__(self, side: dist.ProcessGroup | None) -> None:
        self._side, self._before = side, Segments(0, 0)

    def since_last(self) -> list[Loss]:
        """Return the losses of each rank since the last call."""
        now, before = segments(), self._before
        own = Loss(now.since(before), now.again - before.again, congestion_control(), can_count())
        self._before = now
        return [Loss(*stated) for stated in gather_json(own, self._side)]


class Backoff:
    """When to act again: not before a pause, which is twice as long each time that nothing helped.

    Attributes:
        next: step from which on to act; 0 before the first time.
    """

    def __init__(self) -> None:
        self.next, self._pause = 0, _EVERY

    def note(self, done: int, *, helped: bool) -> None:
        """Note that something was tried after `done` steps."""
        self._pause = _EVERY if helped else 2 * self._pause
        self.next = done + self._pause


class Connections:
    """Connections of a run; every rank makes one, when the process groups exist.

    Args:
        rate: measures Mbit/s of the slowest link between machines; every rank calls it at the same time.
        say: shows a line to the user.

    Attributes:
        count: connections for each pair of ranks.
        control: congestion control of the ranks, such as "cubic", or "bbr, cubic" if they differ.
    """

    def __init__(self, members: "Members", rate: Callable[[], float], say: Callable[[str], None]) -> None:
        self._members, self._rate, self._say = members, rate, say
        self._losses, self._backoff = Losses(members.side), Backoff()
        wanted = members.config.run.connections
        self._fixed = wanted != "auto" or not members.links.pairs
        self._said: set[str] = set()
        self._permitted = False  # BBR, by all machines
        self.count, self.control = 1, ""
        if isinstance(wanted, int):
            self._connect(wanted)

    @property
    def facts(self) -> dict[str, Any]:
        """What ranks.json states."""
        return {"connections": self.count, "congestion_control": self.control}

    def due(self, done: int) -> bool:
        """Whether to look at the links after this step; the same on all ranks."""
        return not self._fixed and (done in _EARLY or done % _EVERY == 0)

    def look(self, done: int = 0) -> bool:
        """Look at what was lost since the last time, and act on it; every rank calls this. Returns whether it acted.

        It acts again while packets are lost, but pauses for twice as many steps each time that nothing helped.

        Args:
            done: steps done.
        """
        losses = self._losses.since_last()
        self.control = ", ".join(sorted({loss.control for loss in losses if loss.control}))
        if self._fixed:
            return False
        if not all(loss.known for loss in losses) and "blind" not in self._said:
            self._said.add("blind")
            self._say("lost packets cannot be counted (Linux only): if a link loses any, set run.connections")
        worst = max(losses, key=lambda loss: (is_lossy(loss.share, loss.again), loss.share))
        if done < self._backoff.next or not is_lossy(worst.share, worst.again):
            return False
        acted = self._act(f"up to {100 * worst.share:.2g} % of TCP packets are sent again", losses)
        self._backoff.note(done, helped=acted)
        return acted

    def _act(self, symptom: str, losses: list[Loss]) -> bool:
        """Try BBR, then more connections; returns whether one of them is used from now on."""
        faster = {loss.control for loss in losses} == {FASTER}
        if faster and not self._backoff.next:
            self._say(f"{symptom}; {FASTER.upper()} is in use, which single losses hardly slow down")
            return False
        before, usual = self._rate(), " and ".join(sorted({loss.control for loss in losses} - {FASTER, ""})).upper()
        if not faster and (after := self._try_faster(before)) is not None:
            self._say(f"{symptom}: {FASTER.upper()} in place of {usual or 'TCP'}{_gain(before, after)}")
            return True
        kept, after = self.count, self._widen(before)
        blamed = symptom if faster else f"{symptom}, and {usual or 'TCP'} slows down for each"
        advice = "" if faster or self._permitted else f"; faster still: {ADVICE}"
        if self.count > kept:
            self._say(f"{blamed}: {self.count} connections for each pair of ranks{_gain(before, after)}{advice}")
            return True
        if "nothing" not in self._said:
            self._said.add("nothing")
            self._say(f"{blamed}: more connections are no faster than {kept}, {before:.0f} Mbit/s{advice}")
        return False

    def _try_faster(self, rate: float) -> float | None:
        """Use BBR where all machines permit it and it is not much slower; returns its rate, None if it is not used."""
        before = congestion_control()
        self._permitted = self._use(FASTER)
        if self._permitted and (after := self._rate()) * _FASTER >= rate:
            self.control = FASTER
            return after
        self._use(before)  # some machines may have the other
        return None

    def _use(self, control: str) -> bool:
        """Change the congestion control of all connections of the run; returns whether all ranks could."""
        side = self._members.side
        of_run = [pair for of_rank in gather_json(ends(), side) for pair in of_rank]
        return all(gather_json(set_congestion_control(control, of_run), side))

    def _widen(self, rate: float) -> float:
        """Use more connections as long as the slowest link gains; returns its rate."""
        for count in _COUNTS:
            if count <= (kept := self.count):
                continue
            self._connect(count)
            if (faster := self._rate()) < _FASTER * rate:
                self._connect(kept)
                break
            rate = faster
        return rate

    def _connect(self, count: int) -> None:
        replicas, timeout = self._members.replicas, self._members.config.run.timeout_seconds
        groups = [replicas.pipeline or default_group(), replicas.side, self._members.side, replicas.across]
        for group in dict.fromkeys(group for group in groups if group is not None):
            connect_more(group, count, timeout=timeout)
        self.count = count
        if self.control == FASTER:  # not that of new connections
            self._use(FASTER)


def _gain(before: float, after: float) -> str:
    return f", {before:.0f} -> {after:.0f} Mbit/s" if before else ""
