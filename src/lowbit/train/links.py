"""The links between the machines of a run, and what crosses each in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from lowbit.train.layout import PipelineLayout

OUTSIDE = -1
"""Stands for replicas that are runs of their own, in place of a rank or machine."""


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
        own = self.machine_of[rank]
        share = waited / self.machine_of.count(own)
        return [*nbytes.values(), *(share if machine == own else 0.0 for machine in self.machines)]

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

    def _routes(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs (sender, receiver) of ranks."""
        ranks = self._layout.ranks
        for first in range(0, self._pipelines * ranks, ranks):
            for boundary in range(self._layout.stages - 1):
                ends = (first + self._layout.rank_of(boundary), first + self._layout.rank_of(boundary + 1))
                yield from (ends, (ends[1], ends[0]))
            for rank in range(first, first + ranks):  # announcements, a tied embedding; the sums of a step
                yield from ((first, rank), (rank, first), (0, rank), (rank, 0))
        for place in range(ranks):
            yield from permutations(range(place, self._pipelines * ranks, ranks), 2)
