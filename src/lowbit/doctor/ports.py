"""Ports as Gloo takes them, and what passes through them: each machine listens, and the others connect."""

from __future__ import annotations

import contextlib
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lowbit.doctor.channel import Channel, SecretError, StrangerError
from lowbit.doctor.messages import Door, Measure, Rate
from lowbit_lab.network import probe

OPEN, DROPPED, REFUSED, UNREACHABLE, OTHER = "open", "dropped", "refused", "unreachable", "other"
"""What connecting to a port gives: a machine of the meeting; nothing; a refusal; no way; another program or machine."""
_PORTS = 8
_CONNECT_SECONDS = 4.0  # in which a lost first packet is sent again twice
_COMMAND_SECONDS = 5.0
_SETTLE_SECONDS, _SETTLE_ROUND_TRIPS = 0.3, 20  # until TCP has reached the rate of the link
_MOST_SECONDS = 150.0
_STALLED_SECONDS = 10.0
_MOST_CALLERS, _AT_ONCE = 1024, 64  # connections that are served; that are opened
_RETRANSMITTED, _SEGMENTS = 100, 136  # places of tcpi_total_retrans and tcpi_segs_out in Linux's tcp_info
Join = Callable[[Channel, dict[str, Any]], None]


class Ports:
    """Listens at some of the ports that the system gives to programs, and serves what machines measure there.

    Args:
        id: of this machine. secret: of the run. low, high: the ports to choose from.

    Attributes:
        numbers: the ports. strangers: who sent something else, and what was wrong, by address.
        joins: called with a machine that joins; only the first machine has it.
    """

    def __init__(self, id: str, secret: bytes, low: int, high: int) -> None:
        self.id, self.secret = id, secret
        self.joins: Join | None = None
        self.strangers: dict[str, str] = {}
        self._callers = threading.BoundedSemaphore(_MOST_CALLERS)
        self._selector = selectors.DefaultSelector()
        self._ended = False
        self._listeners: list[socket.socket] = []
        step = max(1, (high - low) // (_PORTS - 1))
        for wanted in (*range(low, high, step), high):
            self._listen_near(wanted, high)
        self.numbers = tuple(sorted({each.getsockname()[1] for each in self._listeners}))
        threading.Thread(target=self._accept, daemon=True).start()

    def listen(self, address: str, port: int) -> None:
        """Listen at one more place.

        Raises:
            OSError: it is taken.
        """
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(64)
        except OSError:
            listener.close()
            raise
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Close the ports."""
        self._ended = True
        for listener in self._listeners:
            listener.close()

    def _listen_near(self, wanted: int, high: int) -> None:
        for port in range(wanted, min(wanted + 20, high + 1)):
            with contextlib.suppress(OSError):
                return self.listen("", port)

    def _accept(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(0.2):
                with contextlib.suppress(OSError, ValueError):
                    connection, (address, *_) = key.fileobj.accept()  # pyright: ignore
                    if self._callers.acquire(blocking=False):
                        threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()
                    else:
                        connection.close()

    def _serve(self, connection: socket.socket, address: str) -> None:
        kept = False
        try:
            channel = Channel(connection, accepted=True, secret=self.secret)
            try:
                message = channel.receive(_COMMAND_SECONDS)
            except SecretError:
                channel.send({})  # which does not fit the other end's secret either
                raise
            if message.get("do") == "join" and self.joins is not None:
                self.joins(channel, message)
                kept = True
            else:
                channel.send({"id": self.id})
                _obey(channel, message)
        except (StrangerError, SecretError) as error:
            if len(self.strangers) < _MOST_CALLERS:
                self.strangers[address] = str(error)
        except TimeoutError:
            self.strangers.setdefault(address, "it connected and said nothing")
        except OSError:
            pass  # it has gone
        finally:
            self._callers.release()
            if not kept:
                connection.close()


def knock(doors: Sequence[Door], secret: bytes) -> tuple[tuple[str, str, int, str], ...]:
    """What connecting to each port of other machines gives: machine, address, port and state."""
    places = [(each.id, address, port) for each in doors for address in each.addresses for port in each.ports]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda place: _state((place[1], place[2]), place[0], secret), places)
        return tuple((*place, state) for place, state in zip(places, found, strict=True))


def measure(asked: Measure, secret: bytes) -> Rate:
    """Measure a direction.

    Raises:
        OSError: the other machine is gone, another one is there, or nothing passes.
    """
    place, id, pull, seconds = (asked.address, asked.port), asked.id, asked.pull, asked.seconds
    with _called(place, id, secret, {"do": "echo"}) as channel:
        trips = probe.round_trips(channel.connection)
    settle = min(_SETTLE_SECONDS + _SETTLE_ROUND_TRIPS * statistics.median(trips) / 1e3, _MOST_SECONDS / 3)
    times = {"settle": settle, "seconds": settle + seconds}
    with _called(place, id, secret, {"do": "give" if pull else "take", **times}) as channel:
        channel.connection.settimeout(settle + seconds + _STALLED_SECONDS)
        # What is still queued at the end would take long on a slow link: closing throws it away.
        channel.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if pull:
            return Rate(mbit=probe.drain(channel.connection, **times, to_end=False), rtt_ms=statistics.median(trips))
        probe.fill(channel.connection, times["seconds"])
        loss = _loss(channel.connection)
        channel.connection.shutdown(socket.SHUT_WR)
        mbit = channel.receive(_STALLED_SECONDS).get("mbit")
        if not isinstance(mbit, float) or not mbit >= 0:
            raise StrangerError("it sent a rate that is none")
        return Rate(mbit=mbit, rtt_ms=statistics.median(trips), loss=loss)


def _state(place: tuple[str, int], id: str, secret: bytes) -> str:
    try:
        connection = socket.create_connection(place, timeout=_CONNECT_SECONDS)
    except TimeoutError:
        return DROPPED
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return UNREACHABLE
    try:
        with connection:
            _check_id(Channel(connection, accepted=False, secret=secret), id, {"do": "nothing"})
    except OSError:
        return OTHER
    return OPEN


@contextlib.contextmanager
def _called(place: tuple[str, int], id: str, secret: bytes, message: dict[str, Any]) -> Iterator[Channel]:
    with socket.create_connection(place, timeout=_CONNECT_SECONDS) as connection:
        channel = Channel(connection, accepted=False, secret=secret)
        _check_id(channel, id, message)
        yield channel


def _check_id(channel: Channel, id: str, message: dict[str, Any]) -> None:
    channel.send(message)
    if channel.receive(_COMMAND_SECONDS).get("id") != id:
        raise StrangerError("another machine has this address")


def _obey(channel: Channel, message: dict[str, Any]) -> None:
    """Do the other end's part of a measurement."""
    connection = channel.connection
    settle, seconds = (message.get(name) for name in ("settle", "seconds"))
    numbers = isinstance(settle, float) and isinstance(seconds, float) and 0 <= settle < seconds <= _MOST_SECONDS
    connection.settimeout(seconds + _STALLED_SECONDS if numbers else _COMMAND_SECONDS)  # pyright: ignore
    match message.get("do"):
        case "echo":
            deadline = time.monotonic() + _MOST_SECONDS
            while time.monotonic() < deadline and (data := connection.recv(1)):
                connection.sendall(data)
        case "take" if numbers:
            channel.send({"mbit": probe.drain(connection, settle, seconds, to_end=False)})  # pyright: ignore
            deadline = time.monotonic() + _STALLED_SECONDS
            while time.monotonic() < deadline and connection.recv(1 << 16):  # else the answer would be lost
                pass
        case "give" if numbers:
            probe.fill(connection, seconds)  # pyright: ignore


def _loss(connection: socket.socket) -> float | None:
    """The share of segments that this end has sent again."""
    with contextlib.suppress(OSError, AttributeError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        again, all_of_them = (struct.unpack_from("=I", info, place)[0] for place in (_RETRANSMITTED, _SEGMENTS))
        return min(1.0, again / max(1, all_of_them))
    return None
