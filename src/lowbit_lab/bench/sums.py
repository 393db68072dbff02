"""Shared parts of benchmarks on several ranks: turns on every link, times, bytes and errors of sums.

All formats work in the same processes and take turns, round after round, so that other work on the machine slows all
of them alike.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_lab.bench.workers import Workers, set_link, started
from lowbit_lab.network import Link
from lowbit_run.report import summary


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Contenders that take turns.

    Args:
        name: of the phase, unique.
        order: the method of the ranks' program that each turn calls; `timed` answers {"seconds", "sent"}.
        contenders: arguments of each; they also identify results.
        arguments: common to all.
        rounds: timed turns of each; untimed: turns before these, in which ranks agree and allocate buffers.
        before: an order, with arguments, to run once on each link before the first turn; None: nothing.
    """

    name: str
    order: str
    contenders: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rounds: int
    untimed: int = 0
    before: tuple[str, Mapping[str, Any]] | None = None


@dataclass(kw_only=True)
class Taken:
    """The answers of all ranks to each timed turn of one contender, on one link and number of ranks."""

    phase: str
    contender: Mapping[str, Any]
    ranks: int
    link: Mapping[str, Any]
    turns: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Return the time of the slowest rank in each turn."""
        return [max(answer["seconds"] for answer in answers) for answers in self.turns]

    @property
    def own_hosts(self) -> bool:
        """Whether ranks were on several hosts, not all on this machine's loopback."""
        return self.link["goodput_mbit"] is not None

    def about(self) -> dict[str, Any]:
        """Return fields of a row: ranks, link, and milliseconds with their spread."""
        return {"ranks": self.ranks, **self.link, **summary([1e3 * seconds for seconds in self.seconds], "ms")}

    def bits_sent(self, numel: int) -> float:
        """Return the measured bits that left a rank per element that an all-reduce of `numel` elements has to send."""
        sent = statistics.median(statistics.fmean(answer["sent"] for answer in answers) for answers in self.turns)
        own = sent if self.own_hosts else sent / self.ranks  # on a shared host, each rank counts the bytes of all
        return 8 * own / all_reduce_elements(self.ranks, numel)


def all_reduce_elements(ranks: int, numel: int) -> float:
    """Return the number of elements that a rank must send in an all-reduce of `numel` elements."""
    return 2 * (ranks - 1) / ranks * numel


def take_turns(
    program: str,
    counts: Sequence[int],
    links: Sequence[Link],
    prepare: Callable[[Workers, int], Sequence[Phase]],
    *,
    per_host: int = 1,
) -> Iterator[Sequence[Taken]]:
    """Run the phases on every link with every number of ranks; yield all results so far after every round.

    Args:
        program: module of the ranks; counts: numbers of ranks; links: to measure on.
        prepare: function that sets up the ranks, given their number, and returns the phases.
        per_host: ranks on each host.
    """
    every: list[Taken] = []
    for count in counts:
        with started(program, count, links, per_host=per_host) as (network, ranks):
            phases = prepare(ranks, count)
            for link in links:
                about = set_link(network, link, ranks)
                for phase in phases:
                    if phase.before is not None:
                        order, arguments = phase.before
                        ranks.ask(order, **arguments)
                    taken = [
                        Taken(phase=phase.name, contender=contender, ranks=count, link=about)
                        for contender in phase.contenders
                    ]
                    for turn in range(phase.untimed + phase.rounds):
                        for one in taken:
                            answers = ranks.ask(phase.order, **phase.arguments, **one.contender)
                            if turn >= phase.untimed:
                                one.turns.append(answers)
                        if turn >= phase.untimed:
                            yield [*every, *taken]
                    every += taken


def timed(action: Callable[[], object]) -> dict[str, float]:
    """On a rank, time an action that all ranks take together, and count the bytes that leave this host for it."""
    dist.barrier()
    before, start = sent_bytes(), time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    dist.barrier()
    return {"seconds": seconds, "sent": sent_bytes() - before}


def sent_bytes() -> int:
    """Return the bytes that all interfaces of this host have sent."""
    lines = Path("/proc/net/dev").read_text("utf-8").splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def error_of_sum(x: Tensor, parts: Iterable[Tensor]) -> float:
    """Return the relative error of `x` as the sum of `parts`, against float64."""
    exact = torch.zeros(x.shape, dtype=torch.float64)
    for part in parts:
        exact += part
    return float((x - exact).norm() / exact.norm())
