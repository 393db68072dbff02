"""Replicas that come and go, on hosts of their own: what they count as sent, and what their interfaces count."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.train.config import ElasticConfig
from lowbit.train.metrics import read_metrics
from lowbit.train.summary import read_summary
from lowbit_lab.network import SlowLink
from tests.interfaces import train_on_hosts
from tests.train.runs import tiny

pytest.importorskip("torchft")

_LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind=sys.argv[1], min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=5_000)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(SlowLink.available() is not None, reason=f"no hosts here: {SlowLink.available()}")
def test_the_interfaces_agree_with_what_replicas_count(tmp_path: Path):
    config = tiny(
        tmp_path, model={"dim": 128, "ffn": 256}, pipeline={"ranks": 1, "stages_per_rank": 1, "schedule": "GPipe"},
        gradients={"all_reduce": "fp8"}, run={"steps": 8},
    )  # fmt: skip
    with SlowLink(hosts=2, rate_mbit=None) as link:
        address = f"{link.address(0)}:29600"
        lighthouse = link.popen(
            0,
            [sys.executable, "-c", _LIGHTHOUSE, "[::]:29600"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert lighthouse.stdout is not None
        assert lighthouse.stdout.readline() == "ready\n"
        configs = [
            dataclasses.replace(
                config,
                elastic=ElasticConfig(lighthouse=f"http://{address}", name=name, at_least=2),
                run=dataclasses.replace(config.run, output=str(tmp_path / name)),
            )
            for name in "ab"
        ]
        counted = train_on_hosts(configs, link, tmp_path)
    for name, sent in zip("ab", counted, strict=True):
        summary = read_summary(tmp_path / name / "summary.json")
        assert summary.bytes_sent == pytest.approx(sent, rel=0.03), summary.parts
        steps = read_metrics(tmp_path / name / "metrics.jsonl")
        assert sum(line["links"]["0 to other replicas"] for line in steps) == summary.parts["gradients"]
