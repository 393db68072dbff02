"""Links with a distance, rates that change and other traffic: what they carry, how long it takes, and what is lost."""

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowbit_lab.network import Link, LinkUnavailable, SlowLink, delay, distance, goodput, round_trip
from tests.lowbit_lab.network.test_shape import (
    TCP_SHARE,
    all_gone,
    best,
    needs_distance,
    needs_link,
    output_of,
    python,
    talking,
)

FAR = Link(100.0, rtt_ms=40)


def shortest(link: SlowLink, enough: float, *, first: int = 0, second: int = 1) -> float:
    """The shortest of some round trips: other work on this machine only ever makes them longer."""
    return -best(lambda: -round_trip(link, first=first, second=second), -enough, worst=-1e9)


def carried(link: SlowLink, sender: int, receiver: int, enough: float) -> float:
    """The most that a link carries from host to host, in Mbit/s."""
    return best(lambda: goodput(link, [(sender, receiver)], 0.8)[0], enough)


@needs_distance
@pytest.mark.usefixtures("privilege")
def test_a_far_link_carries_its_rate_and_takes_its_time() -> None:
    with SlowLink(rate_mbit=100, rtt_ms=40) as link:
        assert 40 <= shortest(link, 44) < 45
        assert 85 < carried(link, 0, 1, 86) < 1.25 * 100 * TCP_SHARE  # what came late counts as fast


@needs_distance
def test_each_direction_has_its_own_rate() -> None:
    with SlowLink(rate_mbit=40, back_mbit=10, rtt_ms=10) as link:
        assert 34 < carried(link, 0, 1, 35) < 1.25 * 40 * TCP_SHARE
        assert 8 < carried(link, 1, 0, 8.5) < 1.25 * 10 * TCP_SHARE
        link.set_rate(20)
        assert link.link == Link(20.0, rtt_ms=10)
        assert carried(link, 1, 0, 16) > 15


@needs_distance
def test_a_link_changes_between_measurements_and_connections_stay() -> None:
    with SlowLink(rate_mbit=100) as link:
        server, client = talking(link)
        link.set_link(FAR)
        assert shortest(link, 44) >= 40
        link.set_link(Link(100.0, rtt_ms=100))
        assert 100 <= shortest(link, 105) < 106
        link.set_link(Link(100.0))
        assert shortest(link, 20) < 20
        assert client.wait(10) == 0
        assert len(server.communicate(timeout=10)[0].split()) > 5


@needs_distance
def test_jitter_spreads_the_round_trips() -> None:
    script = "import sys; from lowbit_lab.network import probe; probe._PINGS = 40\n"
    script += "probe.statistics.median = lambda times: f'{min(times)} {max(times)}'\n"
    script += "print(probe.ping(sys.argv[1], 5201))"
    with SlowLink(rate_mbit=100, rtt_ms=20, jitter_ms=8) as link:
        argv = [sys.executable, "-I", "-S", str(Path(distance.__file__).with_name("probe.py"))]
        link.popen(1, [*argv, "echo", link.address(1), "5201"])
        argv = [sys.executable, "-c", script, link.address(1)]
        client = link.popen(0, argv, stdout=subprocess.PIPE, text=True)
        low, high = map(float, client.communicate(timeout=30)[0].split())
    assert 4 <= low < 16
    assert high > 24


def train(payload: int, segment: int) -> bytes:
    header = bytes([0, 1, 0, 0, *segment.to_bytes(2, sys.byteorder), *bytes(4)])
    ip, tcp = bytes([0x45, *bytes(19)]), bytes([*bytes(12), 0x80, *bytes(19)])
    return header + ip + tcp + bytes(payload)


def test_packets_follow_each_other_at_the_rate_and_the_queue_drops_its_tail() -> None:
    line, arrivals = delay.Line([0, 1]), []
    order = {"rates": [[1e-6, 0], [0, 0]], "delay": 0.02, "jitter": 0, "queue": 0.01}
    line.obey({**order, "loss": 0, "burst": 1, "reorder": 0})
    line._expect = lambda at, *_: arrivals.append(at)  # type: ignore[method-assign]
    packet = bytes(10) + bytes(986)  # 1000 bytes of Ethernet: a millisecond
    for _ in range(20):
        line._send(100.0, 0.0, 0, 1, packet)
    assert arrivals[:10] == pytest.approx([100.021 + i / 1000 for i in range(10)])
    assert 10 <= len(arrivals) <= 11
    # Ten milliseconds late: a link that was busy 5 ms ago went on, one that was not begins now.
    free = line._up_free[0]
    arrivals.clear()
    line._send(free + 0.005, 0.01, 0, 1, packet)
    line._send(200.0, 0.01, 0, 1, packet)
    assert arrivals == pytest.approx([free + 0.021, 200.021])
    # A train takes as long as its packets.
    lengths = {train(1448, 1448): 1514, train(3 * 1448, 1448): 3 * 1514, train(3 * 1448 + 1, 1448): 3 * 1514 + 67}
    lengths[bytes(10) + bytes(100)] = 114
    assert {each: delay.ethernet_bytes(each) for each in lengths} == lengths


UDP = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if sys.argv[1] == "listen":
    s.bind(("", 7)); s.settimeout(1.5); print(flush=True)
    try:
        while True: print(s.recv(9).decode(), flush=True)
    except TimeoutError: pass
else:
    for i in range(1000):
        s.sendto(str(i).encode(), (sys.argv[1], 7))
        time.sleep(0.0005)
"""


def arrived(link: SlowLink) -> list[int]:
    """Which of 1000 datagrams from host 0 arrive at host 1, in their order."""
    server = python(link, 1, UDP, "listen")
    assert server.stdout
    server.stdout.readline()
    python(link, 0, UDP, link.address(1))
    return [int(word) for word in server.communicate(timeout=30)[0].split()]


@needs_distance
def test_the_share_that_is_lost_is_lost_and_the_same_in_every_run() -> None:
    lossy = Link(100.0, rtt_ms=4, loss=0.1)
    with SlowLink(rate_mbit=100, rtt_ms=4) as link:
        assert len(arrived(link)) == 1000
        link.set_link(lossy)
        some = arrived(link)
        link.set_link(lossy)
        assert arrived(link) == some
    assert some == sorted(some)
    assert 850 < len(some) < 950  # five times the standard deviation


def test_half_of_all_packets_are_lost_where_half_is_asked_for() -> None:
    line = delay.Line([0, 0])
    asked = {"rates": [(0.0, 0.0)] * 2, "delay": 0.0, "jitter": 0.0, "queue": 1.0, "reorder": 0.0}
    for burst in (1, 5):
        line.obey({**asked, "loss": 0.4, "burst": burst})
        line._events.clear()
        for _ in range(20_000):
            line._travel(0.0, 0, 1, b"")
        assert 0.57 < len(line._events) / 20_000 < 0.63


@needs_distance
def test_losses_come_in_a_row_and_packets_late() -> None:
    with SlowLink(rate_mbit=100, rtt_ms=40, loss=0.1, burst=8) as link:
        some = arrived(link)
        gaps = [b - a - 1 for a, b in itertools.pairwise(some) if b > a + 1]
        assert 700 < len(some) < 980
        assert sum(gaps) / len(gaps) > 3  # each is 1.1 where packets are lost one by one
        link.set_link(Link(100.0, rtt_ms=40, reorder=0.1))
        late = arrived(link)
    assert sorted(late) == list(range(1000))
    assert late != sorted(late)
    # Of a train of packets each is lost by itself: at 1 % TCP still carries much of 20 Mbit/s.
    with SlowLink(rate_mbit=20, rtt_ms=4, loss=0.01) as link:
        assert carried(link, 0, 1, 14) > 10


@needs_distance
def test_more_hosts_meet_at_a_switch() -> None:
    with SlowLink(hosts=3, rate_mbit=30, rtt_ms=20) as link:
        assert 20 <= shortest(link, 25, first=1, second=2) < 26
        assert carried(link, 1, 2, 25) > 24
        both = goodput(link, [(0, 2), (1, 2)], 1.0)  # which share what host 2 receives at
        assert sum(both) < 1.25 * 30 * TCP_SHARE
        assert best(lambda: min(goodput(link, [(0, 1), (2, 0)], 0.8)), 19) > 18


@needs_link
def test_no_tun_device_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "delay.py"
    source = Path(distance._PROGRAM).read_text().replace("/dev/net/tun", "/dev/net/nothing")
    program.write_text(source)
    monkeypatch.setattr(distance, "_PROGRAM", str(program))
    link = SlowLink(rtt_ms=40)
    with pytest.raises(LinkUnavailable, match=r"no link with a distance.*/dev/net/nothing.*module `tun`"), link:
        pass
    assert not link._namespaces
    with SlowLink() as near, pytest.raises(LinkUnavailable, match="module `tun`"):
        near.set_link(FAR)


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
    changes = ((0.3, Link(10.0, rtt_ms=4)),)
    link = SlowLink(rtt_ms=4, changes=changes)

    def fail() -> None:
        with link:
            link._distance._process.kill()
            link._later.join(10)
            for call in (lambda: link.popen(0, ["true"]), lambda: link.set_rate(1)):
                with pytest.raises(LinkUnavailable, match="did not change"):
                    call()

    with pytest.raises(LinkUnavailable, match="the link did not change as it should: no link with a distance"):
        fail()
    assert "the link did not change as it should" in caplog.text
    assert not link._namespaces


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


@needs_distance
def test_a_delay_line_that_was_killed_and_traffic_that_ended_are_missed() -> None:
    with SlowLink(rtt_ms=40, others=1) as link:
        link._traffic[0]._process.kill()
        link._traffic[0]._process.wait()
        with pytest.raises(LinkUnavailable, match="the other traffic ended, with exit code -9"):
            link.popen(0, ["true"])
        link._traffic.clear()
        link._distance._process.kill()
        link._distance._process.wait()
        with pytest.raises(LinkUnavailable, match="no link with a distance"):
            link.set_link(Link(100.0, rtt_ms=10))
