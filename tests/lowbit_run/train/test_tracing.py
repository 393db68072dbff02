"""Traces of real ranks: spans lie one inside another and account for the step."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lowbit_run.train import TrainConfig, train
from lowbit_run.train.metrics import StepMetrics
from lowbit_run.train.tracing import ALL, traced_steps
from tests.lowbit_run.train.runs import again, tiny
from tests.processes import Ranks

LIMIT = 110
TRACED = {"trace": True, "trace_steps": 2, "steps": 4}


def _steps(config: TrainConfig) -> list[StepMetrics]:
    found: list[StepMetrics] = []
    train(config, on_step=found.append)
    return found


def _spans(config: TrainConfig, rank: int | None = None) -> list[dict[str, Any]]:
    name = ALL if rank is None else f"rank-{rank}.json.gz"
    text = gzip.decompress((Path(config.run.output) / "trace" / name).read_bytes())
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]


def test_spans_of_two_ranks_nest_and_account_for_the_step(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, pipeline={"forward": "int4"}, run=TRACED)
    plain = ranks.run(_steps, again(config, run={"trace": False}), timeout=LIMIT)[0]
    assert not (Path(config.run.output) / "trace").exists()
    by_rank = ranks.run(_steps, config, timeout=LIMIT)
    for name in ("loss", "grad_norm", "bits_forward", "bits_backward", "bytes_sent"):
        assert [getattr(m, name) for m in by_rank[0]] == [getattr(m, name) for m in plain]
    for rank, steps in enumerate(by_rank):
        spans = _spans(config, rank)
        assert spans == [event for event in _spans(config) if event["pid"] == rank]
        own = sorted((e for e in spans if e["tid"] == 0), key=lambda e: (e["ts"], -e["dur"]))
        parents: list[dict[str, Any]] = []
        inside = {}  # microseconds within each span that other spans account for
        for event in own:
            while parents and event["ts"] >= _end(parents[-1]) - 1e-3:
                parents.pop()
            if parents:
                assert _end(event) <= _end(parents[-1]) + 1e-3, "a span ends after the one that it lies in"
                inside[id(parents[-1])] = inside.get(id(parents[-1]), 0.0) + event["dur"]
            parents.append(event)
        traced = [event for event in own if event["name"] == "step"]
        assert [event["args"]["step"] for event in traced] == [3, 4]
        assert {event["name"] for event in own} >= {"forward", "backward", "encode", "decode", "wait", "optimizer"}
        for event, metrics in zip(traced, steps[2:], strict=True):
            # The same, but for what comes before the metrics' first and after their last look at the clock.
            assert 0 <= event["dur"] / 1e6 - metrics.seconds < 0.2 * metrics.seconds
            assert inside[id(event)] > 0.5 * event["dur"]
        for micro_batch in range(4):
            for name in ("forward", "backward"):
                assert sum(e["name"] == name and e["args"]["micro_batch"] == micro_batch for e in own) == 2
    sends = [event for event in _spans(config) if event["name"] == "send"]
    assert {(e["pid"], e["tid"]) for e in sends} == {(0, 2), (1, 1)}  # to the other rank
    for metrics in by_rank[0][2:]:
        _check_sums([e for e in _spans(config) if e["tid"] == 0], metrics)
    sent = sum(event["args"]["bytes"] for event in sends)
    assert sent == sum(metrics.parts["boundaries"] for metrics in by_rank[0][2:])


def _check_sums(spans: list[dict[str, Any]], metrics: StepMetrics) -> None:
    """Spans are made of the readings of the clock that the metrics are: their sums differ by rounding only."""
    steps = [e for e in spans if e["name"] == "step" and e["args"]["step"] == metrics.step]
    passes = [e for e in spans if e["name"] == "pipeline" and any(_lies_in(e, step) for step in steps)]
    assert len(steps) == len(passes) == 2
    inside = [e for e in spans if any(_lies_in(e, each) for each in passes)]
    seconds = {name: sum(e["dur"] for e in inside if e["cat"] == name) / 1e6 for name in ("waiting", "coding")}
    assert seconds["waiting"] == pytest.approx(2 * metrics.wait_seconds, rel=1e-6)
    assert seconds["coding"] == pytest.approx(2 * metrics.codec_seconds, rel=1e-6)
    whole = 2 * (metrics.compute_seconds + metrics.codec_seconds + metrics.wait_seconds)
    assert whole <= sum(e["dur"] for e in passes) / 1e6 < 1.2 * whole, "beside it, the batch is moved and the loss read"


def _lies_in(event: dict[str, Any], other: dict[str, Any]) -> bool:
    return event["pid"] == other["pid"] and other["ts"] <= event["ts"] and _end(event) <= _end(other) and event != other


def test_weight_passes_are_traced(ranks: Ranks, tmp_path: Path):
    config = tiny(tmp_path, pipeline={"schedule": "ZBVZeroBubble", "stages_per_rank": 2}, run=TRACED)
    ranks.run(_steps, config, timeout=LIMIT)
    names = {event["name"] for event in _spans(config)}
    assert {"forward", "backward", "weight"} <= names


@pytest.mark.parametrize(
    ("steps", "start", "warmup", "traced"),
    [
        (1000, 0, 100, range(103, 108)),
        (1000, 500, 100, range(503, 508)),
        (10, 0, 2, range(5, 10)),
        (6, 0, 2, range(2, 7)),
        (3, 0, 0, range(1, 4)),
        (8, 7, 0, range(8, 9)),
    ],
)
def test_steps_after_the_warm_up_are_traced(steps: int, start: int, warmup: int, traced: range):
    assert traced_steps(steps, start=start, warmup=warmup, count=5) == traced


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]
