"""What the first machine asks all machines for: their clocks, ports, links and speed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from lowbit.doctor.channel import StrangerError, read
from lowbit.doctor.facts import now
from lowbit.doctor.messages import Facts, Rate, Reached, Speed
from lowbit.doctor.ports import OPEN
from lowbit.doctor.settings import DoctorSettings

ANSWER_SECONDS = 30.0
_SPEED_SECONDS = 900.0  # the first call of a format compiles it
_CLOCK_ROUNDS = 7
Ask = Callable[[Mapping[str, Any], float], dict[str, Any]]


@dataclass
class Seat:
    """A machine at the meeting.

    Attributes:
        ask: gets the answer to a message within some seconds. seen: its address as the first machine sees it.
        lost: why it is not there any more. clock_ms: how far its clock is ahead of the first machine's.
    """

    facts: Facts
    ask: Ask
    seen: str = ""
    lost: str = ""
    clock_ms: float | None = None
    speed: Speed = field(default_factory=Speed)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it may be reached: where Gloo would listen, and where packets leave to the meeting."""
        return tuple(dict.fromkeys(filter(None, (self.facts.gloo_address, self.facts.address, self.seen))))

    def answer(self, message: Mapping[str, Any], limit: float = ANSWER_SECONDS) -> dict[str, Any] | None:
        """Its answer; None, and it is lost, if there is none."""
        if self.lost:
            return None
        try:
            return self.ask(message, limit)
        except OSError as error:
            self.lost = f"no answer within {limit:.0f} s" if isinstance(error, TimeoutError) else str(error)
            return None

    def read(self, cls: type[Any], values: Any) -> Any:
        """An answer as what it has to be; None, and it is lost, if it is something else."""
        if values is None:
            return None
        try:
            return read(cls, values)
        except StrangerError as error:
            self.lost = str(error)
            return None


@dataclass
class Survey:
    """All that was found.

    Attributes:
        seats: the first machine, and then the others. states: of ports, by who connects to whom, address and port.
        rates: by sender and receiver. stalled: why a direction was not measured, likewise.
        strangers: who else connected to the first machine, and what it did. alone: why this machine met nobody.
    """

    settings: DoctorSettings
    seats: list[Seat]
    states: dict[tuple[int, int], dict[tuple[str, int], str]] = field(default_factory=dict)
    rates: dict[tuple[int, int], Rate] = field(default_factory=dict)
    stalled: dict[tuple[int, int], str] = field(default_factory=dict)
    strangers: dict[str, str] = field(default_factory=dict)
    alone: str = ""

    def ask_all(self, say: Callable[[str], None]) -> None:
        """Ask for everything; `say` tells the user what comes now."""
        if len(self.seats) > 1:
            say("checks clocks and ports")
            for seat in self.seats[1:]:
                seat.clock_ms = _clock(seat)
            self._knock()
            say("measures links")
            for pair in permutations(range(len(self.seats)), 2):
                self._measure(*pair)
        say("measures compute and coding, which takes minutes the first time on a machine")
        for _ in range(2):  # the first time compiles kernels; the second time all compute at once, as in training
            answers = _all(self.seats, [{"do": "speed"}] * len(self.seats), _SPEED_SECONDS)
        for seat, values in zip(self.seats, answers, strict=True):
            seat.speed = seat.read(Speed, values) or Speed(problem="it gave none")

    def _knock(self) -> None:
        """Have all machines connect to all others."""
        index_of = {seat.facts.id: index for index, seat in enumerate(self.seats)}
        doors = [{"id": s.facts.id, "addresses": s.addresses, "ports": s.facts.ports} for s in self.seats]
        asked = [{"do": "knock", "doors": [d for d in doors if d["id"] != s.facts.id]} for s in self.seats]
        answers = _all(self.seats, asked, ANSWER_SECONDS + 5.0 * len(self.seats))
        for number, (seat, answer) in enumerate(zip(self.seats, answers, strict=True)):
            reached = seat.read(Reached, answer)
            for id, address, port, state in reached.found if reached else ():
                if id in index_of:
                    self.states.setdefault((number, index_of[id]), {})[address, port] = state

    def _measure(self, sender: int, receiver: int) -> None:
        """Measure a direction, over a port that is open for either machine."""
        for caller, called in ((sender, receiver), (receiver, sender)):
            places = [place for place, state in self.states.get((caller, called), {}).items() if state == OPEN]
            if called == 0:
                places.append(self.settings.place)
            if places:
                asked = {
                    "do": "measure", "id": self.seats[called].facts.id, "address": places[0][0], "port": places[0][1],
                    "seconds": self.settings.seconds, "pull": caller == receiver,
                }  # fmt: skip
                seat = self.seats[caller]
                answer = seat.answer(asked, 4 * ANSWER_SECONDS + self.settings.seconds)
                if answer and "problem" in answer:
                    self.stalled[sender, receiver] = str(answer["problem"])
                elif rate := seat.read(Rate, answer):
                    self.rates[sender, receiver] = rate
                return


def _all(seats: Sequence[Seat], messages: Sequence[Mapping[str, Any]], limit: float) -> list[dict[str, Any] | None]:
    """The answers of machines that work at the same time."""
    with ThreadPoolExecutor(len(seats)) as pool:
        return list(pool.map(lambda seat, message: seat.answer(message, limit), seats, messages))


def tell(survey: Survey, rows: Sequence[Mapping[str, Any]]) -> None:
    """Send the outcome to all machines that are still there."""
    for seat in survey.seats[1:]:
        if not seat.lost:
            with contextlib.suppress(OSError):
                seat.ask({"rows": list(rows)}, 0.001)  # nothing follows


def _clock(seat: Seat) -> float | None:
    """Milliseconds by which a clock is ahead, by the exchange that took the shortest."""
    found: list[tuple[float, float]] = []
    for _ in range(_CLOCK_ROUNDS):
        begin = now()
        there = (seat.answer({"do": "clock"}) or {}).get("time")
        end = now()
        if isinstance(there, float) and math.isfinite(there):
            found.append((end - begin, 1e3 * (there - (begin + end) / 2)))
    return min(found)[1] if found else None
