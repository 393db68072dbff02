"""`run.connections`: connections between the machines of a run, and their congestion control.

TCP takes a lost packet for a sign of congestion and slows down: with CUBIC, the default of most systems, a packet lost
in a thousand costs seven eighths of 100 Mbit/s at a round trip of 40 ms. So all ranks watch how much they send again.
If a link loses packets, they use BBR, which does not slow down for single losses. If a machine does not permit that,
they use as many connections for each pair of ranks as make the slowest link faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lowbit.wire.connections import connect_more
from lowbit.wire.groups import default_group
from lowbit.wire.json_values import gather_json
from lowbit.wire.sockets import (
    ADVICE,
    FASTER,
    Segments,
    congestion_control,
    is_lossy,
    segments,
    set_congestion_control,
)

if TYPE_CHECKING:
    from lowbit.train.trainer import Trainer

_COUNTS = (4, 16)  # tried in this order
_FASTER = 1.25  # by which the slowest link must gain for more connections
_EARLY = (3, 10, 30)  # steps after which links are looked at, in addition to every `_EVERY`
_EVERY = 100


class Loss(NamedTuple):
    """What one rank sends again: share of segments, and their number; and its congestion control."""

    share: float
    again: int
    control: str


class Connections:
    """Connections of a run; every rank makes one, when the process groups exist.

    Args:
        trainer: of this rank.
        rate: measures Mbit/s of the slowest link between machines; every rank calls it at the same time.
        say: shows a line to the user.

    Attributes:
        count: connections for each pair of ranks.
        control: congestion control of the ranks, such as "cubic", or "bbr, cubic" if they differ.
    """

    def __init__(self, trainer: Trainer, rate: Callable[[], float], say: Callable[[str], None]) -> None:
        self._trainer, self._rate, self._say = trainer, rate, say
        self._timeout = trainer.config.run.timeout_seconds
        self._wanted = trainer.config.run.connections
        self._before = Segments(0, 0)
        self._decided = self._wanted != "auto" or not trainer.links.pairs
        self.count, self.control = 1, ""
        if isinstance(self._wanted, int):
            self._connect(self._wanted)

    @property
    def facts(self) -> dict[str, Any]:
        """What ranks.json states."""
        return {"connections": self.count, "congestion_control": self.control}

    def due(self, done: int) -> bool:
        """Whether to look at the links after this step; the same on all ranks."""
        return not self._decided and (done in _EARLY or done % _EVERY == 0)

    def look(self) -> bool:
        """Look at what was lost since the last time, and act on it; every rank calls this. Returns whether it acted."""
        now = segments()
        loss = Loss(now.since(self._before), now.again - self._before.again, congestion_control())
        self._before = now
        ranks = [Loss(*each) for each in gather_json(loss, self._trainer.side)]
        self.control = ", ".join(sorted({each.control for each in ranks if each.control}))
        worst = max(ranks, key=lambda each: (is_lossy(each.share, each.again), each.share))
        if self._decided or not is_lossy(worst.share, worst.again):
            return False
        self._decided = True
        found = f"links lose up to {100 * worst.share:.2g} % of packets"
        if {each.control for each in ranks} == {FASTER}:
            self._say(f"{found}; their congestion control is {FASTER.upper()}, which single losses hardly slow down")
            return False
        usual = " and ".join(sorted({each.control for each in ranks} - {FASTER, ""})).upper() or "TCP"
        before = self._rate()
        if all(gather_json(set_congestion_control(FASTER), self._trainer.side)):
            self.control, after = FASTER, self._rate()
            self._say(f"{found}: {FASTER.upper()} in place of {usual}, {before:.0f} -> {after:.0f} Mbit/s")
            return True
        after = self._widen(before)
        helped = self.count > 1
        self._say(
            f"{found}, and {usual} slows down for each: "
            + (f"{self.count} connections for each pair of ranks, {before:.0f} -> {after:.0f} Mbit/s" if helped else
               f"more connections are no faster than one, {before:.0f} Mbit/s")
            + f"; faster still: {ADVICE}"
        )  # fmt: skip
        return helped

    def _widen(self, rate: float) -> float:
        """Use more connections as long as the slowest link gains; returns its rate."""
        for count in _COUNTS:
            kept = self.count
            self._connect(count)
            if (faster := self._rate()) < _FASTER * rate:
                self._connect(kept)
                break
            rate = faster
        return rate

    def _connect(self, count: int) -> None:
        replicas = self._trainer.replicas
        groups = [replicas.pipeline or default_group(), replicas.side, self._trainer.side, replicas.across]
        for group in dict.fromkeys(group for group in groups if group is not None):
            connect_more(group, count, timeout=self._timeout)
        self.count = count
