"""The verdict on real links: two network namespaces, real TCP, and losses and rates of an emulated distance."""

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from lowbit.plan.cluster import Cluster
from lowbit_lab.network import SlowLink
from lowbit_lab.network.link import Link
from tests.doctor.machines import PORT, start

NO_LINK = SlowLink.available(distance=True)
WELL = "Nothing would stop the training."

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(120),
    pytest.mark.skipif(NO_LINK is not None, reason=f"no shaped link here: {NO_LINK}"),
]


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    with SlowLink(hosts=2, rtt_ms=1) as opened:
        yield opened


def page_of(link: SlowLink, text: str, tmp_path: Path, *, bbr: bool = True) -> str:
    """The page of both machines in one line, from which what both print is taken, without the tables."""
    link.set_link(Link.parse(text))
    common = ("run.toml", "--meet", f"{link.address(0)}:{PORT}", "--seconds", "0.5")
    machines = [
        start(tmp_path / name, *common, "--name", name, link=link, host=host, before=_prepare, arguments=(bbr,))
        for host, name in enumerate(("desk", "laptop"))
    ]
    pages = [" ".join(machine.page().split()) for machine in machines]
    assert [machine.code for machine in machines] == [0, 0], machines[0].said()
    findings = {page.partition(" machine address ")[0] for page in pages}
    assert len(findings) == 1
    return findings.pop()


def _prepare(bbr: bool) -> None:
    """Measure for half of the time. Without `bbr`, the kernel refuses it."""
    mock.patch("lowbit.doctor.survey._FAR_TRIPS", 50).start()
    if not bbr:
        mock.patch("lowbit.doctor.survey.set_congestion_control", return_value=False).start()


def rates(tmp_path: Path) -> tuple[float, float]:
    (found,) = Cluster.read(next(tmp_path.glob("*/cluster.toml"))).links
    return found.mbit, found.back_mbit or 0.0


def test_a_clean_link_has_no_findings(link: SlowLink, tmp_path: Path):
    assert page_of(link, "100mbit/10ms", tmp_path) == WELL


def test_a_loss_of_a_thousandth(link: SlowLink, tmp_path: Path):
    page = page_of(link, "100mbit/40ms/0.1%", tmp_path)
    assert page.startswith(f"{WELL} note ")
    assert "the link loses packets, and TCP slows down for each" in page
    found = re.search(r"([0-9.]+) Mbit/s with CUBIC, ([0-9.]+) with BBR .10 MB take ([0-9.]+) s inst", page)
    assert found, page
    usual, better, seconds = map(float, found.groups())
    assert better >= 1.25 * usual
    assert seconds == pytest.approx(80 / usual, rel=0.06)
    assert "nothing to do for lowbit train, which changes to BBR by itself" in page
    assert any(rate == pytest.approx(better, rel=0.05) for rate in rates(tmp_path)), "what training will get"


def test_losses_where_bbr_is_not_permitted(link: SlowLink, tmp_path: Path):
    page = page_of(link, "100mbit/10ms/1%", tmp_path, bbr=False)
    assert page.startswith(f"{WELL} warning desk and laptop: the link loses packets")
    assert "over 16 connections (10 MB take" in page
    assert "BBR, not permitted on desk and laptop, is faster still: sudo modprobe tcp_bbr" in page


def test_an_upload_limit(link: SlowLink, tmp_path: Path):
    page = page_of(link, "20mbit-5mbit/20ms", tmp_path)
    assert page.startswith(f"{WELL} warning laptop: laptop to desk carries 4.")
    assert re.search(r"the other direction 1[5-9][0-9.]*: 10 MB take 1[5-9][0-9.]* s", page), page
    assert "if it is an upload limit: fewer bits in pipeline.backward" in page
    assert page.count("warning") == 1
