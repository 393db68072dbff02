"""What links between homes have: rates that change, other traffic, and routers that translate addresses."""

import socket
import struct
import subprocess
import sys
import time

import pytest

from lowbit_lab.network import Link, LinkUnavailable, SlowLink, delay, goodput, round_trip
from tests.lab.network.test_shape import TCP_SHARE, all_gone, best, needs_distance, needs_link, output_of


@needs_distance
@pytest.mark.parametrize("rtt_ms", [0, 10])
def test_a_rate_changes_during_a_connection(rtt_ms: float) -> None:
    fast, slow = Link(60.0, rtt_ms=rtt_ms), Link(6.0, rtt_ms=rtt_ms)
    with SlowLink(rate_mbit=60, rtt_ms=rtt_ms, changes=((1.5, slow), (3.5, fast))) as link:
        begin = time.monotonic()
        assert goodput(link, [(0, 1)], 0.6)[0] > 1.5 * 6
        time.sleep(max(0.0, begin + 1.8 - time.monotonic()))
        assert goodput(link, [(0, 1)], 0.6)[0] < 1.25 * 6 * TCP_SHARE
        time.sleep(max(0.0, begin + 3.6 - time.monotonic()))
        assert best(lambda: goodput(link, [(0, 1)], 0.6)[0], 30) > 1.5 * 6


@needs_distance
def test_the_next_link_ends_the_changes_of_the_one_before() -> None:
    with SlowLink(rate_mbit=60, changes=((0.5, Link(1.0)),)) as link:
        link.set_rate(50)
        time.sleep(0.6)
        assert link.link == Link(50.0)
        assert best(lambda: goodput(link, [(0, 1)], 0.5)[0], 30) > 20
        link.set_link(Link(50.0, changes=((60.0, Link(1.0)),)))  # which the end of the context does not wait for


@needs_distance
def test_a_change_that_fails_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    def wait_for_the_error(link: SlowLink) -> None:
        link._distance._process.kill()
        link._later.join(10)

    changes = ((0.3, Link(10.0, rtt_ms=4)),)
    with pytest.raises(LinkUnavailable, match="the link did not change as it should: no link with a distance"):  # noqa: SIM117
        with SlowLink(rtt_ms=4, changes=changes) as link:
            wait_for_the_error(link)
    assert "the link did not change as it should" in caplog.text
    assert not link._namespaces
    with SlowLink(rtt_ms=4, changes=changes) as link:
        wait_for_the_error(link)
        with pytest.raises(LinkUnavailable, match="did not change"):
            link.popen(0, ["true"])
        with pytest.raises(LinkUnavailable, match="did not change"):
            link.set_rate(1)
        link._problem = None


@needs_distance
@pytest.mark.parametrize("rtt_ms", [0, 10])
@pytest.mark.usefixtures("privilege")
def test_a_neighbour_takes_its_share_and_ends_with_the_link(rtt_ms: float) -> None:
    with SlowLink(rate_mbit=40, rtt_ms=rtt_ms, others=3, congestion="reno") as link:
        assert [traffic.count for traffic in link._traffic] == [3, 3]
        for route in [(0, 1)], [(1, 0)]:  # a quarter of the rate is fair; how fast TCP gets there varies
            assert -best(lambda route=route: -goodput(link, route, 0.6)[0], -20, worst=-40) < 0.55 * 40
        assert output_of(link, 0, "ss", "-tinH", "dport", "=", "9").count("cubic") == 3
        pids = [traffic.pid for traffic in link._traffic]
        link.set_link(Link(40.0, rtt_ms=rtt_ms))
        assert all_gone(pids)
        assert best(lambda: goodput(link, [(0, 1)], 0.6)[0], 30) > 0.7 * 40
        link.set_link(Link(40.0, rtt_ms=rtt_ms, others=1))
        pids = [traffic.pid for traffic in link._traffic]
    assert all_gone(pids)


@needs_link
def test_traffic_that_ended_is_missed() -> None:
    with SlowLink(others=1) as link:
        link._traffic[0]._process.kill()
        link._traffic[0]._process.wait()
        with pytest.raises(LinkUnavailable, match="the other traffic ended, with exit code -9"):
            link.popen(0, ["true"])
        link._traffic.clear()


SERVER = """
import socket, sys
server = socket.create_server(("", 7)); print(flush=True)
peer, (address, port) = server.accept()
print(address, port, len(peer.makefile("rb").read(1 << 20)), flush=True)
peer.sendall(bytes(1 << 20)); peer.close()
"""
CLIENT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7), float(sys.argv[2]))
peer.sendall(bytes(1 << 20))
print(*peer.getsockname(), len(peer.makefile("rb").read()))
"""


def started(link: SlowLink, host: int, program: str, *words: str) -> subprocess.Popen:
    argv = [sys.executable, "-S", "-c", program, *words]
    return link.popen(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_distance
@pytest.mark.usefixtures("privilege")
def test_a_host_behind_a_router_dials_out_and_nobody_dials_in() -> None:
    with SlowLink(hosts=3, rate_mbit=None, nat="others") as link:
        server = started(link, 0, SERVER)
        server.stdout.readline()
        own, port, received = started(link, 1, CLIENT, link.address(0), "9").communicate(timeout=20)[0].split()
        seen, seen_port, sent = server.communicate(timeout=20)[0].split()
        assert own == "192.168.2.2"
        assert seen == link.address(1)
        assert port != seen_port
        assert int(received) == int(sent) == 1 << 20
        server = started(link, 1, SERVER)
        server.stdout.readline()
        dials = [started(link, host, CLIENT, to, "0.5") for host in (0, 2) for to in (link.address(1), own)]
        for dial, error in zip(dials, ("timed out", "timed out") * 2, strict=True):
            assert error in dial.communicate(timeout=20)[1]
        assert server.poll() is None
        link.set_link(Link(100.0, rtt_ms=4))  # without routers
        assert round_trip(link, first=2, second=1) > 4


PEER = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 5000)); s.settimeout(0.5)
s.sendto(b"where am I?", (sys.argv[1], 5000))
print(s.recv(99).decode(), flush=True)  # "address port" at which the third host saw us
address, port = input().split()
heard = []
for _ in range(4):
    s.sendto(b"x", (address, int(port)))
    try:
        heard.append(s.recvfrom(99)[1] == (address, int(port)))
    except TimeoutError:
        heard.append(False)
print(heard)
"""
MEETING = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 5000)); print(flush=True)
while True:
    data, (address, port) = s.recvfrom(99)
    s.sendto(f"{address} {port}".encode(), (address, port))
"""


@needs_distance
def test_two_hosts_behind_routers_reach_each_other_once_both_have_sent() -> None:
    with SlowLink(hosts=3, rate_mbit=None, rtt_ms=10, nat="others") as link:
        started(link, 0, MEETING).stdout.readline()
        peers = [started(link, host, PEER, link.address(0)) for host in (1, 2)]
        seen = [peer.stdout.readline().strip() for peer in peers]
        assert [place.split()[0] for place in seen] == [link.address(1), link.address(2)]
        for peer, other in zip(peers, seen[::-1], strict=True):
            peer.stdin.write(f"{other}\n")
            peer.stdin.flush()
        for peer in peers:  # what the first one sends is dropped if it comes before the other has sent
            assert peer.communicate(timeout=20)[0].endswith("True, True]\n")


def packet(source: bytes, destination: bytes, *, protocol: int = 17, data: bytes = b"data!?", flags: int = 0) -> bytes:
    """A packet with offload header; each end is an address and a port."""
    tcp = protocol == 6
    rest = struct.pack("!QHI2x", 0, 0x5002, 0) if tcp else struct.pack("!HH", 8 + len(data), 0)
    transport = bytearray(source[4:] + destination[4:] + rest)
    pseudo = source[:4] + destination[:4] + struct.pack("!HH", protocol, len(transport) + len(data))
    total = sum_of(pseudo if flags else pseudo + bytes(transport) + data)
    at = 16 if tcp else 6
    transport[at : at + 2] = (total if flags else 0xFFFF - total).to_bytes(2, "big")
    ip = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(transport) + len(data), 1, 0, 64, protocol, 0))
    ip += source[:4] + destination[:4]
    ip[10:12] = (0xFFFF - sum_of(ip)).to_bytes(2, "big")
    return bytes([flags, *bytes(9)]) + bytes(ip) + bytes(transport) + data


def sum_of(data: bytes | bytearray) -> int:
    """The Internet checksum, not inverted, word by word."""
    total = 0
    for i in range(0, len(data), 2):
        total += int.from_bytes(data[i : i + 2], "big")
        total = (total & 0xFFFF) + (total >> 16)
    return total


def end(address: str, port: int) -> bytes:
    return socket.inet_aton(address) + port.to_bytes(2, "big")


OUTSIDE, PEER_END = socket.inet_aton("198.18.0.2"), end("198.18.0.1", 80)


@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("protocol", [6, 17])
def test_translated_packets_have_right_checksums(protocol: int, flags: int) -> None:
    router = delay.Router(OUTSIDE)
    for number in range(500):
        own = end(f"192.168.{number % 256}.{number % 251}", 1 + 131 * number)
        outside = OUTSIDE + (40000 + number).to_bytes(2, "big")
        options = {"protocol": protocol, "data": number.to_bytes(2, "big"), "flags": flags}
        assert same(router.leave(packet(own, PEER_END, **options)), packet(outside, PEER_END, **options))
        assert same(router.enter(packet(PEER_END, outside, **options)), packet(PEER_END, own, **options))


def same(first: bytes, second: bytes) -> bool:
    """Whether packets are equal, but for the two ways to write a checksum's zero."""
    return first.replace(b"\xff\xff", b"\0\0") == second.replace(b"\xff\xff", b"\0\0")


def test_a_router_passes_only_what_was_asked_for() -> None:
    router, own = delay.Router(OUTSIDE), end("192.168.2.2", 5000)
    outside = OUTSIDE + (40000).to_bytes(2, "big")
    assert not router.enter(packet(PEER_END, outside))
    for port in (80, 81):  # one port of the router for all peers
        assert router.leave(packet(own, end("198.18.0.1", port)))[22:32] == outside[:4] + PEER_END[:4] + outside[4:]
    assert router.enter(packet(end("198.18.0.1", 81), outside))
    assert not router.enter(packet(end("198.18.0.1", 82), outside))
    assert not router.enter(packet(end("198.18.0.3", 80), outside))
    assert not router.enter(packet(PEER_END, outside, protocol=6))
    part = bytearray(packet(own, PEER_END))
    part[16] = 0x20  # more fragments follow
    assert not router.leave(bytes(part))
    assert not router.leave(packet(own, PEER_END, protocol=1))


def test_a_router_forgets_what_was_unused_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay, "_MOST_PORTS", 4)
    monkeypatch.setattr(delay, "_MOST_PEERS", 3)
    router = delay.Router(OUTSIDE)

    def port(own: int, peer: int = 80) -> int:
        """The router's port for one of the host's."""
        sent = router.leave(packet(end("192.168.2.2", own), end("198.18.0.1", peer)))
        return int.from_bytes(sent[30:32], "big")

    assert [port(own) for own in (1, 2, 3, 4, 1, 5)] == [40000, 40001, 40002, 40003, 40000, 40001]
    assert [port(1, peer) for peer in (81, 82, 83)] == [40000] * 3
    passed = [bool(router.enter(packet(end("198.18.0.1", peer), OUTSIDE + b"\x9c\x40"))) for peer in range(80, 84)]
    assert passed == [False, True, True, True]
    assert len(router._mappings) == len(router._owners) == 4
