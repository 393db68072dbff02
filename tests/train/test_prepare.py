from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.train import ConfigError, launch, run
from lowbit.train.folder import RunFolder
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
    ("pipeline", {"forward": "int9"}, "pipeline.forward: codec is 'int9'; allowed: .*fp32"),
    ("pipeline", {"backward": "GroupInt(bits=1)"}, "pipeline.backward: bits is 1; allowed"),
    ("pipeline", {"backward": "SubspaceQuant(directions=33)"}, r"pipeline.backward: directions is 33, .* to 32"),
    ("pipeline", {"forward": "SubspaceQuant(directions='auto')"}, r"pipeline.warmup_steps is 0, and .*forw"),
    ("pipeline", {"microbatches": 1}, "pipeline.microbatches is 1; allowed with 1F1B"),
    ("run", {"output": "{folder}/empty.txt/run"}, "run.output '.*' cannot be written to: Not a dir"),
    ("run", {"device": "cuda"}, "run.device is cuda; this machine has 0 devices"),
]


@pytest.mark.parametrize(("section", "values", "message"), WRONG, ids=lambda v: str(v)[:30])
def test_wrong_settings_are_one_line_before_any_process_starts(
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
    RunFolder(Path(config.run.output)).note("metrics.jsonl")
    (Path(config.run.output) / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"holds a run already \(metrics\.jsonl\); .* run\.resume"):
        prepare(config, ranks=2)
    for choice in ({"resume": "auto"}, {"overwrite": True}):
        prepare(again(config, run=choice), ranks=2)


@pytest.mark.parametrize(
    "foreign",
    [
        ("config.json", "model/precious.safetensors"), ("model/model.safetensors",), ("metrics.jsonl",), ("model",),
        ("checkpoints/step-00000002/rank-0/tensors.safetensors",), ("checkpoints/step-00000001/rank-0/.metadata",),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("marked", [False, True])
def test_what_lowbit_did_not_make_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: tuple[str, ...], marked: bool
):
    config = tiny(tmp_path, run={"output": ".", "save_model": True})
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    if marked:
        RunFolder(Path()).note("summary.json")
    for name in foreign:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("precious")
    monkeypatch.setattr(launch, "start_ranks", lambda config: pytest.fail("started"))
    for overwrite in (True, False):
        with pytest.raises(ConfigError, match="which lowbit has no record of making") as caught:
            run(again(config, run={"overwrite": overwrite}))
        assert f"run.output '.' holds {foreign[0]}" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert ("lowbit-run.jsonl" in str(caught.value)) == (not marked)
    assert [Path(name).read_text() for name in foreign] == ["precious"] * len(foreign)


def test_checkpoints_of_an_older_version_are_refused(tmp_path: Path):
    config = tiny(tmp_path, run={"overwrite": False, "resume": True})
    share = Path(config.run.output) / "checkpoints" / "step-00000003" / "rank-0"
    share.mkdir(parents=True)
    for name in (share / ".metadata", share / "run.json", Path(config.run.output) / "config.json"):
        name.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"step-00000003/rank-0 is of an older lowbit and is not"):
        prepare(config, ranks=2)
    for values in ({"resume": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(ConfigError, match="holds config.json, .*or an older one"):
            prepare(again(config, run=values), ranks=2)


@pytest.mark.parametrize(("native", "auto"), [(True, torch.bfloat16), (False, None)])
def test_precision_follows_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool, auto: torch.dtype | None
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    expected = {"fp32": None, "bf16": torch.bfloat16, "auto": auto}
    for precision, autocast in expected.items():
        config = tiny(tmp_path, run={"precision": precision, "device": "cpu"})
        assert prepare(config, ranks=2).autocast == autocast
