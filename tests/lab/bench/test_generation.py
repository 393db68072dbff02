"""`lowbit bench generation`: one small real run, the arithmetic of its rows, and its settings."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.report import Report, run
from lowbit.train.config import DataConfig
from lowbit_lab.bench.generation import CALIBRATED, COMMAND, GAINS, OWN, GenerationBenchmark, row_of
from lowbit_lab.bench.sums import Taken
from lowbit_lab.network import Link
from tests.lab.bench.shown import shown
from tests.lab.evaluate.models import TEXT

PROMPT, TOKENS = 24, 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> GenerationBenchmark:
    """A tiny model in a folder, and text."""
    folder = tmp_path_factory.mktemp("generation")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=256
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    return GenerationBenchmark(
        links=(Link(None),), formats=(OWN, "bf16", "int4"), chunks=(0, 7), prompt=PROMPT, tokens=TOKENS, rounds=2,
        pretrained=str(folder / "model"), samples=2,
        data=DataConfig(text=(str(folder / "text.txt"),), sequence=32, batch=1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(forked: None, settings: GenerationBenchmark) -> Report:
    seen: list[int] = []
    done = run(COMMAND, settings, on_rows=lambda rows: seen.append(len(rows)))
    assert seen == [5, 5]
    return done


def test_rows_have_times_of_both_phases(report: Report):
    rows = {(row["format"], row["chunk"]): row for row in report.rows}
    assert rows.keys() == {(OWN, 0), ("bf16", 0), ("bf16", 7), ("int4", 0), ("int4", 7)}
    for row in rows.values():
        for phase, tokens in (("prefill", PROMPT), ("decode", 1)):
            assert 0 < row[f"{phase}_ms_low"] <= row[f"{phase}_ms"] <= row[f"{phase}_ms_high"]
            assert row[f"{phase}_tokens_per_second"] == 1e3 * tokens / row[f"{phase}_ms"]
            assert row[f"{phase}_speedup"] == rows[OWN, 0][f"{phase}_ms"] / row[f"{phase}_ms"]
        assert row["rounds"] == 2


def test_bits_count_every_byte(report: Report):
    bits = {(row["format"], row["chunk"]): (row["bits_prefill"], row["bits_decode"]) for row in report.rows}
    assert bits[OWN, 0] == (16, 16)
    # Beside the prompt's checksum, two empty messages take the receives that the last turn has left posted.
    assert bits["bf16", 0] == (16 + 3 * 64 / (PROMPT * 64), 16 + 64 / 64)
    assert bits["int4", 0][0] < bits["int4", 7][0] < bits["bf16", 0][0]


def test_agreement_is_measured_with_a_model_and_shown(report: Report, tmp_path: Path):
    rows = {row["format"]: row for row in report.rows}
    for name in (OWN, "bf16"):
        assert (rows[name]["same_tokens"], rows[name]["same_texts"], rows[name]["loss_increase"]) == (1, 1, 0)
    assert 0 < rows["int4"]["same_tokens"] < 1
    assert rows["int4"]["loss"] != rows[OWN]["loss"]
    text = shown(COMMAND, report.rows, tmp_path)
    assert "Prefill of 24 tokens, then decode" in text
    assert "Agreement with Transformers' own pipeline" in text


@pytest.mark.parametrize(
    ("layouts", "per_host"), [(("tensor",), 1), pytest.param(("pipeline", "tensor", "both"), 2, marks=pytest.mark.slow)]
)
def test_layouts_are_measured_with_the_same_model(
    forked: None, settings: GenerationBenchmark, layouts: tuple[Any, ...], per_host: int
):
    few = dataclasses.replace(
        settings, layouts=layouts, per_host=per_host, formats=(OWN, "int8"), chunks=(0,), batch=(1, 2), rounds=1,
        pretrained="", width=64, layers=4, heads=4, ffn=64, vocab=128, sums=(OWN, "int8", *GAINS),
    )  # fmt: skip
    rows = run(COMMAND, few).rows
    found = {(row["layout"], row["format"], row["batch"]) for row in rows}
    sums = (OWN, "int8", CALIBRATED, "feature-int4-static")
    names = {"pipeline": (OWN, "int8"), "tensor": sums, "both": sums}
    assert found == {(layout, name, batch) for layout in layouts for name in names[layout] for batch in (1, 2)}
    own = {(row["layout"], row["batch"]): row["prefill_ms"] for row in rows if row["format"] == OWN}
    for row in rows:
        assert row["prefill_speedup"] == own[row["layout"], row["batch"]] / row["prefill_ms"]
        assert row["ranks"] == 2 * per_host


def test_agreement_is_measured_of_sums_too(forked: None, settings: GenerationBenchmark):
    few = dataclasses.replace(settings, layouts=("tensor",), sums=(OWN, "int8"), rounds=1)
    own, byte = run(COMMAND, few).rows
    assert (own["same_tokens"], own["loss_increase"]) == (1, 0)
    assert byte["same_tokens"] > 0.9


def test_medians_and_bytes_of_both_hosts(settings: GenerationBenchmark):
    link: dict[str, Any] = {"link": "25mbit", "link_mbit": 25.0, "goodput_mbit": 24.0}
    contender = {"layout": "pipeline", "name": "int4", "chunk": 0, "batch": 1}
    one = Taken(phase="generate", contender=contender, ranks=2, link=link)
    for first, last in ((0.1, 0.01), (0.3, 0.03), (0.2, 0.05)):
        answer = {"prefill": first, "decode": last, "sent": 100, "bits_prefill": 4.5, "bits_decode": 8.0}
        one.turns.append([answer, {**answer, "prefill": 0.0, "sent": 20}])
    row = row_of(settings, one, {})
    assert (row["prefill_ms"], row["prefill_ms_low"], row["prefill_ms_high"]) == (200, 100, 300)
    assert (row["decode_ms"], row["bytes_sent"], row["loss"]) == (30, 120, None)
