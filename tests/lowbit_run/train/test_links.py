"""The links between machines: traffic and waiting on each, and what a run does about those that lose packets."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lowbit.wire.connections import Segments, connections_of
from lowbit_lab.bench.workers import Workers
from lowbit_lab.network import Link, SlowLink
from lowbit_run.train import StepMetrics, TrainConfig
from lowbit_run.train import links as module
from lowbit_run.train.config import PipelineConfig
from lowbit_run.train.layout import make_layout
from lowbit_run.train.links import OUTSIDE, Connections, Links, link_name
from lowbit_run.train.metrics import read_metrics
from tests.lowbit_run.train.runs import LIMIT, losses, own_machines, steps, tiny
from tests.processes import Ranks


def _links(machines: str, *, ranks: int, pipelines: int = 1, **pipeline: object) -> Links:
    layout = make_layout(PipelineConfig(**pipeline), ranks=ranks, layers=12)
    return Links(layout, pipelines, list(machines))


def test_only_what_leaves_a_machine_is_on_a_link():
    links = _links("aabb", ranks=4)
    assert links.pairs == [(0, 2), (2, 0)]
    assert links.machines == [0, 2]
    sums = [0.0] * links.count
    sent = {0: {1: 10}, 1: {2: 20, 0: 5}, 2: {3: 30, 1: 7}, 3: {2: 40}}
    for rank, of_rank in sent.items():
        sums = [a + b for a, b in zip(sums, links.values(rank, of_rank, 1.0 + rank), strict=True)]
    assert links.named(sums) == ({"0 to 2": 20, "2 to 0": 7}, {"0": 1.5, "2": 3.5})


def test_pipelines_and_replicas_have_links_where_they_meet_other_machines():
    assert _links("aa", ranks=2).pairs == []
    assert _links("ab", ranks=2, schedule="ZBVZeroBubble", stages_per_rank=2).pairs == [(0, 1), (1, 0)]
    assert _links("abab", ranks=2, pipelines=2).pairs == [(0, 1), (1, 0)]  # machine a has the first stages
    laps = _links("abc", ranks=3, schedule="Interleaved1F1B", stages_per_rank=2, microbatches=3)
    assert {(2, 0), (0, 2)} <= {*laps.pairs}
    assert (2, 0) in _links("abc", ranks=3).pairs, "a tied embedding, and the sums of a step"
    links = _links("aabbcc", ranks=2, pipelines=3)
    assert dict(zip(links.pairs, links.values(0, {1: 900.0, 2: 450.0, 4: 450.0}, 0.0), strict=False)) == {
        (0, 2): 450.0, (0, 4): 450.0, (2, 0): 0.0, (2, 4): 0.0, (4, 0): 0.0, (4, 2): 0.0,
    }  # fmt: skip
    links = Links(make_layout(PipelineConfig(), ranks=2, layers=12), 1, ["a", "a"], elastic=True)
    assert links.named(links.values(0, {OUTSIDE: 700.0, 1: 5.0}, 0.0))[0] == {"0 to other replicas": 700}


def _on_two_machines(config: TrainConfig) -> list[StepMetrics]:
    with own_machines():
        return steps(config)


def test_bytes_of_links_add_up_to_those_sent(ranks: Ranks, tmp_path: Path):
    here, there = ranks.run(_on_two_machines, tiny(tmp_path), timeout=LIMIT)
    for metrics, other in zip(here, there, strict=True):
        assert metrics.links.keys() == {link_name(0, 1), link_name(1, 0)}
        assert sum(metrics.links.values()) == metrics.bytes_sent
        assert sum(metrics.waiting.values()) == pytest.approx(2 * metrics.wait_seconds)
        assert (metrics.links, metrics.waiting) == (other.links, other.waiting)


class Fake:
    """A run of two ranks. `rates`: Mbit/s by the number of connections, or with BBR."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rates: dict[Any, float], *, control: str = "cubic", other: str = "",
        permitted: bool = False, other_permitted: bool | None = None, connections: int | str = "auto",
    ) -> None:  # fmt: skip
        self.lines: list[str] = []
        self.counts: list[int] = []
        self.control, self.permitted, self.seen = control, permitted, Segments(0, 0)
        side = object()
        members: Any = SimpleNamespace(
            config=SimpleNamespace(run=SimpleNamespace(timeout_seconds=9.0, connections=connections)),
            side=side,
            replicas=SimpleNamespace(pipeline=side, side=side, across=None),
            links=SimpleNamespace(pairs=[(0, 1)]),
        )
        theirs = {bool: permitted if other_permitted is None else other_permitted, list: [0.0, 0, other or control]}
        monkeypatch.setattr(module, "connect_more", lambda group, count, timeout: self.counts.append(count))
        monkeypatch.setattr(module, "segments", lambda: self.seen)
        monkeypatch.setattr(module, "congestion_control", lambda: self.control)
        monkeypatch.setattr(module, "set_congestion_control", self.change)
        monkeypatch.setattr(module, "gather_json", lambda value, group: [value, theirs.get(type(value), theirs[list])])
        rate = lambda: rates[self.control if self.control in rates else (self.counts or [1])[-1]]  # noqa: E731
        self.connections = Connections(members, rate, self.lines.append)

    def change(self, name: str, others: Any) -> bool:
        self.control = name if self.permitted else self.control
        return self.permitted

    def look(self, sent: int, again: int, done: int = 0) -> bool:
        self.seen = Segments(self.seen.sent + sent, self.seen.again + again)
        return self.connections.look(done)


def test_links_that_lose_nothing_keep_one_connection(monkeypatch: pytest.MonkeyPatch):
    run = Fake(monkeypatch, {})
    assert [step for step in range(1, 301) if run.connections.due(step)] == [3, 10, 30, 100, 200, 300]
    assert not any(run.look(*segments) for segments in [(10_000, 0), (10_000, 1), (1_000_000, 40)])
    assert (run.counts, run.lines, run.connections.facts) == ([], [], {"connections": 1, "congestion_control": "cubic"})


BLAMED = "up to 1 % of TCP packets are sent again, and CUBIC slows down for each: "
ADVICE = r"; faster still: .*sudo sysctl -w net.ipv4.tcp_congestion_control=bbr on every machine"


@pytest.mark.parametrize(
    ("rates", "own", "facts", "tried", "line"),
    [
        ({1: 13.0, "bbr": 91.0}, {"permitted": True}, (1, "bbr"), [], "up .* again: BBR in place of CUBIC, 13 -> 91"),
        ({"cubic": 86.0, "bbr": 1.0}, {"permitted": True}, (1, "cubic"), [4, 1], f"{BLAMED}more conn.* 86 Mbit/s$"),
        ({1: 13.0, 4: 44.0, 16: 91.0}, {"other_permitted": True}, (16, "cubic"), [4, 16], f"{BLAMED}16 co.*{ADVICE}"),
        ({1: 90.0, 4: 91.0}, {"other_permitted": True}, (1, "cubic"), [4, 1], f"{BLAMED}more connections.*{ADVICE}"),
        (
            {"bbr": 91.0},
            {"control": "bbr"},
            (1, "bbr"),
            [],
            "up to .* again; BBR is in use, which single",
        ),
    ],
    ids=["bbr", "bbr-is-slower", "connections", "connections-do-not-pay", "bbr-already"],
)
def test_losses_are_answered_by_bbr_or_else_by_as_many_connections_as_pay(
    monkeypatch: pytest.MonkeyPatch, rates: dict[Any, float], own: Any, facts: Any, tried: list[int], line: str
):
    run = Fake(monkeypatch, rates, **own)
    helped = run.look(1000, 10)
    assert tuple(run.connections.facts.values()) == facts
    assert helped == (facts != (1, own.get("control", "cubic")))
    assert run.counts == tried
    (said,) = run.lines
    assert re.match(line, said), said
    assert run.connections.due(100)


def test_losses_that_come_back_are_acted_on_again_but_not_over_and_over(monkeypatch: pytest.MonkeyPatch):
    rates = {1: 90.0, 4: 91.0, 16: 92.0}
    run = Fake(monkeypatch, rates)
    tries = []
    for done in range(100, 3001, 100):
        assert not run.look(1000, 10, done)
        tries.append(len(run.counts))
    assert [100 * (i + 1) for i, (a, b) in enumerate(zip([0, *tries], tries, strict=False)) if b > a] == [
        100, 300, 700, 1500
    ]  # fmt: skip
    assert len(run.lines) == 1
    rates |= {1: 10.0, 4: 40.0, 16: 40.0}
    assert not run.look(1000, 10, 3090), "it waits for twice as long as the last time"
    assert run.look(1000, 10, 3100)
    assert run.connections.count == 4
    assert not run.look(1000, 0, 3200)
    rates[16] = 80.0
    assert run.look(1000, 10, 3300), "what helped is not the end"
    assert run.connections.count == 16
    assert not run.look(1000, 10, 3400)
    assert run.counts[-1] == 16, "never fewer"


def test_bbr_that_is_not_enough_gets_more_connections(monkeypatch: pytest.MonkeyPatch):
    rates = {1: 13.0, "bbr": 91.0}
    run = Fake(monkeypatch, rates, permitted=True, other="bbr")
    assert run.look(10_000, 10)
    del rates["bbr"]
    rates |= {4: 60.0, 16: 61.0}
    assert run.look(1000, 50, 100)
    assert (run.control, run.connections.count) == ("bbr", 4)
    assert (
        run.lines[1] == "up to 5 % of TCP packets are sent again: 4 connections for each pair of ranks, 13 -> 60 Mbit/s"
    )


def test_losses_that_cannot_be_read_are_mentioned_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "can_count", lambda: False)
    run = Fake(monkeypatch, {})
    assert not run.look(0, 0)
    assert not run.look(0, 0, 10)
    assert run.lines == ["lost packets cannot be counted (Linux only): if a link loses any, set run.connections"]
    fixed = Fake(monkeypatch, {}, connections=2)
    assert not fixed.look(0, 0)
    assert fixed.lines == []


def counted(config: TrainConfig) -> tuple[list[float], int]:
    return losses(config), len(connections_of(dist.group.WORLD))  # type: ignore[arg-type]


@pytest.mark.slow
def test_losses_do_not_depend_on_the_number_of_connections(ranks: Ranks, tmp_path: Path):
    one, several = (
        tiny(tmp_path / str(count), model={"dim": 128}, data={"sequence": 128}, run={"steps": 3, "connections": count})
        for count in (1, 3)
    )
    first, second = ranks.run(counted, one), ranks.run(counted, several)
    assert [found for found, _ in first] == [found for found, _ in second]
    assert [count for _, count in (*first, *second)] == [1, 1, 3, 3]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(SlowLink.available(distance=True) is not None, reason="no shaped link here")
@pytest.mark.parametrize("permitted", [True, False])
def test_a_link_that_begins_to_lose_packets_is_noticed_while_receives_are_posted_ahead(tmp_path: Path, permitted: bool):
    config = tiny(
        tmp_path, model={"dim": 256}, data={"sequence": 128, "held_out_share": 0.0}, pipeline={"forward": "fp32"},
        run={"steps": 34},
    )  # fmt: skip
    clean, lossy = Link(50.0, rtt_ms=20), Link(50.0, rtt_ms=20, loss=0.01)
    with (
        SlowLink(2, rtt_ms=20) as network,
        Workers("tests.lowbit_run.train.connections_rank", 2, grouped=True, network=network) as workers,
    ):
        network.set_link(clean)

        def report(metrics: dict[str, Any]) -> None:
            if metrics["step"] == 5:
                network.set_link(lossy)

        settings = json.loads(config.to_json())
        workers.ask("train", config=settings, permitted=permitted, on_progress=report)
    assert len(read_metrics(Path(config.run.output) / "metrics.jsonl")) == 34
    about = json.loads((Path(config.run.output) / "ranks.json").read_text())
    assert about["congestion_control"] == ("bbr" if permitted else "cubic")
    assert (about["connections"] > 1) == (not permitted)
