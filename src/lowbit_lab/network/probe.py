"""Measures a TCP connection.

This is a program of its own that needs the standard library only, because both ends must run inside the namespaces.

``python probe.py receive|send ADDRESS PORT SETTLE SECONDS``: the receiver prints the goodput in Mbit/s. It leaves out
the first SETTLE seconds, in which the link's burst and the socket buffers fill, so that a slow link looks faster than
it is, and TCP has not yet reached the rate of a distant link.

``python probe.py echo|ping ADDRESS PORT``: ``ping`` prints the median round trip of a byte in milliseconds.
"""

import socket
import statistics
import sys
import time

_CHUNK_BYTES = 1 << 16
_PINGS = 9
_PATIENCE = 20.0


def connect(address: str, port: int) -> socket.socket:
    """Connect, retrying while the other end is still starting."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_connection((address, port), timeout=_PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def accept(address: str, port: int) -> socket.socket:
    """Accept one connection."""
    with socket.create_server((address, port)) as server:
        server.settimeout(_PATIENCE)
        connection, _ = server.accept()
    connection.settimeout(_PATIENCE)
    return connection


def send(address: str, port: int, seconds: float) -> None:
    """Send zeros for some seconds."""
    with connect(address, port) as connection:
        chunk, end = bytes(_CHUNK_BYTES), time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(chunk)


def receive(address: str, port: int, settle: float, seconds: float) -> float:
    """Measure Mbit/s of one connection on which the other end sends, from ``settle`` to ``seconds``."""
    buffer = bytearray(1 << 20)
    with accept(address, port) as connection:
        start = time.monotonic() + settle
        stop = start + seconds - settle
        nbytes, began, ended = 0, start, start
        while (n := connection.recv_into(buffer)) and (now := time.monotonic()) < stop + _PATIENCE:
            if now < start:
                began = now
            elif now <= stop:
                nbytes, ended = nbytes + n, now
    return nbytes * 8e-6 / max(ended - began, 1e-9)


def echo(address: str, port: int) -> None:
    """Send every byte back, until the other end is done."""
    with accept(address, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(1):
            connection.sendall(data)


def ping(address: str, port: int) -> float:
    """Measure the median milliseconds until a byte comes back."""
    times = []
    with connect(address, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            begin = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(1e3 * (time.monotonic() - begin))
    return statistics.median(times)


def main() -> None:
    """Parse the arguments, and run the end that they name.

    Raises:
        SystemExit: with a line of usage, or the reason why the other end cannot be reached.
    """
    end, address, port, *seconds = [*sys.argv[1:], "", "", ""]
    if (end, len(sys.argv)) not in [("send", 6), ("receive", 6), ("echo", 4), ("ping", 4)]:
        sys.exit("usage: probe.py receive|send ADDRESS PORT SETTLE SECONDS, or echo|ping ADDRESS PORT")
    settle, whole = map(float, seconds[:2] if len(sys.argv) == 6 else (0, 0))
    try:
        if end == "send":
            send(address, int(port), whole)
        elif end == "receive":
            print(f"{receive(address, int(port), settle, whole):.4g}", flush=True)
        elif end == "echo":
            echo(address, int(port))
        else:
            print(f"{ping(address, int(port)):.4g}", flush=True)
    except OSError as error:
        sys.exit(f"error: {end} {address}:{port}: {error.strerror or error}")


if __name__ == "__main__":
    main()
