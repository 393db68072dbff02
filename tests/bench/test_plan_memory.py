"""`lowbit plan memory`; that its bytes are real is checked in tests/activations/test_held.py."""

import dataclasses
import json
from pathlib import Path

import pytest

from lowbit.bench.plan_memory import Settings, parse_bytes
from lowbit.bench.plan_stages import StageMeter
from lowbit.cli.legacy import explanations
from lowbit.cli.reports import PLANS
from tests.command_line import invoke

TINY = Settings(
    ranks=2, microbatches=2, sequence=32, dim=64, layers=5, heads=2, error_tokens=32, error_steps=1, max_bytes=20_000
)


def test_a_plan_is_shown_written_and_drawn(tmp_path: Path):
    file, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    words = [
        f"--{field.name.replace('_', '-')}={getattr(TINY, field.name)}"
        for field in dataclasses.fields(TINY)
        if isinstance(getattr(TINY, field.name), int)
    ]
    result = invoke("plan", "memory", *words, "--json", str(file), "--png", str(picture), columns=100)
    assert result.exit_code == 0, result.output
    assert "relative error of the gradient" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(file.read_text())
    assert written["command"] == "plan memory"
    first, last = written["rows"]
    assert (first["layers"], last["layers"], first["held"], last["held"]) == (3, 2, 2, 1)
    assert first["saved_bytes"] <= first["int4_bytes"] < first["bf16_bytes"] / 2
    assert last["mlp"] >= first["mlp"]
    activation, logits = (4 * 32 * 64, 2 * 32 * 256)  # float32 on the wire, bfloat16 from the output matrix
    assert first["pipeline_bytes"] == 2 * activation  # outputs held
    assert last["pipeline_bytes"] == logits + activation  # and what it was given
    for row in (first, last):
        assert row["device_bytes"] == sum(row[f"{what}_bytes"] for what in ("fixed", "saved", "pipeline"))
    assert max(first["device_bytes"], last["device_bytes"]) <= first["budget"]
    assert first["error_all"] < first["error_int4"]
    too_small = invoke("plan", "memory", *words, "--budget", "1mb")
    assert too_small.exit_code == 2
    assert f"allowed: at least {first['least']:,}, which rank 0 needs" in too_small.stderr


def test_gradients_and_optimizer_in_8_bits_take_less():
    small = dataclasses.replace(TINY, gradients="fp8", optimizer="adamw-8bit")
    wide, narrow = (StageMeter(s).stage(s.layout, 0).cost.fixed for s in (TINY, small))
    assert narrow / wide == pytest.approx((4 + 1.01 + 2.03) / 16, rel=0.02)


def test_settings_are_options_and_explained():
    assert list(PLANS) == ["memory"]
    fields = [field.name for field in dataclasses.fields(Settings)]
    assert [field for field in fields if field not in explanations(Settings)] == []


@pytest.mark.parametrize(
    ("text", "size"), [("24gb", 24 * 10**9), ("1.5 GiB", 3 << 29), ("800mb", 8 * 10**8), ("123", 123)]
)
def test_budgets_are_written_with_their_unit(text: str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": "much"}, "budget is 'much'; allowed: bytes, such as 24gb"),
        ({"budget": "1.2.3gb"}, "budget is '1.2.3gb'"),
        ({"ranks": 16, "microbatches": 16}, "the pipeline has 16 stages"),
        ({"schedule": "2F2B"}, "pipeline.schedule is '2F2B'"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; allowed: 'adamw', 'adamw-8bit'"),
        ({"gradients": "fp7"}, "codec is 'fp7'"),
        ({"sequence": 0}, "sequence is 0; allowed: at least 1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)
