"""`lowbit bench tensor-parallel` and `bench generation`: a small real run of each, and the arithmetic of their rows."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit_lab.bench import generation, tensor_parallel
from lowbit_lab.bench.generation import CALIBRATED, GAINS, OWN, GenerationBenchmark
from lowbit_lab.bench.sums import Taken
from lowbit_lab.bench.tensor_parallel import TensorParallelBenchmark
from lowbit_lab.bench.workers import set_link
from lowbit_lab.network import Link
from lowbit_run.report import Report, run
from lowbit_run.train.config import DataConfig, ModelConfig
from tests.lowbit_lab.bench.shown import shown
from tests.lowbit_lab.evaluate.models import TEXT

TINY = TensorParallelBenchmark(
    links=(Link(None),), ranks=(2,), tokens=(2, 300), width=256, rounds=1, prefill=16,
    model=ModelConfig(dim=64, layers=1, heads=2, ffn=64),
)  # fmt: skip


@pytest.fixture(scope="module")
def sums(forked: None) -> Report:
    seen: list[int] = []
    done = run(tensor_parallel.COMMAND, TINY, on_rows=lambda rows: seen.append(len(rows)))
    assert seen[:2] == [10, 2 * 10]
    assert len(done.rows) == 2 * 10 + 4
    return done


def test_rows_of_sums_and_prefill_have_the_agreed_fields_and_errors(sums: Report, tmp_path: Path):
    agreed = "format algorithm link_mbit ranks numel ms spread speedup_bf16 bits_per_value"
    rows = [row for row in sums.rows if "tokens_per_second" not in row]
    found = {(row["format"], row["algorithm"], row["tokens"]): row for row in rows}
    for (_, _, tokens), row in found.items():
        assert row.keys() >= set(agreed.split())
        assert row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["speedup_bf16"] == found["bf16", "ring", tokens]["ms"] / row["ms"]
        assert row["numel"] == 256 * tokens
        assert row["choice"] in (("plain", "one_shot") if row["algorithm"] == "auto" else (row["algorithm"],))
    bits = {row["format"]: row["bits_per_value"] for row in rows if row["choice"] != "plain"}
    expected = {"bf16": 16, "int4": 4 + 16 / 256, "int8": 8.125, "feature-int4": (16 + 16 * 4 + 4 * 252) / 256}
    assert bits == pytest.approx(expected, abs=1e-3)
    error = {(row["format"], row["algorithm"]): row["relative_error"] for row in rows}
    assert error["bf16", "ring"] < 5e-3
    for name in ("int4", "int8", "feature-int4"):
        assert error[name, "one_shot"] < error[name, "two_shot"]
    assert 2 * error["feature-int4", "one_shot"] < error["int4", "one_shot"] < 0.3
    prefill = {row["format"]: row for row in sums.rows if row.get("tokens_per_second")}
    assert set(prefill) == set(TINY.formats)
    for row in prefill.values():
        assert row["tokens_per_second"] == pytest.approx(1e3 * 16 / row["ms"])
        assert row["speedup_bf16"] == prefill["bf16"]["ms"] / row["ms"]
        assert row["numel"] == 16 * 64
    text = shown(tensor_parallel.COMMAND, sums.rows, tmp_path)
    assert "All-reduce of partial sums, 256 features a token" in text
    assert "Prefill of 16 tokens" in text


def test_crossover_is_the_size_from_which_on_all_are_faster():
    taken = []
    for tokens, ms in ((1, 0.5), (4, 2.0), (16, 0.9), (64, 0.2)):
        for name, algorithm, factor in (("bf16", "ring", 1.0), ("int4", "one_shot", ms)):
            contender, link = {"name": name, "algorithm": algorithm}, set_link(None, Link(None)) | {"goodput_mbit": 1.0}
            one = Taken(phase=f"sum of {tokens}", contender=contender, ranks=2, link=link)
            one.turns.append([{"seconds": factor * 1e-3, "sent": 10.0}] * 2)
            taken.append(one)
    rows = {
        (r["format"], r["tokens"]): r for r in tensor_parallel.rows_of(TINY, taken, {"bf16": 16.0, "int4": 4.0}, {})
    }
    assert rows["int4", 64]["crossover"] == rows["int4", 1]["crossover"] == 16 * 256
    assert rows["bf16", 64]["crossover"] is None
    # Two ranks on hosts of their own, which each sent 10 bytes where as many elements as the message has must travel.
    assert rows["int4", 64]["wire_bits"] == 8 * 10 / (64 * 256)


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
        data=DataConfig(text=(str(folder / "text.txt"),), tokenizer="bytes", sequence=32, batch=1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(forked: None, settings: GenerationBenchmark) -> Report:
    seen: list[int] = []
    done = run(generation.COMMAND, settings, on_rows=lambda rows: seen.append(len(rows)))
    assert seen == [5, 5]
    return done


def test_rows_of_generation_have_times_bits_and_agreement(report: Report, tmp_path: Path):
    rows = {(row["format"], row["chunk"]): row for row in report.rows}
    assert rows.keys() == {(OWN, 0), ("bf16", 0), ("bf16", 7), ("int4", 0), ("int4", 7)}
    for row in rows.values():
        for phase, tokens in (("prefill", PROMPT), ("decode", 1)):
            assert 0 < row[f"{phase}_ms_low"] <= row[f"{phase}_ms"] <= row[f"{phase}_ms_high"]
            assert row[f"{phase}_tokens_per_second"] == 1e3 * tokens / row[f"{phase}_ms"]
            assert row[f"{phase}_speedup"] == rows[OWN, 0][f"{phase}_ms"] / row[f"{phase}_ms"]
        assert row["rounds"] == 2
        if row["format"] in (OWN, "bf16"):
            assert (row["same_tokens"], row["same_texts"], row["loss_increase"]) == (1, 1, 0)
    bits = {place: (row["bits_prefill"], row["bits_decode"]) for place, row in rows.items()}
    assert bits[OWN, 0] == (16, 16)
    # Beside the prompt's checksum, two empty messages take the receives that the last turn has left posted.
    assert bits["bf16", 0] == (16 + 3 * 64 / (PROMPT * 64), 16 + 64 / 64)
    assert bits["int4", 0][0] < bits["int4", 7][0] < bits["bf16", 0][0]
    assert 0 < rows["int4", 0]["same_tokens"] < 1
    assert rows["int4", 0]["loss"] != rows[OWN, 0]["loss"]
    text = shown(generation.COMMAND, report.rows, tmp_path)
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
    rows = run(generation.COMMAND, few).rows
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
    own, byte = run(generation.COMMAND, few).rows
    assert (own["same_tokens"], own["loss_increase"]) == (1, 0)
    assert byte["same_tokens"] > 0.9


def test_medians_and_bytes_of_both_hosts(settings: GenerationBenchmark):
    link: dict[str, Any] = {"link": "25mbit", "link_mbit": 25.0, "goodput_mbit": 24.0}
    contender = {"layout": "pipeline", "name": "int4", "chunk": 0, "batch": 1}
    one = Taken(phase="generate", contender=contender, ranks=2, link=link)
    for first, last in ((0.1, 0.01), (0.3, 0.03), (0.2, 0.05)):
        answer = {"prefill": first, "decode": last, "sent": 100, "bits_prefill": 4.5, "bits_decode": 8.0}
        one.turns.append([answer, {**answer, "prefill": 0.0, "sent": 20}])
    row = generation.row_of(settings, one, {})
    assert (row["prefill_ms"], row["prefill_ms_low"], row["prefill_ms_high"]) == (200, 100, 300)
    assert (row["decode_ms"], row["bytes_sent"], row["loss"]) == (30, 120, None)
