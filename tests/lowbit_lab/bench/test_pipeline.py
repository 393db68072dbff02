import dataclasses
import itertools
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.codecs import TransformQuant, parse_pair
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit_lab.bench.pipeline import COMMAND, PipelineBenchmark, interval
from lowbit_lab.bench.runs import Duration, Recording, recipe
from lowbit_lab.bench.workers import set_link
from lowbit_lab.network import Link, LinkUnavailable, SlowLink
from lowbit_lab.network.shape import burst_bytes
from lowbit_run.report import Report, run
from lowbit_run.train.config import DataConfig, ModelConfig, PipelineConfig
from lowbit_run.train.model import build_model, next_token_loss
from lowbit_run.train.prepare import prepare
from tests.lowbit_lab.bench.shown import shown

TRANSFORM = "TransformQuant(bits=5) / TransformQuant(bits=4, step='message')"  # a "/" and commas in a name
TINY = PipelineBenchmark(
    links=(Link(None),),
    boundaries=("stock-fp32", "stock-bf16", "fp32", "tah-quant", TRANSFORM, "aq-sgd"),
    model=ModelConfig(dim=64, layers=4, heads=2),
    data=DataConfig(batch=4, sequence=32),
    pipeline=PipelineConfig(stages_per_rank=2, microbatches=2, schedule="Interleaved1F1B"),
    rounds=2,
    steps=1,
    samples=8,
    precision="fp32",
)
BATCH, SEQUENCE, DIM = TINY.data.batch, TINY.data.sequence, TINY.model.dim
MESSAGE = (BATCH // TINY.pipeline.microbatches, SEQUENCE, DIM)
SLOW = 8.0  # Mbit/s
BYTES_FP32 = 4 * BATCH * SEQUENCE * DIM * 3 * 2  # 3 boundaries, both ways


@pytest.fixture(scope="module")
def report() -> Report:
    """One real run: two processes, on a slow link where this machine permits one."""
    links = (Link(None),) if SlowLink.available() else (Link(SLOW), Link(None))
    seen: list[int] = []
    done = run(COMMAND, dataclasses.replace(TINY, links=links), on_rows=lambda rows: seen.append(len(rows)))
    assert seen[0] == len(TINY.boundaries)
    assert seen[-1] == len(done.rows) == len(links) * len(TINY.boundaries)
    return done


def by_boundary(report: Report, rate: float | None = None) -> dict[str, Any]:
    return {row["boundary"]: row for row in report.rows if row["link_mbit"] == rate}


def test_rows_have_bits_memory_losses_and_ratios(report: Report, tmp_path: Path):
    rows = by_boundary(report)
    assert list(rows) == list(TINY.boundaries)
    more = 8 * CHECKSUM_BYTES / math.prod(MESSAGE)
    for name, bits in (("stock-fp32", 32), ("fp32", 32 + more), ("stock-bf16", 16)):
        assert (rows[name]["bits_forward"], rows[name]["bits_backward"]) == (bits, bits)
        coordination = rows[name]["bytes_per_step"] - BYTES_FP32 * bits / 32
        assert 0 < coordination < 1000
    assert rows["tah-quant"]["bits_forward"] < 4.6
    assert rows["tah-quant"]["bits_backward"] == pytest.approx(6.5, abs=0.1)
    for way, codec in zip(("forward", "backward"), parse_pair(TRANSFORM), strict=True):
        assert rows[TRANSFORM][way] == repr(codec)
        assert rows[TRANSFORM][f"bits_{way}"] == codec.bits_per_element(MESSAGE) + more
    assert rows["stock-fp32"]["forward"] is None
    assert rows["aq-sgd"]["bits_forward"] < 4.6, "all samples were visited before"
    assert "tah-quant" in shown(COMMAND, report.rows, tmp_path)
    several = [{**row, "split": f"{row['split']}{i % 2}"} for i, row in enumerate(report.rows)]
    assert "over best" in shown(COMMAND, several, tmp_path, width=120)
    # What is kept between steps.
    memory = 4 * TINY.samples * SEQUENCE * DIM * 3 * 2  # both ends of 3 boundaries
    assert {name: row["state_bytes"] for name, row in rows.items()} == dict.fromkeys(rows, 0) | {
        "aq-sgd": memory,
        TRANSFORM: sum(2 * 3 * c.open(shape=MESSAGE, dtype=torch.float32).state_bytes() for c in parse_pair(TRANSFORM)),
    }
    losses = {name: row["loss"] for name, row in rows.items()}
    assert losses["fp32"] == pytest.approx(losses["stock-fp32"], abs=1e-5)
    assert losses["tah-quant"] != losses["fp32"]
    assert losses["tah-quant"] == pytest.approx(losses["fp32"], abs=0.1)
    fastest = max(row["tokens_per_second"] for row in rows.values())
    for row in rows.values():
        speed = row["tokens_per_second"]
        assert row["tokens_per_second_low"] <= speed <= row["tokens_per_second_high"]
        assert row["steps"] == TINY.rounds * TINY.steps
        assert row["speedup_fp32"] == speed / rows["fp32"]["tokens_per_second"]
        assert row["speedup_stock_fp32"] == speed / rows["stock-fp32"]["tokens_per_second"]
        assert row["share_of_unlimited"] == speed / fastest


@pytest.mark.skipif(SlowLink.available() is not None, reason=f"{SlowLink.available()}")
def test_auto_chooses_on_each_link_and_is_compared_with_the_best_fixed_format():
    links = (Link(SLOW), Link(None))
    rows = run(COMMAND, dataclasses.replace(TINY, links=links, boundaries=("bf16", "int8", "auto"), rounds=6)).rows
    (_, _, slow), (bf16, int8, free) = rows[:3], rows[3:]
    assert (slow["forward"], slow["bits_forward"] < 9) == ("auto", True)
    assert free["chosen"] == "boundary 0 to 2 bf16" or free["bits_forward"] > slow["bits_forward"]
    best = max((bf16, int8), key=lambda row: statistics.median(row["turns"]))
    ratios = sorted(own / other for own, other in zip(free["turns"], best["turns"], strict=True))
    assert free["over_fixed"] == statistics.median(ratios)
    assert (free["over_fixed_low"], free["over_fixed_high"]) == (ratios[0], ratios[-1])


def test_intervals_hold_the_median_in_95_percent():
    assert interval([5, 1, 4, 2, 3], "x") == {"x": 3, "x_low": None, "x_high": None}
    generator = random.Random(0)
    held = 0
    for _ in range(500):
        found = interval([generator.expovariate(1) for _ in range(12)], "x")
        held += found["x_low"] <= math.log(2) <= found["x_high"]
    assert 0.94 < held / 500 < 0.99  # exactly 0.961


@pytest.mark.skipif(SlowLink.available() is not None, reason=f"{SlowLink.available()}")
def test_a_slow_link_holds_up_full_precision(report: Report):
    rows = by_boundary(report, SLOW)
    # Other work on this machine only ever makes things slower, so times have lower bounds and rates upper ones.
    assert 0.5 < rows["fp32"]["goodput_mbit"] / (SLOW * 0.956) < 1.1
    at_least = (BYTES_FP32 / 2 - burst_bytes(SLOW)) * 8e-6 / SLOW  # seconds for one direction
    assert rows["fp32"]["seconds_per_step"] > at_least
    assert rows["stock-fp32"]["seconds_per_step"] > at_least
    assert rows["tah-quant"]["bytes_per_step"] < rows["fp32"]["bytes_per_step"] / 4


def test_no_link_or_distance_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlowLink, "available", staticmethod(lambda distance=False: "No TUN." if distance else None))
    with pytest.raises(LinkUnavailable, match="No TUN. `--link 100mbit` measures without a dist"):
        run(COMMAND, dataclasses.replace(TINY, links=(Link(None), Link(100.0, rtt_ms=40))))
    monkeypatch.setattr(SlowLink, "available", staticmethod(lambda **_: "No way."))
    with pytest.raises(LinkUnavailable, match="No way. `--link unlimited` measures without"):
        run(COMMAND, dataclasses.replace(TINY, links=(Link(100.0), Link(None))))
    about = {"link": "unlimited", "link_mbit": None, "link_rtt_ms": 0.0, "goodput_mbit": None, "rtt_ms": None}
    assert set_link(None, Link(None)) == about


def test_stages_that_wait_send_the_same_over_any_number_of_connections():
    compute, boundaries = Duration.parse("20ms"), ("stock-fp32", "fp32", "transform")
    few = dataclasses.replace(TINY, boundaries=boundaries, rounds=1, compute=compute, connections=(1, 3))
    rows = {(row["boundary"], row["connections"]): row for row in run(COMMAND, few).rows}
    assert list(rows) == [("stock-fp32", 1), ("fp32", 1), ("fp32", 3), ("transform", 1), ("transform", 3)]
    passes = few.pipeline.stages_per_rank * few.pipeline.microbatches
    for row in rows.values():
        assert row["compute_seconds"] >= passes * 3 * compute.seconds
        assert row["loss"] is None
    for name, field in itertools.product(boundaries[1:], ("bits_forward", "bits_backward")):
        assert rows[name, 1][field] == rows[name, 3][field]
    assert rows["transform", 1]["bits_forward"] == pytest.approx(TransformQuant().bits_per_element(MESSAGE), abs=0.1)
    assert rows["stock-fp32", 1]["bytes_per_step"] >= BYTES_FP32
    assert rows["transform", 1]["codec_mbit"] > 0
    assert rows["stock-fp32", 1]["codec_mbit"] is None


def test_recorded_gradients_are_those_of_a_whole_batch():
    prepared = prepare(recipe(TINY, "fp32"), ranks=2)
    recording = Recording(prepared, samples=3)
    model = build_model(prepared.config.model, vocab=prepared.vocab, sequence=SEQUENCE, seed=TINY.seed)
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    for layer in model.base_model.layers[:-1]:
        layer.register_forward_hook(keep)
    inputs, targets = prepared.data.train.batch(torch.arange(3))
    next_token_loss(model(inputs).logits, targets).backward()
    for boundary, output in enumerate(kept):
        torch.testing.assert_close(recording.outputs[boundary], output.detach())
        torch.testing.assert_close(recording.gradients[boundary] / 3, output.grad)
