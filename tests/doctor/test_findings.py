"""What the page says about what the machines found."""

from __future__ import annotations

from typing import Any

import pytest

from lowbit.doctor.findings import findings
from lowbit.doctor.messages import Facts, Measured, Speed
from lowbit.doctor.ports import DROPPED, OPEN
from lowbit.doctor.settings import DoctorSettings
from lowbit.doctor.survey import MachineSurvey, SurveyedMachine

ADDRESSES = "10.0.0.1", "10.0.0.2"


def survey(**found: Any) -> MachineSurvey:
    """Two machines with which nothing is wrong, but for what is given."""
    common = dict.fromkeys(("lowbit", "torch", "python", "device"), "1")
    machines = {
        rank: SurveyedMachine(Facts(
            name=f"m{rank}", cores=2, address=address, gloo_address=address, interface="eth0", secret=True,
            host_address=address, ports=(40000, 50000), **common,
        ))
        for rank, address in enumerate(ADDRESSES)
    }  # fmt: skip
    return MachineSurvey(DoctorSettings(meet=f"{ADDRESSES[0]}:29400"), machines, **found)


def said(found: MachineSurvey) -> str:
    return "\n".join(f"{each.level} {each.machine}: {each.what} -> {each.fix}" for each in findings(found))


CLOSED = {(0, 1): dict.fromkeys([(ADDRESSES[1], 40000), (ADDRESSES[1], 50000)], DROPPED)}
PROBLEMS = {0: "rank 0 did not connect"}


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({}, ""),
        ({"links": {(0, 1): Measured(mbit=10, loss=0.02), (1, 0): Measured(mbit=29)}}, ""),
        ({"links": {(0, 1): Measured(mbit=10, loss=0.021), (1, 0): Measured(mbit=29)}}, "warning m0: TCP sent 2% of"),
        (
            {"links": {(0, 1): Measured(mbit=13, loss=0.001, again=4, control="cubic"), (1, 0): Measured(mbit=29)}},
            "warning m0: the link to m1 loses packets (TCP sent 0.10% of its segments again), and CUBIC slows down for "
            "each: it carries 13 Mbit/s -> sudo modprobe tcp_bbr",
        ),
        (
            {"links": {(0, 1): Measured(mbit=13, loss=0.001, again=4, control="cubic", permitted=True)}},
            "warning m0: the link to m1 loses packets (TCP sent 0.10% of its segments again), and CUBIC slows down for "
            "each: it carries 13 Mbit/s -> lowbit train uses BBR by itself; for other programs: sudo modprobe tcp_bbr",
        ),
        ({"links": {(0, 1): Measured(mbit=90, loss=0.001, again=4, control="bbr")}}, ""),
        ({"links": {(0, 1): Measured(mbit=90, loss=0.001, again=2, control="cubic")}}, ""),
        ({"links": {(0, 1): Measured(mbit=90, loss=0.0001, again=9, control="cubic")}}, ""),
        (
            {"links": {(0, 1): Measured(mbit=10), (1, 0): Measured(mbit=31)}},
            "warning m0: m0 to m1 carries 10 Mbit/s, the other direction 31",
        ),
        ({"problems": PROBLEMS}, "stop m0: rank 0 did not connect -> look for a firewall between the machines"),
        ({"problems": PROBLEMS, "states": CLOSED}, "stop m1: ports 32768 to 60999 are closed for m0 (all 2 that were"),
        (
            {"states": {(0, 1): {(ADDRESSES[1], 40000): DROPPED, (ADDRESSES[1], 50000): OPEN}}},
            "stop m1: ports 40000 are closed for m0 (1 of 2 that were tried): nothing answers: packets are dropped",
        ),
        ({"left": (1, "it stopped")}, "stop m1: it left before the end: it stopped -> start it again on all machines"),
        ({"left": (-1, "it stopped")}, "stop : it left before the end"),
        (
            {"left": (0, "no answer"), "stalled": (1, 0)},
            "stop m1: it connects to m0, but larger messages to it do not arrive (no answer) -> large packets may be "
            "lost, as in a VPN: sudo ip link set eth0 mtu 1280",
        ),
        ({"strangers": ["m7"]}, "stop m7: it does not know the secret (LOWBIT_SECRET) of m0"),
    ],
)
def test_each_problem_is_one_finding(found: dict[str, Any], line: str):
    text = said(survey(**found))
    assert text.startswith(line)
    assert text.count("\n") == 0
    assert bool(text) == bool(line)


def test_a_router_between_the_machines_is_named():
    found = survey(states=CLOSED)
    found.machines[1].seen.add("203.0.113.7")
    assert "-> m1 is behind a router (NAT), as 203.0.113.7: connect the machines by a VPN" in said(found)
    found.machines[1].seen.add(ADDRESSES[1])
    assert "iptables -I INPUT -p tcp -s 10.0.0.1 --dport 32768:60999 -j ACCEPT" in said(found)


def test_a_speed_that_is_missing_is_a_warning():
    found = survey()
    found.machines[0].speed = Speed(problem="no such model")
    assert said(found) == "warning m0: its speed was not measured: no such model -> without it, no plan"
