"""Surveys the machines together: facts, ports, links and speeds. All machines end with the same survey."""

import contextlib
import os
import selectors
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import combinations
from time import time_ns

from torch._C._distributed_c10d import PrefixStore, ProcessGroup

from lowbit.escape import one_line
from lowbit.wire.checksum import run_secret, signature
from lowbit.wire.connections import FASTER, Segments, congestion_control, connect_more, segments, set_congestion_control
from lowbit.wire.errors import PeerError
from lowbit.wire.messages import Messages, gather_json, round_trip, send_rate, take_rate
from lowbit.wire.pytorch import new_group
from lowbit_run.config import NonNegative
from lowbit_run.doctor.facts import Facts, Number, Share, Speed, Text, facts, message, read, speed
from lowbit_run.doctor.meeting import FirstMachineError, Meeting, say
from lowbit_run.doctor.settings import DoctorSettings
from lowbit_run.job.process_group import MeetingError, connect, joined

_EXCHANGE_SECONDS = 60.0
_CONNECT_SECONDS = 20.0
_WATCH_SECONDS = 60.0  # in which a machine that is gone is noticed
_MESSAGE_SECONDS = 30.0  # for a message of a probe to arrive
# Round trips that a link is measured for, in which TCP comes to the rate that losses leave; but at most these seconds.
_FAR_TRIPS, _FAR_SECONDS = 100, 6.0
_CONNECTIONS = 16  # that `lowbit train` tries where BBR is not permitted
_SPEED_SECONDS = 1200.0  # the first call of a format compiles it


@message
class ProbeResults:
    """Results of connecting to the ports of the other machines: machine, address, port, and state.

    Attributes:
        seen: source addresses of this machine's connections, as the others saw them.
    """

    states: tuple[tuple[int, Text, int, Text], ...]
    seen: tuple[Text, ...] = ()


@message
class Joined:
    """Whether a machine joined the process group. problem: why it did not."""

    problem: Text = ""


@message
class Measured:
    """Measurements of the link from this machine to another one.

    Attributes:
        ahead_ms: how far this machine's clock is ahead of the other one's.
        loss: share of TCP segments that were sent again; again: their number.
        control: congestion control of its connections, such as "cubic".
        better_mbit, better_loss: measured once more because segments were sent again, in another `way`: with BBR
            where all machines permit it, otherwise over several connections. permitted: whether this machine does.
    """

    mbit: Number = 0.0
    rtt_ms: Number = 0.0
    ahead_ms: float = 0.0
    loss: Share | None = None
    again: NonNegative = 0
    control: Text = ""
    better_mbit: Number = 0.0
    better_loss: Share = 0.0
    way: Text = ""
    permitted: bool = True


@dataclass
class SurveyedMachine:
    """A machine of the meeting.

    Attributes:
        clock_ms: how far its clock is ahead of the first machine's.
        seen: source addresses of its connections. reached: its addresses that another machine reached.
        shared_name: the name that it gave itself, if an earlier machine has the same.
    """

    facts: Facts
    clock_ms: float | None = None
    seen: set[str] = field(default_factory=set)
    reached: set[str] = field(default_factory=set)
    speed: Speed = field(default_factory=Speed)
    shared_name: str = ""


@dataclass
class MachineSurvey:
    """Everything that the machines have found out.

    Attributes:
        machines: by rank. states: of ports, by (caller, called), then by (address, port).
        links: measurements, by (sender, receiver). problems: why machines did not join the process group.
        strangers: names of machines that do not know the secret. alone: why this machine met no other.
        left: rank that left before the end (-1: unknown), and how. stalled: (sender, receiver) whose messages stall.
        first: whether this is the first machine.
    """

    settings: DoctorSettings
    machines: dict[int, SurveyedMachine]
    states: dict[tuple[int, int], dict[tuple[str, int], str]] = field(default_factory=dict)
    links: dict[tuple[int, int], Measured] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)
    alone: str = ""
    left: tuple[int, str] | None = None
    stalled: tuple[int, int] | None = None
    first: bool = False


def take(settings: DoctorSettings) -> MachineSurvey:
    """Meet the other machines and survey them.

    Raises:
        ConnectionError: the machines cannot meet there.
    """
    own = facts(settings)
    ports = Ports(own.port_low, own.port_high)
    own = replace(own, ports=ports.numbers)
    survey = MachineSurvey(settings, {0: SurveyedMachine(own)})
    try:
        meeting = Meeting(settings, own.name)
        survey.first, survey.strangers = meeting.rank == 0, meeting.strangers
        if not meeting.strangers:
            ports.answer(_word(meeting, meeting.rank))
            _ask(survey, meeting, own)
        meeting.close()
    except FirstMachineError as error:
        survey.alone, survey.machines, survey.links = str(error), {0: SurveyedMachine(own)}, {}
    finally:
        ports.close()
    return survey


def _ask(survey: MachineSurvey, meeting: Meeting, own: Facts) -> None:
    survey.machines = _named(meeting.exchange(own, _EXCHANGE_SECONDS))
    if 0 not in survey.machines:
        raise FirstMachineError("the first machine is gone: it did not state anything about itself")
    if meeting.ranks == 1:
        survey.machines[0].speed = speed(survey.settings)
        return
    say("checking ports")
    _probe_ports(survey, meeting)
    say("joining the process group")
    if not os.environ.get("GLOO_SOCKET_IFNAME") and own.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = own.interface
    problem, store = "", PrefixStore("group", meeting.store)
    try:
        connect("gloo", store, meeting.rank, meeting.ranks, timedelta(seconds=_CONNECT_SECONDS))
    except MeetingError as error:
        problem = str(error)
    group = meeting.exchange(Joined(problem=problem), _CONNECT_SECONDS + _EXCHANGE_SECONDS)
    survey.problems = {rank: group[rank].problem for rank in survey.machines if rank in group and group[rank].problem}
    if survey.problems or len(group) < meeting.ranks or len(survey.machines) < meeting.ranks:
        return
    try:
        with joined(_WATCH_SECONDS):
            # A group with a longer time limit: here machines wait for each other longer than the first group allows.
            side = new_group(timeout=_SPEED_SECONDS)
            _measure_links(survey, side)
            say("measuring compute and coding, which takes minutes the first time on a machine")
            for _ in range(2):  # the first time compiles kernels; then all compute at once, as in training
                measured = speed(survey.settings)
                for rank, values in enumerate(gather_json(vars(measured), side)):
                    survey.machines[rank].speed = read(Speed, values)
    except (RuntimeError, TimeoutError) as error:
        survey.left = getattr(error, "rank", -1), one_line(str(error))


def _named(facts: dict[int, Facts]) -> dict[int, SurveyedMachine]:
    """The machines; those with the same name get numbers."""
    machines: dict[int, SurveyedMachine] = {}
    for rank, own in sorted(facts.items()):
        taken = {machine.facts.name for machine in machines.values()}
        name = next(each for each in (own.name, *(f"{own.name}-{i}" for i in range(2, 99))) if each not in taken)
        shared = own.name if name != own.name else ""
        machines[rank] = SurveyedMachine(replace(own, name=name), shared_name=shared)
    return machines


def _probe_ports(survey: MachineSurvey, meeting: Meeting) -> None:
    places = [
        (rank, address, port)
        for rank, machine in survey.machines.items() if rank != meeting.rank
        for address in machine.facts.addresses for port in machine.facts.ports
    ]  # fmt: skip
    states, sources = probe(places, {rank: _word(meeting, rank) for rank in survey.machines})
    by_place = tuple((*place, state) for place, state in zip(places, states, strict=True))
    results = ProbeResults(states=by_place, seen=tuple(sources))
    for caller, found in meeting.exchange(results, _EXCHANGE_SECONDS + 5.0 * meeting.ranks).items():
        if caller not in survey.machines:  # it stated the facts too late
            continue
        survey.machines[caller].seen.update(found.seen)
        for called, address, port, state in found.states:
            if called in survey.machines:
                survey.states.setdefault((caller, called), {})[address, port] = state
                survey.machines[called].reached.update({address} if state == OPEN else ())


def _word(meeting: Meeting, rank: int) -> str:
    """The word that a machine's ports answer with."""
    return signature(run_secret(), meeting.attempt, "port", rank)


def _measure_links(survey: MachineSurvey, side: ProcessGroup | None) -> None:
    """Measure each pair's link in turn; those that lose packets once more, as `lowbit train` would then use them."""
    say("measuring clocks and links")
    messages = Messages(None, "doctor", timeout=_MESSAGE_SECONDS)

    def measured(pair: tuple[int, int]) -> list[Measured]:
        own = _measure(survey, messages, pair) if messages.rank in pair else Measured()
        return [read(Measured, each) for each in gather_json(vars(own), side)]

    pairs = [*combinations(range(messages.ranks), 2)]
    for pair in pairs:
        found = measured(pair)
        survey.links.update({(a, b): found[a] for a, b in (pair, pair[::-1])})
        if pair[0] == 0:
            survey.machines[pair[1]].clock_ms = found[pair[1]].ahead_ms
    pairs = [pair for pair in pairs if survey.links[pair].again or survey.links[pair[1], pair[0]].again]
    if not pairs:
        return
    say("measuring links that lost packets once more, with BBR or several connections")
    permitted = [each is True for each in gather_json(set_congestion_control(FASTER), side)]
    way = FASTER.upper()
    if not all(permitted):
        way = f"{_CONNECTIONS} connections"
        connect_more(None, _CONNECTIONS)
    for pair in pairs:
        again = measured(pair)
        for a, b in (pair, pair[::-1]):
            better = {"better_mbit": again[a].mbit, "better_loss": again[a].loss or 0.0, "way": way}
            survey.links[a, b] = replace(survey.links[a, b], **better, permitted=permitted[a])


def _measure(survey: MachineSurvey, messages: Messages, pair: tuple[int, int]) -> Measured:
    direction = pair
    try:
        trip = round_trip(messages, pair[0] + pair[1] - messages.rank, time_ns)
        seconds = max(survey.settings.seconds, min(_FAR_SECONDS, _FAR_TRIPS * trip.seconds))
        mbit, before, after = 0.0, Segments(0, 0), Segments(0, 0)
        for direction in (pair, (pair[1], pair[0])):
            if messages.rank == direction[1]:
                take_rate(messages, direction[0])
            else:
                before = segments()
                mbit = send_rate(messages, direction[1], trip=trip.seconds, seconds=seconds)
                after = segments()
    except PeerError as error:
        if "did not answer" in str(error):
            survey.stalled = direction
        raise
    ahead = -trip.offset if messages.rank == pair[1] else trip.offset
    return Measured(
        mbit=mbit, rtt_ms=1e3 * trip.seconds, ahead_ms=ahead / 1e6, control=congestion_control(),
        loss=min(1.0, after.since(before)), again=max(0, after.again - before.again),
    )  # fmt: skip


OPEN, DROPPED, REFUSED, UNREACHABLE, OTHER = "open", "dropped", "refused", "unreachable", "other"
"""Results of connecting to a port: the expected machine, no answer, refused, no route, another program or machine."""
WORDS = {
    DROPPED: "nothing answers: packets are dropped",
    REFUSED: "connections are refused",
    UNREACHABLE: "it cannot be reached",
    OTHER: "another machine or program answers",
}
_PORTS = 8
_PORT_SECONDS = 4.0  # in which a lost first packet is sent again twice
_ANSWER_SECONDS = 5.0
_MOST_BYTES = 200  # of an answer
_AT_ONCE = 64


class Ports:
    """Listens at some of the ports that the system assigns, and answers every connection.

    It reads nothing that the other end sends. An answer is the machine's word and the connection's source address.

    Args:
        low, high: range of ports to choose from.

    Attributes:
        numbers: the chosen ports.
    """

    def __init__(self, low: int, high: int) -> None:

        self._selector = selectors.DefaultSelector()
        self._ended = False
        self._listeners: list[socket.socket] = []
        step = max(1, (high - low) // (_PORTS - 1))
        for wanted in (*range(low, high, step), high):
            for port in range(wanted, min(wanted + 20, high + 1)):
                with contextlib.suppress(OSError):
                    self._listeners.append(socket.create_server(("", port), backlog=64))
                    self._selector.register(self._listeners[-1], selectors.EVENT_READ)
                    break
        self.numbers = tuple(sorted({each.getsockname()[1] for each in self._listeners}))

    def answer(self, word: str) -> None:
        """Answer with this word, which the others know, from now on."""

        def accept() -> None:
            while not self._ended:
                for key, _ in self._selector.select(0.2):
                    with contextlib.suppress(OSError, ValueError):
                        connection, (address, *_) = key.fileobj.accept()  # pyright: ignore
                        with connection:
                            connection.setblocking(False)  # the answer fits into the buffer of a new connection
                            connection.sendall(f"{word} {address}\n".encode())

        threading.Thread(target=accept, daemon=True).start()

    def close(self) -> None:
        """Close the ports."""
        self._ended = True
        for listener in self._listeners:
            listener.close()


def probe(places: list[tuple[int, str, int]], words: dict[int, str]) -> tuple[list[str], set[str]]:
    """Connect to each place (machine, address, port); return its state, and the source addresses that the others saw.

    `words`: the expected answer of each machine.
    """
    seen: set[str] = set()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        states = pool.map(lambda place: _state(place[1:], words[place[0]], seen), places)
        return list(states), seen


def _state(place: tuple[str, int], word: str, seen: set[str]) -> str:
    try:
        with socket.create_connection(place, timeout=_PORT_SECONDS) as connection:
            answer, deadline = b"", time.monotonic() + _ANSWER_SECONDS
            with contextlib.suppress(OSError):
                while not answer.endswith(b"\n") and len(answer) < _MOST_BYTES:
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
                    if not (part := connection.recv(_MOST_BYTES)):
                        break
                    answer += part
    except TimeoutError:
        return DROPPED
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return UNREACHABLE
    received, _, address = answer.decode(errors="replace").strip().partition(" ")
    if received != word:
        return OTHER
    seen.add(address)
    return OPEN
