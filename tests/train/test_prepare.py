from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.train import ConfigError, launch, run
from lowbit.train.prepare import prepare
from tests.train.runs import again, tiny

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("data", {"text": "{folder}/absent.txt"}, r"data\.text '.*absent\.txt': no such file"),
    ("data", {"text": "{folder}/empty.txt"}, r"data\.text .*/empty\.txt is empty"),
    ("data", {"sequence": 100_000}, "data.sequence is 100000; .* allowed: at most"),
    ("data", {"batch": 4000}, "data.batch is 4000; .* allowed: at most as many"),
    ("data", {"tokenizer": "absent"}, "data.tokenizer is 'absent'; allowed: bytes, or a folder"),
    ("data", {"held_out": "{folder}/absent"}, "data.held_out '.*absent': no such file"),
    ("model", {"layers": 1}, "the pipeline has 2 stages .*, the model 1 layers; allowed: at most"),
    ("model", {"pretrained": "absent"}, "model.pretrained is 'absent'"),
    ("model", {"vocab": 7}, "vocabulary has 7 entries, the tokenizer 256"),
    ("pipeline", {"forward": "int9"}, "pipeline.forward: codec is 'int9'; allowed: fp32"),
    ("pipeline", {"backward": "GroupInt(bits=1)"}, "pipeline.backward: bits is 1; allowed"),
    (
        "pipeline",
        {"backward": "SubspaceQuant(rank=33)"},
        r"pipeline.backward: rank is 33, .* to 32",
    ),
    (
        "pipeline",
        {"forward": "SubspaceQuant(rank='auto')"},
        r"pipeline.warmup_steps is 0, and .*forw",
    ),
    ("pipeline", {"microbatches": 1}, "pipeline.microbatches is 1; allowed with 1F1B"),
    (
        "run",
        {"output": "{folder}/empty.txt/run"},
        "run.output '.*' can not be written to: Not a dir",
    ),
    ("run", {"device": "cuda"}, "run.device is cuda; this machine has 0 devices"),
]


@pytest.mark.parametrize(("section", "values", "message"), WRONG, ids=lambda v: str(v)[:30])
def test_what_can_not_work_is_one_line_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section, values, message
):
    if "cuda" in values.values() and torch.cuda.is_available():
        pytest.skip("this machine has what the test wants to be absent")
    (tmp_path / "empty.txt").touch()
    named = {
        key: value.replace("{folder}", str(tmp_path)) if isinstance(value, str) else value
        for key, value in values.items()
    }
    config = tiny(tmp_path, **{section: named})
    monkeypatch.setattr(launch, "start_ranks", lambda config: pytest.fail("started"))
    with pytest.raises(ConfigError, match=message) as caught:
        run(config)
    assert "\n" not in str(caught.value)


def test_an_output_folder_with_a_run_is_not_overwritten_by_accident(tmp_path: Path):
    config = tiny(tmp_path, run={"overwrite": False})
    prepare(config, ranks=2)
    (Path(config.run.output) / "metrics.jsonl").touch()
    with pytest.raises(
        ConfigError, match=r"holds a run already \(metrics\.jsonl\); .* run\.resume"
    ):
        prepare(config, ranks=2)
    for choice in ("resume", "overwrite"):
        prepare(again(config, run={choice: True}), ranks=2)


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (4, {}, "written with ranks = 2, this run has 4"),
        (1, {}, "written with ranks = 2, this run has 1"),
        (
            2,
            {"forward": "int4"},
            r"pipeline.forward = .*float32.*, this run has .*GroupInt\(bits=4",
        ),
        (
            2,
            {"backward": "SubspaceQuant(rank=3)"},
            r"pipeline.backward = .*\(rank=2,.*, this run has .*\(rank=3",
        ),
    ],
)
def test_a_resume_that_does_not_fit_is_refused(tmp_path: Path, ranks, changes, message):
    codecs = {"backward": "SubspaceQuant(rank=2)"}
    config = tiny(tmp_path, pipeline=codecs, run={"overwrite": False, "resume": True})
    for rank in range(2):
        folder = Path(config.run.output) / "checkpoints" / "step-00000003" / f"rank-{rank}"
        folder.mkdir(parents=True)
        facts = prepare(again(config, run={"resume": False, "overwrite": True}), ranks=2)
        (folder / "run.json").write_text(json.dumps(facts.checkpoints(rank).facts))
    prepare(config, ranks=2)
    with pytest.raises(ConfigError, match=message):
        prepare(again(config, pipeline=changes), ranks=ranks, rank=ranks - 1)


@pytest.mark.parametrize(("native", "auto"), [(True, torch.bfloat16), (False, None)])
def test_precision_follows_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool, auto: torch.dtype | None
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    expected = {"fp32": None, "bf16": torch.bfloat16, "auto": auto}
    for precision, autocast in expected.items():
        config = tiny(tmp_path, run={"precision": precision, "device": "cpu"})
        assert prepare(config, ranks=2).autocast == autocast
