"""Tests ports as Gloo uses them: each machine listens at some, and the others connect to them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

OPEN, DROPPED, REFUSED, UNREACHABLE, OTHER = "open", "dropped", "refused", "unreachable", "other"
"""Results of connecting to a port: the expected machine, no answer, refused, no route, another program or machine."""
_PORTS = 8
_CONNECT_SECONDS = 4.0  # in which a lost first packet is sent again twice
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
        self._word = ""
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
        self._word = word
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close the ports."""
        self._ended = True
        for listener in self._listeners:
            listener.close()

    def _accept(self) -> None:
        while not self._ended:
            for key, _ in self._selector.select(0.2):
                with contextlib.suppress(OSError, ValueError):
                    connection, (address, *_) = key.fileobj.accept()  # pyright: ignore
                    with connection:
                        connection.setblocking(False)  # the answer fits into the buffer of a new connection
                        connection.sendall(f"{self._word} {address}\n".encode())


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
        with socket.create_connection(place, timeout=_CONNECT_SECONDS) as connection:
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
