"""What this process's TCP connections lose, and how they control congestion."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowbit.wire import connections
from lowbit.wire.connections import Segments, congestion_control, ends, is_lossy, segments, set_congestion_control

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection between two addresses, as between two machines, and one within an address."""
    with socket.socket() as listener, socket.socket() as caller:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        caller.bind(("127.0.0.2", 0))
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()
            caller.connect(listener.getsockname())
            with listener.accept()[0] as called:
                yield caller, called


def test_segments_of_connections_to_other_addresses_are_counted(pair: tuple[socket.socket, socket.socket]):
    before = segments()
    for _ in range(20):
        pair[0].sendall(bytes(1000))
        pair[1].recv(1000)
    sent, again = segments()
    assert 1 <= sent - before.sent <= 20
    assert again - before.again <= 1


@pytest.mark.parametrize(("known", "again"), [(220, 3), (192, 10)])
def test_segments_that_arrived_twice_were_not_lost(monkeypatch: pytest.MonkeyPatch, known: int, again: int):
    info = bytearray(220)
    for offset, value in ((100, 10), (156, 5000), (216, 7)):
        struct.pack_into("I", info, offset, value)
    monkeypatch.setattr(
        connections, "_connections", lambda: [SimpleNamespace(getsockopt=lambda *_: bytes(info[:known]))]
    )
    assert segments() == (5000, again)


def test_congestion_control_is_that_of_the_connection_and_can_be_changed(pair: tuple[socket.socket, socket.socket]):
    allowed = ALLOWED.read_text().split()
    for name in allowed:
        assert set_congestion_control(name)
        assert congestion_control() == name
        assert pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode() == name
    assert not set_congestion_control("nosuch")
    assert congestion_control() == allowed[-1]


def test_connections_that_no_other_process_names_are_left_alone(pair: tuple[socket.socket, socket.socket]):
    (here, there), *_ = ends()
    first, *_, last = ALLOWED.read_text().split()
    assert set_congestion_control(first)
    assert not set_congestion_control(last, [["127.0.0.2 1", "127.0.0.1 1"]])
    assert congestion_control() == first
    assert set_congestion_control(last, [[there, here]])
    assert congestion_control() == last


def test_looking_leaves_the_connections_and_no_file_open(pair: tuple[socket.socket, socket.socket]):
    before = os.listdir("/proc/self/fd")
    assert segments().sent >= 0
    assert congestion_control()
    assert not set_congestion_control("nosuch")
    assert os.listdir("/proc/self/fd") == before
    pair[0].sendall(b"there")
    assert pair[1].recv(9) == b"there"


def test_without_connections_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "_connections", lambda: iter(()))
    assert (segments(), congestion_control(), set_congestion_control("cubic")) == ((0, 0), "", False)


@pytest.mark.parametrize(
    ("sent", "again", "lossy"),
    [(0, 0, False), (11_000, 3, False), (20_000, 10, True), (1_000_000, 49, False), (1_000_000, 50, True)],
)
def test_a_few_segments_sent_again_mean_nothing(sent: int, again: int, lossy: bool):
    now = Segments(500 + sent, 7 + again)
    assert is_lossy(now.since(Segments(500, 7)), again) == lossy
