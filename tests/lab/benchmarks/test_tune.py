"""`python -m benchmarks tune`: its questions, and one small real run."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.tune import COMMAND, TuneBenchmark
from benchmarks.tune_task import write_questions
from lowbit.report import run
from lowbit.train.config import DataConfig, LoraConfig, ModelConfig, PipelineConfig
from lowbit_lab.network import Link


def test_questions_have_one_answer_each_and_no_answer_is_the_usual_one(tmp_path: Path):
    kinds = write_questions(tmp_path / "questions.jsonl", 300)
    samples = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert len({sample["prompt"] for sample in samples}) == len(samples) == 300
    answers = Counter(sample["answer"] for sample in samples)
    assert len(answers) == kinds > 5
    assert max(answers.values()) <= 50
    assert all(sample["answer"] in ("if", "while") for sample in samples if sample["prompt"].startswith("if "))


@pytest.mark.slow
def test_a_real_run():
    pytest.importorskip("peft")
    settings = TuneBenchmark(
        links=(Link(None),), boundaries=("fp32", "int4 / int4"), model=ModelConfig(dim=32, layers=2, heads=2),
        data=DataConfig(batch=4, sequence=64), pipeline=PipelineConfig(microbatches=2), start_steps=2, questions=100,
        steps=2, lora=LoraConfig(rank=2), precision="fp32",
    )  # fmt: skip
    report = run(COMMAND, settings)
    rows = list(report.rows)
    assert [row["boundary"] for row in rows] == ["fp32", "int4 / int4"]
    assert rows[0]["held_out_loss_before"] == rows[1]["held_out_loss_before"], "the same weights"
    assert all(row["held_out_loss"] != row["held_out_loss_before"] for row in rows)
    assert all(0 <= row["exact_match"] <= 1 for row in rows)
    assert all(row["hours"] == pytest.approx(2 * row["seconds_per_step"] / 3600) for row in rows)
    assert rows[1]["bits_forward"] < 6 < rows[0]["bits_forward"]
