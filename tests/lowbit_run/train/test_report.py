"""The page that a run leaves: at its end, and when it fails."""

import importlib.util
import json
import logging
import sys
from pathlib import Path

import pytest

import lowbit
from lowbit_run.report.training import PAGE
from lowbit_run.train import train
from lowbit_run.train.folder import RunFolder
from lowbit_run.train.metrics import read_metrics
from tests.lowbit_run.train.runs import ONE, again, stopped, tiny

needs_plotly = pytest.mark.skipif(importlib.util.find_spec("plotly") is None, reason="the extra report is missing")


@needs_plotly
def test_a_run_leaves_a_page_with_its_losses(tmp_path: Path):
    config = tiny(tmp_path, pipeline=ONE, run={"report": True, "eval_every": 2})
    losses: list[float] = []
    summary = train(config, on_step=lambda metrics: losses.append(metrics.loss))
    folder = Path(config.run.output)
    text = (folder / PAGE).read_text()
    assert str(losses).replace(" ", "") in text.replace(" ", "")
    assert f"{summary.held_out_loss:.4f}" in text
    assert "did not end" not in text
    assert PAGE in RunFolder(folder).made()
    assert [line["step"] for line in read_metrics(folder / "evaluations.jsonl")] == [2, 3]
    train(again(config, run={"report": False}))  # overwrites
    assert not (folder / PAGE).exists()


@needs_plotly
def test_a_run_that_fails_leaves_a_page_up_to_its_last_step(tmp_path: Path):
    config = tiny(tmp_path, pipeline=ONE, run={"report": True})
    stopped(config, 2)
    text = (Path(config.run.output) / PAGE).read_text()
    assert "The run did not end: 2 of 3 steps are recorded" in text


def test_without_the_extra_a_run_ends_as_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    config = tiny(tmp_path, pipeline=ONE, run={"report": True})
    with caplog.at_level(logging.WARNING):
        assert train(config).steps == 3
    assert 'no report.html, because jinja2 is missing: pip install "lowbit[report]"' in caplog.text
    assert not (Path(config.run.output) / PAGE).exists()


def test_memory_is_recorded_by_rank_and_stage(tmp_path: Path):
    two = {"ranks": 1, "stages_per_rank": 2, "schedule": "Interleaved1F1B"}
    config = tiny(tmp_path, pipeline=two, activations={"bits": 4})
    summary = train(config)
    about = json.loads((Path(config.run.output) / "ranks.json").read_text())
    (machine,), (memory,) = about["machines"], about["memory"]
    assert machine["ranks"] == [0]
    assert machine["lowbit"] == lowbit.__version__
    assert [(stage["stage"], stage["layers"]) for stage in memory["stages"]] == [(0, 2), (1, 2)]
    weights = sum(stage["weights"] for stage in memory["stages"])
    assert weights < memory["optimizer"] <= 2 * weights + 1000, "AdamW keeps two numbers a weight"
    assert memory["saved_activations"] == summary.bytes_activations
    assert memory["process"] > 1e8
