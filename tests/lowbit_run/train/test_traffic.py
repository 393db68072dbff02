"""What a run says that it has sent: the whole of it, of every mode, and of the whole run after a resume."""

import dataclasses
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lowbit.codecs import parse
from lowbit_lab.network import SlowLink
from lowbit_run.train import Summary, TrainConfig, train
from lowbit_run.train.data import Order
from lowbit_run.train.metrics import read_metrics, read_summary
from lowbit_run.train.prepare import prepare
from lowbit_run.train.tied import row_bytes
from tests.interfaces import train_on_hosts
from tests.lowbit_run.train.runs import LIMIT, ONE, RESUME, again, answering, stopped, tiny
from tests.processes import Ranks

SIZES: dict[str, dict[str, Any]] = {  # messages of many kilobytes: Gloo adds some 100 bytes to each
    "model": {"family": "qwen2", "tied": True, "dim": 128, "ffn": 256},
    "data": {"sequence": 128},
    "pipeline": {"forward": "int4", "tied_rows": "bf16"},
    "run": {"eval_batches": 0, "eval_every": 2},
}
ALONE = {"tied embedding", "saving the model"}
LAPS = {"ranks": 3, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "warmup_steps": 1}
MODES: dict[str, tuple[dict[str, dict[str, Any]], set[str]]] = {
    "tied": ({"pipeline": {"warmup_steps": 1}, "run": {"save_model": True}}, {"boundaries", "evaluation", *ALONE}),
    "replicas": ({"pipeline": {"data_parallel": 2}, "gradients": {"all_reduce": "fp8"}}, {"boundaries", "gradients"}),
    "interleaved": ({"model": {"layers": 6}, "pipeline": LAPS}, {"boundaries", "evaluation"}),
    "chosen formats": ({"pipeline": {"forward": "auto"}, "run": {"steps": 8}}, {"boundaries", "tied embedding"}),
}

needs_hosts = pytest.mark.skipif(SlowLink.available() is not None, reason=f"no hosts here: {SlowLink.available()}")


def _compare(config: TrainConfig, folder: Path, large: set[str]) -> Summary:
    """Train on hosts, and compare with what their interfaces have counted."""
    output = Path(config.run.output)
    with SlowLink(hosts=config.ranks, rate_mbit=None) as link:
        counted = sum(train_on_hosts(config, link, folder))
    summary, steps = read_summary(output / "summary.json"), read_metrics(output / "metrics.jsonl")
    store = 15_000 * config.ranks  # what ranks say through the store before they train, which is not counted
    assert summary.bytes_sent == pytest.approx(counted - store, rel=0.03), (counted, summary.parts)
    assert {name for name, nbytes in summary.parts.items() if nbytes > 0.04 * counted} >= large, summary.parts
    for line in steps:  # each rank has a machine of its own
        assert sum(line["links"].values()) == line["bytes_sent"] == sum(line["parts"].values())
    return summary


@needs_hosts
def test_all_that_a_run_sends_is_counted_and_the_interfaces_agree(tmp_path: Path):
    more, parts = MODES["tied"]
    config = _lettered(tmp_path, more)
    summary = _compare(config, tmp_path, parts)
    evaluations, steps = (
        sum(line["bytes_sent"] for line in read_metrics(Path(config.run.output) / f"{name}.jsonl"))
        for name in ("evaluations", "metrics")
    )
    assert summary.parts["evaluation"] == evaluations
    assert summary.bytes_sent > steps + evaluations
    data = prepare(config, ranks=2).data.train
    order = Order(samples=len(data), batch=config.data.batch, seed=config.run.seed)
    rows = [len(data.batch(order.ids(step))[0].unique()) for step in range(3)]
    sent = [row_bytes(count, 128, parse(name)) for count, name in zip(rows, ("fp32", "bf16", "bf16"), strict=True)]
    assert summary.parts["tied embedding"] == 2 * sum(sent), "there and back"


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "tied"])
def test_the_interfaces_agree_with_what_each_mode_counts(tmp_path: Path, mode: str):
    more, parts = MODES[mode]
    _compare(_lettered(tmp_path, more), tmp_path, parts)


@needs_hosts
@pytest.mark.slow
def test_the_interfaces_agree_about_adapters_of_a_saved_model(tmp_path: Path):
    first = tiny(
        tmp_path / "first", **_with({"pipeline": ONE | {"forward": "fp32"}, "run": {"save_model": True, "steps": 1}})
    )
    model = train(first).model
    config = tiny(
        tmp_path, model={"pretrained": model}, lora={"rank": 4}, data={**SIZES["data"], "tokenizer": "bytes"},
        pipeline=SIZES["pipeline"],
        run={"eval_batches": 0, "save_model": True, "steps": 8},
    )  # fmt: skip
    assert "tied embedding" not in _compare(config, tmp_path, {"boundaries", "evaluation"}).parts


def _lettered(folder: Path, more: dict[str, dict[str, Any]]) -> TrainConfig:
    """A run on a text of a hundred different letters."""
    config = tiny(folder, **_with(more))
    (folder / "text.txt").write_text("".join(random.Random(0).choices(string.printable, k=12_000)))
    return config


def _with(more: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: SIZES.get(name, {}) | more.get(name, {}) for name in {*SIZES, *more}}


def _interrupted(config: TrainConfig) -> Summary:
    resumed = stopped(config, 10)
    dist.barrier()
    return train(resumed)


@pytest.mark.slow
def test_the_summary_of_a_resumed_run_is_that_of_the_whole_run(ranks: Ranks, tmp_path: Path):
    run = {"steps": 12, "checkpoint_every": 4, "eval_every": 5}
    config = answering(tmp_path, model={"tied": True, "layers": 2}, run=run)
    whole = again(config, run={"output": str(tmp_path / "whole")})
    expected = [dataclasses.asdict(each) for each in ranks.run(train, whole, timeout=LIMIT)]
    resumed = [dataclasses.asdict(each) for each in ranks.run(_interrupted, config, timeout=LIMIT)]
    assert resumed[0] == resumed[1] == dataclasses.asdict(read_summary(tmp_path / "run" / "summary.json"))
    assert (resumed[0]["steps_here"], expected[0]["steps_here"]) == (4, 12)
    assert resumed[0]["exact_match_before"] is not None
    for name, value in expected[0].items():
        if name == "parts":
            for part in ("boundaries", "tied embedding", "evaluation"):
                assert resumed[0]["parts"][part] == value[part]
        elif name not in ("steps_here", "bytes_sent", "model") and "second" not in name:
            rel = 0.01 if name == "bytes_per_step" else 0  # no announcement before the first pass of an attempt
            assert resumed[0][name] == (pytest.approx(value, rel=rel) if rel else value), name
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert resumed[0]["seconds"] == pytest.approx(sum(line["seconds"] for line in lines))


def test_steps_that_nobody_knows_any_more_are_left_out_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = tiny(tmp_path, pipeline=ONE, run={"steps": 4, "checkpoint_every": 3})
    train(config)
    metrics = Path(config.run.output) / "metrics.jsonl"
    first, _, third, fourth = metrics.read_text().splitlines()
    metrics.write_text("\n".join([first, third.replace('"loss": ', '"loss": "x", "lost": '), fourth, ""]))
    summary = train(again(config, run=RESUME))
    assert f"{metrics} has no line of 2 of the 4 steps before: the summary leaves them out" in caplog.text
    losses = [line["loss"] for line in read_metrics(metrics) if line["loss"] != "x"]
    assert (summary.steps_here, summary.loss) == (0, pytest.approx(sum(losses) / 2))
