import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.train import ConfigError, launch, run
from lowbit.train.folder import RunFolder
from lowbit.train.prepare import prepare
from tests.train.runs import again, tiny

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("run", {"backend": "nccl", "device": "cpu"}, "run.backend is nccl; allowed on the CPU: auto or gloo"),
    ("data", {"text": "absent.txt"}, r"data\.text has '.*absent\.txt', where there is no file"),
    ("data", {"text": "empty.txt"}, r"data\.text empty\.txt is empty"),
    ("data", {"sequence": 100_000}, "data.sequence is 100000; .* allowed: at most"),
    ("data", {"batch": 4000}, "data.batch is 4000; .* allowed: at most as many"),
    ("data", {"tokenizer": "absent"}, "data.tokenizer is 'absent'; allowed: bytes, or a folder"),
    ("data", {"held_out": "absent"}, "data.held_out has '.*absent', where there is no file"),
    ("model", {"layers": 1}, "the pipeline has 2 stages .*, the model 1 layers; allowed: at most"),
    ("model", {"pretrained": "absent"}, "model.pretrained is 'absent'"),
    ("model", {"vocab": 7}, "vocabulary has 7 entries, the tokenizer 256"),
    ("pipeline", {"forward": "int9"}, "pipeline.forward: codec is 'int9'; allowed: .*fp32"),
    ("pipeline", {"backward": "GroupInt(bits=1)"}, "pipeline.backward: bits is 1; allowed"),
    ("pipeline", {"backward": "TransformQuant(bits=0.1)"}, r"pipeline.backward: bits is 0.1, .*allowed: at least"),
    ("pipeline", {"forward": "TransformQuant(bits='auto')"}, r"pipeline.warmup_steps is 0, and .*forw"),
    ("pipeline", {"microbatches": 1}, "pipeline.microbatches is 1; allowed with 1F1B"),
    ("run", {"output": "empty.txt/run"}, "run.output '.*' cannot be written to: Not a dir"),
    ("run", {"device": "cuda"}, "run.device is cuda; this machine has 0 devices"),
    ("data", {"batch": 6}, r"data.batch is 6; allowed: a multiple of pipeline.microbatches \(4\)$"),
    ("pipeline", {"data_parallel": 4}, r"data.batch is 8; .* times data_parallel \(4\)"),
    ("pipeline", {"data_parallel": 0}, "pipeline.data_parallel is 0"),
    ("gradients", {"all_reduce": "aq-sgd"}, "gradients.all_reduce: codec is AQSGD"),
    ("gradients", {"all_reduce": "nope"}, "gradients.all_reduce: codec is 'nope'"),
    ("gradients", {"storage": "fp9"}, "gradients.storage: codec is 'fp9'; allowed: .*fp32"),
    ("gradients", {"storage": "aq-sgd"}, "gradients.storage is 'aq-sgd', which keeps state between messages"),
    *(("pipeline", {"tied_rows": n}, "pipeline.tied_rows: codec is") for n in ("nope", "aq-sgd", "feature-int4")),
    *(
        ("pipeline", {"backward": text}, r"^pipeline\.backward: ")
        for text in ("int1", "GroupInt(bits=6", "GroupInt(bit=6)", "GroupInt(bits=9)")
    ),
    ("lora", {"alpha": 4.0}, "lora.alpha is 4.0 and lora.rank is 0; allowed: with lora.rank of at least 1"),
    ("lora", {"rank": -1}, "lora.rank is -1; allowed: at least 0"),
    ("lora", {"rank": 4, "dropout": 1.0}, "lora.dropout is 1.0; allowed: at least 0 and less than 1"),
    ("lora", {"rank": 4, "targets": []}, "lora.targets is empty; allowed: names of linear layers, or all-linear"),
    ("lora", {"rank": 4}, "lora.rank is 4 and model.pretrained is empty; allowed: with model.pretrained only"),
    ("run", {"method": "agoc"}, r"run\.method is 'agoc'; allowed: none, agoq"),
    ("optimizer", {"states": "4bit"}, r"optimizer\.states is '4bit'; allowed: fp32, 8bit"),
    ("run", {"supervise": True}, "supervise and run.overwrite are both true"),
]


def test_wrong_settings_are_one_line_before_any_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "start_ranks", lambda config: pytest.fail("started"))
    unlike: list[str] = []
    for section, values, message in WRONG:
        if values.get("device") == "cuda" and torch.cuda.is_available():
            continue  # this machine has what the test wants to be absent
        error = ""
        try:
            run(tiny(tmp_path, **{section: values}))
        except ConfigError as raised:
            error = str(raised)
        if not re.search(message, error) or "\n" in error:
            unlike.append(f"{section} {values}: {error}")
    assert unlike == []


def test_an_output_folder_with_a_run_is_not_overwritten_by_accident(tmp_path: Path):
    config = tiny(tmp_path, run={"overwrite": False})
    prepare(config, ranks=2)
    RunFolder(Path(config.run.output)).note("metrics.jsonl")
    (Path(config.run.output) / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"a run already \(metrics\.jsonl\); .*\(--resume\).* \(--overwrite\) to"):
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


@pytest.mark.parametrize(("native", "auto"), [(True, torch.bfloat16), (False, None)])
def test_precision_follows_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool, auto: torch.dtype | None
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    expected = {"fp32": None, "bf16": torch.bfloat16, "auto": auto}
    for precision, autocast in expected.items():
        config = tiny(tmp_path, run={"precision": precision, "device": "cpu"})
        assert prepare(config, ranks=2).autocast == autocast
