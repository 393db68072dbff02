"""Traces of real ranks: spans lie one inside another and account for the step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lowbit.train import TrainConfig, train
from lowbit.train.metrics import StepMetrics
from lowbit.train.tracing import ALL, CATEGORIES, traced_steps
from tests.processes import Ranks
from tests.train.runs import again, tiny

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
    by_rank = ranks.run(_steps, config, timeout=LIMIT)
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
            # The metrics' clock runs within the span: both are read in the same thread, apart from a few lines.
            assert 0 <= event["dur"] / 1e6 - metrics.seconds < 0.2 * metrics.seconds
            # Between spans are the schedule's own lines: less than they took when the metrics counted them as compute.
            assert inside[id(event)] / event["dur"] > 0.5
        for micro_batch in range(4):
            for name in ("forward", "backward"):
                assert sum(e["name"] == name and e["args"]["micro_batch"] == micro_batch for e in own) == 2
    sends = [event for event in _spans(config) if event["name"] == "send"]
    assert {(e["pid"], e["tid"]) for e in sends} == {(0, 2), (1, 1)}  # to the other rank
    sent = sum(event["args"]["bytes"] for event in sends)
    assert sent == sum(metrics.bytes_sent for metrics in by_rank[0][2:])


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]
