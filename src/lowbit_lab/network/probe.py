"""Measures TCP connections, or is the other traffic on a link.

This is a program of its own that needs the standard library only, because both ends must run inside the namespaces.

``python probe.py receive|send ADDRESS PORT SETTLE SECONDS``: the receiver prints the goodput in Mbit/s. It leaves out
the first SETTLE seconds, in which the link's burst and the socket buffers fill, so that a slow link looks faster than
it is, and TCP has not yet reached the rate of a distant link.

``python probe.py echo|ping ADDRESS PORT``: ``ping`` prints the median round trip of a byte in milliseconds.

``python probe.py share ADDRESS PEER COUNT`` receives whatever others send to ADDRESS, and sends as much as it can to
PEER, over COUNT connections with CUBIC, whatever the rest of the machine uses. A connection that breaks is opened
again. It prints ``ok`` once all are open, and ends when its standard input ends.
"""

import contextlib
import os
import socket
import statistics
import sys
import threading
import time

_CHUNK_BYTES = 1 << 16
_DISCARD = 9  # the port of others' traffic (RFC 863); no program gets it by chance
_PINGS = 9
_PATIENCE = 20.0


def connect(address: str, port: int) -> socket.socket:
    """Connect, retrying while the other end is still starting."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_connection((address, port), timeout=_PATIENCE)
        except OSError:
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


def drain(connection: socket.socket) -> None:
    """Read from a connection until it ends."""
    buffer = bytearray(_CHUNK_BYTES)
    with connection, contextlib.suppress(OSError):
        while connection.recv_into(buffer):
            pass


def connect_to_share(peer: str) -> socket.socket:
    """Connect with CUBIC; the route has set the congestion control of the link."""
    connection = connect(peer, _DISCARD)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return connection


def keep_sending(peer: str, connection: socket.socket) -> None:
    """Send for ever."""
    chunk = bytes(_CHUNK_BYTES)
    while True:
        with contextlib.suppress(OSError), connection:
            while True:
                connection.sendall(chunk)
        with contextlib.suppress(OSError):  # a link that is cut
            connection = connect_to_share(peer)


def share(address: str, peer: str, count: int) -> None:
    """Open the connections, and send until standard input ends."""
    server = socket.create_server((address, _DISCARD), backlog=64)

    def receive() -> None:
        while True:
            threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=receive, daemon=True).start()
    for connection in [connect_to_share(peer) for _ in range(count)]:
        threading.Thread(target=keep_sending, args=(peer, connection), daemon=True).start()
    print("ok", flush=True)
    while os.read(0, 1):
        pass
    os._exit(0)


def main() -> None:
    """Parse the arguments, and run the end that they name.

    Raises:
        SystemExit: with a line of usage, or the reason why the other end cannot be reached.
    """
    try:
        match sys.argv[1:]:
            case ["send", address, port, _, seconds]:
                send(address, int(port), float(seconds))
            case ["receive", address, port, settle, seconds]:
                print(f"{receive(address, int(port), float(settle), float(seconds)):.4g}", flush=True)
            case ["echo", address, port]:
                echo(address, int(port))
            case ["ping", address, port]:
                print(f"{ping(address, int(port)):.4g}", flush=True)
            case ["share", address, peer, count]:
                share(address, peer, int(count))
            case _:
                sys.exit("usage: probe.py receive|send ADDRESS PORT SETTLE SECONDS, or echo|ping ADDRESS PORT")
    except OSError as error:
        sys.exit(f"error: {' '.join(sys.argv[1:3])}:{sys.argv[3]}: {error.strerror or error}")


if __name__ == "__main__":
    main()
