"""What is wrong between two machines is named rightly: two network namespaces with real ports and a real link.

The tests of links that lose packets, or carry less one way, are the laboratory's.
"""

import contextlib
import re
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lowbit_lab.network import Link, SlowLink
from lowbit_run.plan.cluster import Cluster
from tests.command_line import invoke
from tests.lowbit_run.doctor.machines import PORT, RECIPE, Running, start

TRIED = tuple(range(32768, 61000, 4033))
"""The ports that are tried of those that Linux gives to programs."""
WELL = "Nothing would stop the training."
NO_DISTANCE = SlowLink.available(distance=True)

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
    pytest.mark.skipif(SlowLink.available() is not None, reason=f"no shaped link here: {SlowLink.available()}"),
]


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    with SlowLink(hosts=2, rate_mbit=30) as opened:
        # So that rules come before the way to this host itself: `closed`.
        for host in range(2):
            opened._namespaces[host].ip("rule add pref 20 lookup local", "rule del pref 0")
        yield opened


def pair(
    link: SlowLink, tmp_path: Path, *words: str, first: Mapping[str, Any] | None = None, **second: Any
) -> tuple[Running, Running]:
    """Both machines; `first`, `second`: options of `start` for each."""
    common = ("run.toml", "--meet", f"{link.address(0)}:{PORT}", "--seconds", "0.5", *words)
    desk = start(tmp_path / "a", *common, "--name", "desk", link=link, host=0, **(first or {}))
    return desk, start(tmp_path / "b", *common, "--name", "laptop", link=link, host=1, **second)


@contextlib.contextmanager
def closed(link: SlowLink, host: int, *ports: int) -> Iterator[None]:
    """A firewall of a host. It knows no connections, so ports are named that no other connection happens to have."""
    space = link._namespaces[host]
    space.ip(*(f"rule add pref 10 iif {link.interface(host)} ipproto tcp dport {port} blackhole" for port in ports))
    try:
        yield
    finally:
        space.ip(*["rule del pref 10"] * len(ports))


def agreed(machines: tuple[Running, Running]) -> str:
    """The page, which both machines print, in one line."""
    first, second = (each.page() for each in machines)
    first, _, ending = first.partition("cluster.toml ")
    assert ending, machines[0].said()
    assert first.strip() == second.strip(), machines[1].said()
    return " ".join(second.split())


def test_all_is_well_whatever_somebody_else_sends(link: SlowLink, tmp_path: Path):
    words = ("run.toml", "--meet", f"{link.address(0)}:{PORT}", "--seconds", "1", "--name")
    first = start(tmp_path / "a", *words, "desk", link=link, host=0, speed=True)
    first.wait_for("waiting up to")
    garbage = "import socket, sys, time; s = socket.create_connection((sys.argv[1], 29400)); "
    garbage += "s.sendall(b'GET / HTTP/1.1' * 50); print(flush=True); time.sleep(99)"
    argv = ["python3", "-I", "-S", "-c", garbage, link.address(0)]
    stranger = link.popen(1, argv, stdout=subprocess.PIPE, text=True)
    assert stranger.stdout.readline()
    machines = first, start(tmp_path / "b", *words, "laptop", link=link, host=1)
    page = agreed(machines)
    stranger.kill()
    assert WELL in page
    assert "warning" not in page
    assert [each.code for each in machines] == [0, 0]
    cluster = Cluster.read(tmp_path / "a" / "cluster.toml")
    assert [machine.name for machine in cluster.machines] == ["desk", "laptop"]
    assert cluster.machines[1].address == link.address(1)
    assert cluster.machines[0].layer_tokens == 64
    (found,) = cluster.links
    assert 18 < found.mbit < 31.5
    assert 18 < (found.back_mbit or 0) < 31.5
    assert not (tmp_path / "b" / "cluster.toml").exists()
    recipe = tomllib.loads(RECIPE)
    options = [f"--{s}.{key}={value}" for s in ("model", "data") for key, value in recipe[s].items() if key != "text"]
    words = ("--microbatch-count", "2", "--format", "bf16", "--schedule", "1F1B", "--stages-per-rank", "1", *options)
    planned = invoke("plan", "pipeline", str(tmp_path / "a" / "cluster.toml"), *words)
    assert planned.exit_code == 0, planned.output
    assert "laptop" in planned.stdout


def test_a_closed_port_a_missing_text_and_a_clock_that_is_ahead(link: SlowLink, tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.toml").write_text(RECIPE.replace('"text.txt"', '"absent.txt"'))
    with closed(link, 1, *TRIED):
        hasty = {"changes": {"survey._PORT_SECONDS": 1.5}}
        machines = pair(link, tmp_path, first=hasty, changes={"survey.time_ns": _ahead})
        page = agreed(machines)
    assert "2 findings would stop the training" in page
    assert "STOPS laptop: ports 32768 to 60999 are closed for desk" in page
    assert "packets are dropped" in page
    assert "on laptop: sudo iptables -I INPUT -p tcp -s 198.18.0.1 --dport 32768:60999 -j ACCEPT" in page
    assert "STOPS laptop: data.text" in page
    assert "where there is no file" in page
    assert "warning laptop: its clock is 93 s ahead of that of desk" in page
    assert [each.code for each in machines] == [1, 1]
    assert Cluster.read(tmp_path / "a" / "cluster.toml").links, "measured over the ports of the other direction"


def _ahead() -> int:
    return time.time_ns() + 93 * 10**9


def test_a_wrong_interface_and_versions_recipe_and_text_that_differ(link: SlowLink, tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "text.txt").write_text("other " * 2000)
    (tmp_path / "b" / "run.toml").write_text(RECIPE.replace("dim = 32", "dim = 64"))
    link._namespaces[1].ip("link add other type bridge", "address add 10.9.0.2/24 dev other", "link set other up")
    changes = {"survey._CONNECT_SECONDS": 2.0, "facts.versions": _versions}
    try:
        page = agreed(pair(link, tmp_path, environment={"GLOO_SOCKET_IFNAME": "other"}, changes=changes))
    finally:
        link._namespaces[1].ip("link del other")
    assert "5 findings would stop the training" in page
    assert "STOPS laptop: Gloo would listen at 10.9.0.2 (GLOO_SOCKET_IFNAME=other), where desk cannot reach it" in page
    assert "export GLOO_SOCKET_IFNAME=eth0" in page
    assert "STOPS laptop: lowbit is 9.9, and" in page
    assert "STOPS laptop: PyTorch is 1.0, and" in page
    assert "on laptop: pip install lowbit==" in page
    assert "STOPS laptop: its recipe differs from that of desk: model.dim is 64 and 32" in page
    assert "STOPS laptop: its text differs from that of desk: digest" in page
    assert "warning laptop: Python is 2.7.1, and" in page


def _versions() -> dict[str, str]:
    return {"lowbit": "9.9", "torch": "1.0", "python": "2.7.1"}


def test_a_closed_meeting_port(link: SlowLink, tmp_path: Path):
    with closed(link, 0, PORT):
        machines = pair(link, tmp_path, "--wait", "3")
        first, second = (" ".join(each.page().split()) for each in machines)
    assert f"STOPS laptop: port {PORT} of 198.18.0.1 cannot be reached" in second
    assert f"sudo iptables -I INPUT -p tcp -s 198.18.0.2 --dport {PORT} -j ACCEPT" in second
    assert "STOPS desk: 1 of 2 machines did not come" in first
    assert "if it runs and cannot reach this machine, its own page has the reason" in first
    assert [each.code for each in machines] == [1, 1]
    assert [m.name for m in Cluster.read(tmp_path / "a" / "cluster.toml").machines] == ["desk"]


def test_another_secret(link: SlowLink, tmp_path: Path):
    machines = pair(link, tmp_path, environment={"LOWBIT_SECRET": "another"})
    first, second = (" ".join(each.page().split()) for each in machines)
    assert "STOPS laptop: it does not know the secret (LOWBIT_SECRET) of desk" in first
    assert "STOPS desk: it does not know the secret (LOWBIT_SECRET) of laptop" in second
    assert [each.code for each in machines] == [1, 1]


def test_a_machine_that_leaves(link: SlowLink, tmp_path: Path):
    hasty = {"changes": {"meeting._END_SECONDS": 0.5}}
    first, second = pair(link, tmp_path, first=hasty, changes={"survey.speed": _interrupted})
    page = " ".join(first.page().split())
    second.page()
    assert second.code == 130
    assert "STOPS laptop: it left before the end" in page
    assert "cluster.toml was not written: the speed of no machine is known." in page


def _interrupted(*_: object) -> None:
    """Ctrl-C where the speed would be measured."""
    raise KeyboardInterrupt


def test_the_first_machine_is_interrupted(link: SlowLink, tmp_path: Path):
    first, second = pair(link, tmp_path, "--machines", "3")
    second.wait_for("met the first machine")
    first.interrupt()
    first.page()
    assert first.code == 130, first.said()
    assert "STOPS laptop: the first machine is gone" in " ".join(second.page().split())
    assert second.code == 1
    assert not (tmp_path / "a" / "cluster.toml").exists()


@pytest.mark.slow
def test_a_cable_that_is_cut_ends_both(link: SlowLink, tmp_path: Path):
    first, second = machines = pair(link, tmp_path, "--seconds", "60")
    for each in machines:
        each.wait_for("measuring clocks and links")
    link.cut(1)
    try:
        for each in machines:
            each.page(120)
    finally:
        link.restore(1)
    assert [each.code for each in machines] == [1, 1]
    assert "STOPS" in first.said() or "error: rank 1 stopped answering" in first.said()
    assert "STOPS" in second.said() or "error: rank 0 stopped answering" in second.said()


def far(link: SlowLink, text: str, tmp_path: Path, *, bbr: bool = True) -> str:
    """What both machines find out about a link with a distance; without `bbr`, their kernels refuse it."""
    before = link.link
    link.set_link(Link.parse(text))
    changes = {"survey._FAR_TRIPS": 50, **({} if bbr else {"survey.set_congestion_control": _refused})}  # half the time
    try:
        page = agreed(machines := pair(link, tmp_path, first={"changes": changes}, changes=changes))
    finally:
        link.set_link(before)
    assert [each.code for each in machines] == [0, 0]
    return page.partition(" machine address ")[0]


def _refused(*_: object) -> bool:
    return False


@pytest.mark.lab
@pytest.mark.skipif(NO_DISTANCE is not None, reason=f"no link with a distance here: {NO_DISTANCE}")
def test_links_that_lose_packets_or_carry_less_one_way(link: SlowLink, tmp_path: Path):
    page = far(link, "100mbit/40ms/0.1%", tmp_path)
    assert page.startswith(f"{WELL} note ")
    assert "the link loses packets, and TCP slows down for each" in page
    found = re.search(r"([0-9.]+) Mbit/s with CUBIC, ([0-9.]+) with BBR .10 MB take ([0-9.]+) s inst", page)
    assert found, page
    usual, better, seconds = map(float, found.groups())
    assert better >= 1.25 * usual
    assert seconds == pytest.approx(80 / usual, rel=0.06)
    assert "nothing to do for lowbit train, which changes to BBR by itself" in page
    (kept,) = Cluster.read(tmp_path / "a" / "cluster.toml").links
    rates = (kept.mbit, kept.back_mbit)
    assert any(rate == pytest.approx(better, rel=0.05) for rate in rates), "what training will get"

    assert far(link, "100mbit/10ms", tmp_path) == WELL

    page = far(link, "100mbit/10ms/1%", tmp_path, bbr=False)
    assert re.match(f"{WELL} warning (desk|laptop|desk and laptop): the link loses packets", page), page
    assert "over 16 connections (10 MB take" in page
    assert "BBR, not permitted on desk and laptop, is faster still: sudo modprobe tcp_bbr" in page

    page = far(link, "20mbit-5mbit/20ms", tmp_path)
    assert page.startswith(f"{WELL} warning laptop: laptop to desk carries 4.")
    assert re.search(r"the other direction 1[5-9][0-9.]*: 10 MB take 1[5-9][0-9.]* s", page), page
    assert page.count("warning") == 1
