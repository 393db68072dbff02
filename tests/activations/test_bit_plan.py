"""Files of plans: what is written is read, and anything else is one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lowbit.activations import BitPlan, LayerAware

BITS = {"norm": 8, "mlp": 3, "linear": 16}
PLAN = BitPlan(stages=(BITS, dict.fromkeys(BITS, 16)), group=32, made_for={"model.dim": 64, "model.tied": None})


def test_what_is_written_is_read(tmp_path: Path):
    PLAN.write(tmp_path / "plan.json")
    plan = BitPlan.read(tmp_path / "plan.json")
    assert plan == PLAN
    assert plan.policy(0) == LayerAware(norm=8, mlp=3, linear=16, attention=16, group=32)
    assert plan.policy(1, rounding="stochastic").rounding == "stochastic"
    assert os.listdir(tmp_path) == ["plan.json"]
    with pytest.raises(ValueError, match="stage is 2; allowed: 0 to 1"):
        plan.policy(2)


def written(folder: Path, **changes: Any) -> Path:
    PLAN.write(folder / "plan.json")
    values = json.loads((folder / "plan.json").read_text()) | changes
    (folder / "plan.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return folder / "plan.json"


@pytest.mark.parametrize(("changes", "says"), [
    ({"format": "other"}, "has format 'other'; allowed: 'lowbit plan of saved activations'"),
    ({"format": "\x1b[2J" + "x" * 999}, r"has format '\\x1b\[2Jx{50,120}\.\.\.; allowed"),
    ({"version": 2}, "has version 2; this lowbit reads version 1 here"),
    ({"version": [1]}, r"has version \[1\]; this lowbit"),
    ({"stages": ...}, "is not a memory plan: it lacks made_for, group or stages"),
    ({"stages": {"0": BITS}}, "is not a memory plan: it lacks made_for, group or stages"),
    ({"more": 1}, "or has more than these"),
    ({"made_for": [1]}, "is not a memory plan: it lacks"),
    ({"made_for": {"a": "x" * 999}}, "is not a memory plan: made_for"),
    ({"made_for": {"a": [1]}}, "is not a memory plan: made_for"),
    ({"stages": []}, "stages has 0 entries; allowed: 1 to 4096"),
    ({"stages": [BITS] * 5000}, "stages has 5000 entries"),
    ({"stages": [4]}, r"stages\[0\] is 4; allowed: bits for norm, mlp, linear"),
    ({"stages": [BITS, {"norm": 8, "mlp": 4}]}, r"stages\[1\] is \{"),
    ({"stages": [{**BITS, "attention": 4}]}, r"stages\[0\] is \{"),
    ({"stages": [{**BITS, "norm": None}]}, r"stages\[0\]\['norm'\] is None; allowed: 2 to 8, or 16"),
    ({"stages": [{**BITS, "mlp": 9}]}, r"stages\[0\]\['mlp'\] is 9"),
    ({"stages": [{**BITS, "mlp": 4.0}]}, r"is 4\.0; allowed"),
    ({"stages": [{**BITS, "mlp": True}]}, r"is True; allowed"),
    ({"stages": [{**BITS, "mlp": 10**4000}]}, "is not a memory plan"),
    ({"group": 12}, "group is 12"),
    ({"group": "64"}, "group is '64'"),
])  # fmt: skip
def test_other_content_is_one_short_line(tmp_path: Path, changes: dict[str, Any], says: str):
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError, match=says) as caught:
        BitPlan.read(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert text.isprintable()
    assert len(text) < len(str(path)) + 200


@pytest.mark.parametrize(("data", "says"), [
    (b"", "is not JSON"),
    (b"\xff\xfe{", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    (b'{"version": ' + b"9" * 5000 + b"}", "is not JSON"),
    (b"[]", "does not hold a JSON object"),
    (b" " * (1 << 21), "has more than 1048576 bytes"),
])  # fmt: skip
def test_other_bytes_are_one_line(tmp_path: Path, data: bytes, says: str):
    (tmp_path / "plan.json").write_bytes(data)
    with pytest.raises(ValueError, match=says):
        BitPlan.read(tmp_path / "plan.json")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        BitPlan.read(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a regular file"):
        BitPlan.read(tmp_path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        BitPlan.read(tmp_path / "none")
