"""Counts what a TCP connection carries: ``python probe.py receive|send ADDRESS PORT SECONDS``.

A program of its own, standard library only, because both ends must run inside the namespaces.
The receiver prints the goodput in Mbit/s. It leaves out the first 0.3 seconds, in which the link's
burst and the socket buffers fill and would make a slow link look faster than it is.
"""

import socket
import sys
import time

_SETTLE_SECONDS = 0.3
_CHUNK_BYTES = 1 << 16


def send(address: str, port: int, seconds: float) -> None:
    """Connect, retrying while the receiver is still starting, and send for ``seconds``."""
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=10)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    chunk, end = bytes(_CHUNK_BYTES), time.monotonic() + seconds
    with connection:
        while time.monotonic() < end:
            connection.sendall(chunk)


def receive(address: str, port: int, seconds: float) -> float:
    """Goodput in Mbit/s of the one connection that comes in and lasts about ``seconds``."""
    with socket.create_server((address, port)) as server:
        server.settimeout(10)
        connection, _ = server.accept()
    buffer = bytearray(1 << 20)
    start = time.monotonic() + _SETTLE_SECONDS
    stop = start + seconds - _SETTLE_SECONDS
    counted, began, ended = 0, start, start
    with connection:
        connection.settimeout(seconds + 10)
        while n := connection.recv_into(buffer):
            now = time.monotonic()
            if now < start:
                began = now
            elif now <= stop:
                counted, ended = counted + n, now
    return counted * 8e-6 / max(ended - began, 1e-9)


def main() -> None:
    """Parse the four arguments and run the end they name."""
    end, address, port, seconds = sys.argv[1:5]
    if end == "send":
        send(address, int(port), float(seconds))
    else:
        print(receive(address, int(port), float(seconds)), flush=True)


if __name__ == "__main__":
    main()
