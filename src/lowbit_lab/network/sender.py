"""Other traffic on a link: ``python sender.py ADDRESS PEER COUNT``.

This is a program of its own that needs the standard library only. It receives whatever others send to ADDRESS, and
sends as much as it can to PEER, over COUNT connections with CUBIC, whatever the rest of the machine uses. A connection
that breaks is opened again. It prints ``ok`` once all are open, and ends when its standard input ends.
"""

import contextlib
import os
import socket
import sys
import threading
import time

_PORT = 9  # "discard" (RFC 863); no program gets it by chance
_CHUNK_BYTES = 1 << 16
_PATIENCE = 20.0
_CONGESTION = b"cubic"


def receive(server: socket.socket) -> None:
    """Accept connections for ever, and read what comes."""
    while True:
        threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()


def drain(connection: socket.socket) -> None:
    """Read from a connection until it ends."""
    buffer = bytearray(_CHUNK_BYTES)
    with connection, contextlib.suppress(OSError):
        while connection.recv_into(buffer):
            pass


def dial(peer: str) -> socket.socket:
    """Connect, retrying while the peer is still starting."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            connection = socket.create_connection((peer, _PORT), _PATIENCE)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            connection.settimeout(None)
            # The route has set that of the link.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION)
            return connection


def send(peer: str, connection: socket.socket) -> None:
    """Send for ever."""
    chunk = bytes(_CHUNK_BYTES)
    while True:
        with connection, contextlib.suppress(OSError):
            while True:
                connection.sendall(chunk)
        while True:
            with contextlib.suppress(OSError):  # a link that is cut
                connection = dial(peer)
                break


def main() -> None:
    """Open the connections, and send until standard input ends."""
    address, peer, count = sys.argv[1:]
    try:
        server = socket.create_server((address, _PORT), backlog=64)
        threading.Thread(target=receive, args=(server,), daemon=True).start()
        connections = [dial(peer) for _ in range(int(count))]
    except OSError as error:
        sys.exit(f"{address} to {peer}, port {_PORT}: {error}")
    for connection in connections:
        threading.Thread(target=send, args=(peer, connection), daemon=True).start()
    print("ok", flush=True)
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
