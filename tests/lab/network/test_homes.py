"""What links between homes have: rates that change, and other traffic."""

import time

import pytest

from lowbit_lab.network import Link, LinkUnavailable, SlowLink, goodput
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
