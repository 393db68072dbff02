"""What the page says about what the machines found."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit_run.doctor.command import findings
from lowbit_run.doctor.facts import Facts, Speed, facts
from lowbit_run.doctor.facts import speed as measured_speed
from lowbit_run.doctor.settings import DoctorSettings
from lowbit_run.doctor.survey import DROPPED, OPEN, MachineSurvey, Measured, SurveyedMachine, _named
from lowbit_run.plan import sizes
from lowbit_run.train import load
from lowbit_run.train.device import choose_autocast
from lowbit_run.train.fits import PROCESS_BYTES
from lowbit_run.train.layout import make_layout
from lowbit_run.train.saved import rank_peaks
from tests.lowbit_run.train.runs import base

ADDRESSES = "10.0.0.1", "10.0.0.2"


def survey(facts: tuple[dict[str, Any], ...] = ({}, {}), **found: Any) -> MachineSurvey:
    """Two machines with which nothing is wrong, but for what is given; facts: of each machine."""
    common = dict.fromkeys(("lowbit", "torch", "python", "device"), "1")
    machines = {
        rank: SurveyedMachine(Facts(**{
            "name": f"m{rank}", "cores": 2, "address": address, "gloo_address": address, "interface": "eth0",
            "secret": True, "ports": (40000, 50000), **common, **facts[rank],
        }))
        for rank, address in enumerate(ADDRESSES[: len(facts)])
    }  # fmt: skip
    return MachineSurvey(DoctorSettings(meet=f"{ADDRESSES[0]}:29400"), machines, **found)


def said(found: MachineSurvey) -> str:
    return "\n".join(f"{each.level} {each.machine}: {each.what} -> {each.fix}" for each in findings(found))


CLOSED = {(0, 1): dict.fromkeys([(ADDRESSES[1], 40000), (ADDRESSES[1], 50000)], DROPPED)}
PROBLEMS = {0: "rank 0 did not connect"}


def links(*ways: dict[str, Any]) -> dict[tuple[int, int], Measured]:
    """The link from the first machine to the second, and back, over CUBIC."""
    return {pair: Measured(**{"control": "cubic", "loss": 0.001, **way}) for pair, way in zip(PAIRS, ways, strict=True)}


PAIRS = (0, 1), (1, 0)
TO_BBR = {"better_mbit": 86.0, "way": "BBR"}
TO_16 = {"better_mbit": 44.0, "way": "16 connections"}
VPN = "connect the machines by a VPN"
FAR = {"address": "172.16.4.4", "gloo_address": "172.16.4.4", "near": False}
NEEDS = {"needs": (3e9, 5e9)}
CONDITIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "almost three times": ({"links": {(0, 1): Measured(mbit=10, loss=0.02), (1, 0): Measured(mbit=29)}}, []),
    "three times as fast back": (
        {"links": {(0, 1): Measured(mbit=10), (1, 0): Measured(mbit=31)}},
        ["warning m0: m0 to m1 carries 10 Mbit/s, the other direction 31"],
    ),
    "no connection": (
        {"problems": PROBLEMS}, ["stop m0: rank 0 did not connect -> look for a firewall between the machines"],
    ),
    "closed ports": (
        {"problems": PROBLEMS, "states": CLOSED, "seen": (set(), {"203.0.113.7", ADDRESSES[1]})},
        ["stop m1: ports 32768 to 60999 are closed for m0 (all 2 that were",
         "iptables -I INPUT -p tcp -s 10.0.0.1 --dport 32768:60999 -j ACCEPT"],
    ),
    "a closed port": (
        {"states": {(0, 1): {(ADDRESSES[1], 40000): DROPPED, (ADDRESSES[1], 50000): OPEN}}},
        ["stop m1: ports 40000 are closed for m0 (1 of 2 that were tried): nothing answers: packets are dropped"],
    ),
    "a machine left": (
        {"left": (1, "it stopped")},
        ["stop m1: it left before the end: it stopped -> start it again on all machines"],
    ),
    "nobody knows who left": ({"left": (-1, "it stopped")}, ["stop : it left before the end"]),
    "another secret": ({"strangers": ["m7"]}, ["stop m7: it does not know the secret (LOWBIT_SECRET) of m0"]),
    "no speed": (
        {"speed": ({"problem": "no such model"}, {})},
        ["warning m0: its speed was not measured: no such model -> without it, no plan"],
    ),
    "the first machine closed": (
        {"alone": "port 29400 cannot be reached from here", "facts": ({"meet_address": "10.0.0.1"},)},
        ["open the port there: sudo iptables -I INPUT -p tcp -s 10.0.0.1 --dport 29400 -j ACCEPT"],
    ),
    "little memory": (
        {"facts": ({**NEEDS, "memory_bytes": 4e9}, {**NEEDS, "memory_bytes": 4e9, "weights": "nf4"})},
        ["warning m1: its rank 1 will likely need 5.0 GB, with weights in nf4, and 4.0 GB of memory are free -> fewer"],
    ),
    "a wrong recipe": (
        {"facts": ({"recipe": "a.toml", "recipe_problem": "connections is 0; allowed: 1"}, {"recipe": "a.toml"})},
        ["stop m0: connections is 0; allowed: 1 -> correct a.toml, or copy it"],
    ),
    "clean, queue": (  # the queue overflowed once, as TCP looked for the rate
        {"links": links({"mbit": 94.0, "loss": 0.04, **TO_BBR}, {"mbit": 93.0, **TO_BBR})}, []
    ),
    "loss 0.1 %": (
        {"links": links({"mbit": 13.0, **TO_BBR}, {"mbit": 12.0, **TO_BBR})},
        ["note m0 and m1: the link loses packets, and TCP slows down for each: to m1 13 Mbit/s with CUBIC, 86 with "
         "BBR (10 MB take 6.2 s instead of 0.93); to m0 12 Mbit/s with CUBIC, 86 with BBR (10 MB take 6.7 s",
         "-> nothing to do for lowbit train, which changes to BBR by itself"]
    ),
    "loss 0.1 %, no BBR": (
        {"links": links({"mbit": 13.0, **TO_16}, {"mbit": 12.0, **TO_16, "permitted": False})},
        ["warning m0 and m1: the link loses packets, and TCP slows down for each: to m1 13 Mbit/s with CUBIC, 44 "
         "over 16 connections (10 MB take 6.2 s instead of 1.8); to m0 12",
         "-> lowbit train uses several connections by itself; BBR, not permitted on m1, is faster still: sudo"]
    ),
    "loss 0.1 %, connections given": (
        {"links": links({"mbit": 13.0, **TO_BBR}, {"mbit": 12.0, **TO_BBR}), "facts": ({"connections": "16"}, {})},
        ["warning m0 and m1: the link loses", '-> set run.connections = "auto", with which lowbit train chooses']
    ),
    "loss 1 %, BBR": (
        {"links": links(*({"mbit": 86.0, "control": "bbr", "loss": 0.01, "better_loss": 0.01, **TO_BBR},) * 2)},
        []
    ),
    "another congestion control on one machine": (
        {"links": links({"mbit": 12.0, **TO_BBR}, {"mbit": 84.0, **TO_BBR, "control": "bbr"})},
        ["note m0: the link loses packets, and TCP slows down for each: to m1 12 Mbit/s with CUBIC, 86 with BBR"]
    ),
    "loss 6 %": (
        {"links": links(*({"mbit": 50.0, "better_mbit": 50.0, "better_loss": 0.06, "way": "BBR"},) * 2)},
        ["warning m0 and m1: TCP sent again 6% of the segments to m1 even with BBR and 6% of the segments to m0",
         "-> a cable instead of Wi-Fi"]
    ),
    "NAT, first machine, private address": (
        {"alone": "port 29400 of 10.0.0.1 cannot be reached", "facts": ({**FAR, "meet_address": "10.0.0.1"},)},
        [f"-> 10.0.0.1 is a private address of another network than this machine's (172.16.4.4); if a router "
         f"joins both, check that the first machine runs and that its firewall lets the port pass, "
         f"otherwise: {VPN}"]
    ),
    "NAT, first machine, address of the router": (
        {"alone": "port 29400 of 8.8.4.4 cannot be reached", "facts": ({**FAR, "meet_address": "8.8.4.4"},)},
        ["-> 8.8.4.4 may be the address of a router (NAT), which lets nothing through to the first machine; if "
         f"this is the first machine, it has 172.16.4.4 and is behind one: {VPN}"]
    ),
    "NAT, other machine": (
        {"states": CLOSED, "seen": (set(), {"203.0.113.7"})},
        ["stop m1: it is behind a router (NAT): the others see it as 203.0.113.7, and m0 cannot reach it at "
         f"10.0.0.2 -> {VPN}"]
    ),
    "NAT of a machine that finds closed ports": (
        {"states": CLOSED, "seen": ({"203.0.113.7"}, {ADDRESSES[1]})},
        ["stop m1: ports 32768 to 60999 are closed", f"-> m0 is behind a router (NAT), as 203.0.113.7: {VPN}"]
    ),
    "asymmetric": (
        {"links": links({"mbit": 6273.4}, {"mbit": 1204.0})},
        ["warning m1: m1 to m0 carries 1,200 Mbit/s, the other direction 6,270: 10 MB",
         "-> look for a bad cable or weak Wi-Fi; if it is an upload limit: fewer bits in pipeline.backward"]
    ),
    "busy": (
        {"speed": ({"busy": 1.0, "own": 0.9}, {"busy": 1.8, "own": 0.9})},
        ["warning m1: other programs use 0.9 of its 2 cores, so it was measured slower than it is -> end these"]
    ),
    "busy with this check": (  # containers of one machine, which computes for both
        {"speed": ({"busy": 1.8, "own": 0.9},) * 2, "facts": tuple({"machine": "a", "network": n} for n in "12")},
        []
    ),
    "one machine": (
        {"facts": ({"machine": "a", "network": "1"},) * 2},
        ["warning m0 and m1: these are one machine, whose 2 cores", "-> start lowbit doctor once on each"]
    ),
    "small packets": (
        {"left": (0, "no answer"), "stalled": (1, 0)},
        ["stop m1: it connects to m0, but larger messages to it do not arrive (no answer) -> large packets may be "
         "lost, as in a VPN: sudo ip link set eth0 mtu 1280"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_condition_is_one_finding(name: str):
    """IPv6 is refused before there is a survey: `test_wrong_settings_are_one_line`."""
    found, lines = {**CONDITIONS[name][0]}, CONDITIONS[name][1]
    speeds, seen = found.pop("speed", ({}, {})), found.pop("seen", (set(), set()))
    state = survey(**found)
    for machine, speed, addresses in zip(state.machines.values(), speeds, seen, strict=False):
        machine.speed, machine.seen = Speed(**speed), addresses
    text = said(state)
    assert all(line in text for line in lines), text
    assert text.count("\n") == 0, text
    assert bool(text) == bool(lines), text
    assert VPN not in text or "iptables" not in text


def test_machines_with_one_name_are_told_apart_and_both_lack_a_secret():
    found = survey()
    found.machines = _named({r: replace(m.facts, name="vm", secret=False) for r, m in found.machines.items()})
    first, second = said(found).splitlines()
    assert first.startswith("warning vm and vm-2: LOWBIT_SECRET is not set: anyone who can reach 10.0.0.1:29400 can")
    assert second.startswith("note vm-2: another machine has the same name, vm, so this page calls this one vm-2 -> ")


@pytest.mark.slow
def test_a_recipe_with_adapters_is_measured_as_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("bitsandbytes")
    recipe = tmp_path / "run.toml"
    lines = [f'pretrained = "{base(tmp_path, dim=64, ffn=128)}"', 'weights = "nf4"', "[lora]", "rank = 4"]
    lines += ["[data]", f'text = "{tmp_path / "text.txt"}"', "sequence = 16", "batch = 4"]
    recipe.write_text("\n".join(["[model]", *lines]))
    settings = DoctorSettings(recipe=str(recipe), meet="127.0.0.1:29400", formats=("fp32",))
    own = facts(settings)
    assert (own.recipe_problem, own.weights, len(own.needs)) == ("", "nf4", 2)
    config = load(recipe)
    autocast, layout = choose_autocast("auto", torch.device("cpu")), make_layout(config.pipeline, ranks=2, layers=4)
    predicted = rank_peaks(config, layout, vocab=256, autocast=autocast)
    assert own.needs == tuple(peak + PROCESS_BYTES["cpu"] for peak in predicted)
    built: list[str] = []
    build = sizes.build_share

    def build_share(*args: Any, **options: Any) -> Any:
        model = build(*args, **options)
        built.extend(type(p).__name__ for p in model.parameters())
        return model

    monkeypatch.setattr(sizes, "build_share", build_share)
    monkeypatch.setattr(
        "lowbit_run.doctor.facts.coding_speed", lambda codec, *_: (1e9, 1e9)
    )  # of all that "auto" tries
    assert (found := measured_speed(settings)).layer_seconds > 0, found.problem
    assert built.count("Params4bit") == 2 * 7, "the linear layers of two decoder layers"
