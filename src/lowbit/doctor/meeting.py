"""The machines meet: the one that owns the address listens there, and the others connect."""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowbit.doctor import ports as doors
from lowbit.doctor.channel import Channel, SecretError, StrangerError, read
from lowbit.doctor.facts import facts, now
from lowbit.doctor.messages import Doors, Facts, Measure
from lowbit.doctor.ports import Ports
from lowbit.doctor.settings import DoctorSettings
from lowbit.doctor.speed import speed
from lowbit.doctor.survey import ANSWER_SECONDS, Seat, Survey
from lowbit.wire.checksum import SECRET, run_secret

_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 3600.0  # while other machines measure; keepalive notices one that vanishes
_TRY_AGAIN_SECONDS = 0.5
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class DoctorError(ConnectionError):
    """The machines cannot meet there at all."""


class Here:
    """This machine: its facts, its ports, and its answers."""

    def __init__(self, settings: DoctorSettings) -> None:
        self.settings, self.secret = settings, run_secret()
        own = facts(settings)
        self.ports = Ports(own.id, self.secret, own.port_low, own.port_high)
        self.facts = replace(own, ports=self.ports.numbers)

    def answer(self, message: Mapping[str, Any], _: float = 0.0) -> dict[str, Any]:
        """Do what the first machine asks for."""
        match message.get("do"):
            case "clock":
                return {"time": now()}
            case "knock":
                return {"found": doors.knock(read(Doors, message).doors, self.secret)}
            case "measure":
                try:
                    return vars(doors.measure(read(Measure, message), self.secret))
                except OSError as error:
                    return {"problem": f"{type(error).__name__}: {error}"}
            case "speed":
                return vars(speed(self.settings))
        raise StrangerError("it asked for something unknown")


def say(text: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"lowbit doctor: {text}\n")
    sys.stderr.flush()


def meet(settings: DoctorSettings) -> tuple[Survey | None, list[Any]]:
    """Meet the others: a survey on the first machine, and on a machine that met nobody; rows of it on the others.

    Raises:
        ConfigError: no place to meet. DoctorError: another program is there, or the secret differs.
    """
    host, port = settings.place
    here = Here(settings)
    try:
        if _is_own(host):
            misled = here.facts.meet_address.startswith("127.") and not host.startswith("127.")
            try:
                here.ports.listen("" if misled else host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # perhaps by the first of several on this machine
                    raise DoctorError(f"this machine cannot listen at {host}:{port}: {error.strerror}") from None
                return _follow(settings, here, taken=True)
            return _lead(settings, here), []
        return _follow(settings, here)
    finally:
        here.ports.close()


def _is_own(host: str) -> bool:
    """Whether an address is one of this machine's."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return True
    return False


def _lead(settings: DoctorSettings, here: Here) -> Survey:
    """Wait for the other machines, and ask all of them."""
    survey = Survey(settings, [Seat(here.facts, here.answer)])
    seats = survey.seats
    joined: queue.Queue[Seat] = queue.Queue()
    places = threading.Semaphore(settings.count - 1)

    def join(channel: Channel, message: dict[str, Any]) -> None:
        own = read(Facts, message.get("facts"))
        welcome = places.acquire(blocking=False)
        channel.send({"welcome": welcome})
        if not welcome:
            return channel.close()
        _keep_alive(channel.connection)

        def ask(message: Mapping[str, Any], limit: float) -> dict[str, Any]:
            channel.send(message, ANSWER_SECONDS)
            return channel.receive(limit)

        if here.facts.address.startswith("127."):  # the name of the meeting leads there
            seats[0].facts = replace(seats[0].facts, address=channel.connection.getsockname()[0])
        joined.put(Seat(own, ask, seen=channel.connection.getpeername()[0]))

    deadline = time.monotonic() + settings.wait
    here.ports.joins = join
    while (missing := settings.count - len(seats)) > 0 and (left := deadline - time.monotonic()) > 0:
        say(f"waits up to {left:.0f} s for {missing} more at {':'.join(map(str, settings.place))}")
        with contextlib.suppress(queue.Empty):
            seat = joined.get(timeout=left)
            taken, name = [each.facts.name for each in seats], seat.facts.name
            name = next(each for each in (name, *(f"{name}-{i}" for i in range(2, 99))) if each not in taken)
            seat.facts = replace(seat.facts, name=name)
            seats.append(seat)
    here.ports.joins = None
    survey.ask_all(say)
    survey.strangers = dict(here.ports.strangers)
    return survey


def _follow(settings: DoctorSettings, here: Here, *, taken: bool = False) -> tuple[Survey | None, list[Any]]:
    """Join the first machine, answer it, and return its rows; with `taken` at once or never."""
    alone = Survey(settings, [Seat(here.facts, here.answer)])
    where = ":".join(map(str, settings.place))
    deadline = time.monotonic() + settings.wait
    channel = None
    while channel is None:
        try:
            channel = _joined(settings, here, where)
        except OSError as error:
            if isinstance(error, DoctorError):
                raise
            if taken:
                raise DoctorError(f"{where} is taken by another program: {_why(error)}; allowed: a free port") from None
            if not alone.alone:
                say(f"waits up to {settings.wait:.0f} s for the first machine at {where}: {_why(error)}")
            alone.alone = _why(error)
            if time.monotonic() > deadline:
                return alone, []
            time.sleep(_TRY_AGAIN_SECONDS)
    say(f"has met the first machine at {where}, which now asks all machines")
    try:
        while True:
            message = channel.receive(_IDLE_SECONDS)
            if isinstance(rows := message.get("rows"), list):
                return None, rows
            channel.send(here.answer(message), ANSWER_SECONDS)
    except OSError as error:
        alone.alone = f"the first machine is gone: {error}"
        return alone, []
    finally:
        channel.close()


def _joined(settings: DoctorSettings, here: Here, where: str) -> Channel:
    """Connect to the first machine, and be accepted.

    Raises:
        DoctorError: trying again is of no use. OSError: it may be.
    """
    connection = socket.create_connection(settings.place, timeout=min(_CONNECT_SECONDS, settings.wait))
    try:
        channel = Channel(connection, accepted=False, secret=here.secret)
        channel.send({"do": "join", "facts": vars(here.facts)})
        welcome = channel.receive(ANSWER_SECONDS).get("welcome")
    except SecretError:
        raise DoctorError(
            f"the first machine, {where}, has another {SECRET} than this one; allowed: the same on all machines"
        ) from None
    except StrangerError as error:
        raise DoctorError(
            f"what answers at {where} is of no use: {error}; allowed: `lowbit doctor` of the same version, at a port "
            "that no other program has"
        ) from None
    if not welcome:
        raise DoctorError(f"the machines at {where} have met without this one; allowed: to start again on all machines")
    _keep_alive(connection)
    return channel


def _keep_alive(connection: socket.socket) -> None:
    """Notice a machine that vanishes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "nothing answers: a firewall drops it, or there is no such machine"
    if isinstance(error, ConnectionRefusedError):
        return "it is refused: nothing listens there, or a firewall forbids it"
    return error.strerror or str(error)
