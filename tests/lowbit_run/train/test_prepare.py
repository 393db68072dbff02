from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit_run.train import ConfigError, TrainConfig, launch, run
from lowbit_run.train.folder import RunFolder
from lowbit_run.train.prepare import prepare
from tests.lowbit_run.train.runs import again, tiny
from tests.refused import refused

WRONG: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"run": {"backend": "nccl", "device": "cpu"}}, "run.backend is nccl; the ranks compute on the CPU; allowed: auto"),
    ({"data": {"text": "absent.txt"}}, r"data\.text has '.*absent\.txt', where there is no file"),
    ({"data": {"text": "empty.txt"}}, r"data\.text empty\.txt is empty"),
    ({"data": {"sequence": 100_000}}, "sequence is 100000; .* has 10165 tokens to train on; allowed: at least"),
    ({"data": {"batch": 4000}}, "batch is 4000 and data.sequence is 16; .* has 10165 tokens .* at least 64001"),
    ({"data": {"tokenizer": "absent"}}, "data.tokenizer is 'absent'; allowed: bytes, or a folder"),
    ({"data": {"held_out": "absent"}}, "data.held_out has '.*absent', where there is no file"),
    ({"model": {"layers": 1}}, "the pipeline has 2 stages .*, the model 1 layers; allowed: at most"),
    ({"model": {"pretrained": "absent"}}, "model.pretrained is 'absent'"),
    ({"model": {"vocab": 7}}, "vocabulary has 7 entries, the tokenizer 256"),
    ({"pipeline": {"forward": "int9"}}, "pipeline.forward: codec is 'int9'; allowed: .*fp32"),
    ({"pipeline": {"backward": "GroupInt(bits=1)"}}, "pipeline.backward: bits is 1; allowed"),
    ({"pipeline": {"backward": "TransformQuant(bits=0.1)"}}, r"pipeline.backward: bits is 0.1, .*allowed: at least"),
    ({"pipeline": {"forward": "TransformQuant(bits='auto')"}}, r"warmup_steps is 0, and pipeline.forward has Tr"),
    ({"pipeline": {"microbatches": 1}}, "pipeline.microbatches is 1; allowed with 1F1B"),
    ({"run": {"output": "empty.txt/run"}}, "run.output '.*' cannot be written to: Not a dir"),
    ({"data": {"batch": 6}}, r"data.batch is 6; allowed: a multiple of pipeline.microbatches \(4\)$"),
    ({"pipeline": {"data_parallel": 4}}, r"data.batch is 8; .* times data_parallel \(4\)"),
    ({"pipeline": {"data_parallel": 0}}, "pipeline.data_parallel is 0"),
    ({"gradients": {"all_reduce": "aq-sgd"}}, "gradients.all_reduce: codec is AQSGD"),
    ({"gradients": {"all_reduce": "nope"}}, "gradients.all_reduce: codec is 'nope'"),
    ({"gradients": {"storage": "fp9"}}, "gradients.storage: codec is 'fp9'; allowed: .*fp32"),
    ({"gradients": {"storage": "aq-sgd"}}, "gradients.storage is 'aq-sgd', which keeps state between messages"),
    *(({"pipeline": {"tied_rows": n}}, "pipeline.tied_rows: codec is") for n in ("nope", "aq-sgd", "feature-int4")),
    *(
        ({"pipeline": {"backward": text}}, r"^pipeline\.backward: ")
        for text in ("int1", "GroupInt(bits=6", "GroupInt(bit=6)", "GroupInt(bits=9)")
    ),
    ({"lora": {"alpha": 4.0}}, "lora.alpha is 4.0 and lora.rank is 0; allowed: with lora.rank of at least 1"),
    ({"lora": {"rank": -1}}, "lora.rank is -1; allowed: at least 0"),
    ({"lora": {"rank": 4, "dropout": 1.0}}, "lora.dropout is 1.0; allowed: at least 0 and less than 1"),
    ({"lora": {"rank": 4, "targets": []}}, "lora.targets is empty; allowed: names of linear layers, or all-linear"),
    ({"lora": {"rank": 4}}, "lora.rank is 4 and model.pretrained is empty; allowed: with model.pretrained only"),
    ({"run": {"method": "agoc"}}, r"run\.method is 'agoc'; allowed: none, agoq"),
    ({"optimizer": {"states": "4bit"}}, r"optimizer\.states is '4bit'; allowed: fp32, 8bit"),
    ({"run": {"supervise": True}}, "supervise and run.overwrite are both true"),
    ({"data": {"text": "*.none"}}, r"data\.text has '.*\*\.none'"),
    ({"data": {"held_out": "short.txt"}}, r"data.held_out has 10 tokens; .* data.sequence \(16\)"),
    ({"data": {"dataset": "b"}}, "allowed: one of the two"),
    ({"model": {"dim": 30, "heads": 4}}, "model.dim is 30; allowed: a multiple"),
    ({"model": {"dim": 12, "heads": 4}}, "even width"),
    ({"model": {"heads": 4, "kv_heads": 3}}, "model.kv_heads is 3; allowed: a divisor"),
    ({"model": {"tied": "yes"}}, "model.tied is 'yes'; allowed: true, false or nothing"),
    ({"optimizer": {"lr": float("nan")}}, "optimizer.lr is nan; allowed: a finite number"),
    ({"optimizer": {"lr": 10**400}}, "optimizer.lr takes 1330 bits; allowed: integers of 64"),
    ({"run": {"steps": 2**63}}, "run.steps takes 65 bits; allowed: integers of 64 bits"),
    ({"run": {"timeout_seconds": 1e9}}, r"is 10{9}\.0; allowed: at least 1 and at most 1000000"),
    ({"run": {"resume": True}}, "allowed: one of the two"),
    ({"run": {"resume": "yes", "overwrite": False}}, "run.resume is 'yes'; allowed: true, false or auto"),
    ({"pipeline": {"schedule": "2F2B"}}, "pipeline.schedule is '2F2B'; allowed: GPipe,"),
    ({"pipeline": {"stages_per_rank": 2}}, "stages_per_rank is 2; allowed with 1F1B: 1"),
    ({"pipeline": {"schedule": "ZBVZeroBubble"}}, "is 1; allowed with ZBVZeroBubble: 2"),
    ({"pipeline": {"ranks": 4, "microbatches": 2}}, r"is 2; allowed with 1F1B: at least .* \(4 on 4 ranks\)"),
    (
        {"pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2, "microbatches": 5}, "data": {"batch": 10}},
        "microbatches is 5; allowed with Interleaved1F1B on 2 ranks: a multiple of 2",
    ),
    *(
        ({"pipeline": {"layers": n}}, r"layers is \[.*; allowed: a number for each of the 2 stages, 4 together, as the")
        for n in ([3, 2], [2, 1, 1], [4])
    ),
    ({"pipeline": {"layers": [4, 0]}}, r"pipeline.layers is \[4, 0\]; allowed: at least 1"),
    ({"pipeline": {"forward": ["int4", "int4"]}}, "pipeline.forward lists 2 codecs; allowed: one for"),
    *(
        ({"pipeline": values}, "allowed with auto: auto alone in forward, auto or nothing in backward")
        for values in (
            {"forward": ["auto", "int4", "int4"]}, {"backward": "auto"}, {"forward": "auto", "backward": "int8"},
            {"forward": ["auto", "auto", "auto"]},
        )
    ),
    (
        {"pipeline": {"forward": "auto"}, "elastic": {"lighthouse": "http://x:1", "name": "a"}},
        "forward is auto, the default; allowed with elastic.lighthouse: formats by name",
    ),
    *(
        ({"pipeline": {"warmup_steps": 4, "forward": f"TransformQuant(bits='auto', nats={n})"}}, "pipeline.forward: ")
        for n in ("0", "-0.1", "float('nan')", "'little'")
    ),
    *(
        ({"run": {"allow_change": [key], "resume": "auto", "overwrite": False}}, f"has '?{key}'?, which {text}")
        for key, text in (
            ("run.step", "a resume does not compare; did you mean run.steps"),
            ("run.output", "a resume does not compare"), ("model.dim", "cannot change: the weights"),
        )
    ),
    ({"activations": {"bits": 9}}, r"activations\.bits is 9"),
    ({"activations": {"norm": [4, 1]}}, r"activations\.norm is 1"),
    ({"activations": {"bits": [4, 4, 4]}}, r"bits has 3 entries; allowed: one, or one for each of 2 stages"),
    ({"activations": {"bits": []}}, r"activations\.bits has 0 entries"),
    ({"activations": {"group": 12}}, r"activations\.group is 12"),
    *(
        ({"run": {"method": "agoq"}, section: {key: value}}, rf"{section}\.{key} is .* 'agoq', which sets it to")
        for section, key, value in (("activations", "bits", 6), ("gradients", "all_reduce", "int8"))
    ),
]  # fmt: skip
if not torch.cuda.is_available():
    WRONG.append(({"run": {"device": "cuda"}}, "run.device is cuda; this machine has 0 devices"))


def _checked(config: TrainConfig) -> None:
    """Check what a command checks, and then its ranks, before they meet."""
    launch.check_early(config)
    prepare(config, ranks=config.ranks)


def test_wrong_settings_are_one_line_before_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("ten bytes.")
    monkeypatch.chdir(tmp_path)
    texts = refused(*((lambda s=s: _checked(tiny(tmp_path, **s)), ConfigError, text) for s, text in WRONG))
    assert not [text for text in texts if "\n" in text]


@pytest.mark.parametrize("supervise", [False, True])
def test_what_all_ranks_of_a_machine_refuse_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], supervise: bool
):
    settings = {"supervise": supervise, "overwrite": False}
    with pytest.raises(ConfigError, match=r"^data\.batch is 4000 and data\.sequence is 16; [^\n]*$"):
        run(tiny(tmp_path, data={"batch": 4000}, run=settings))
    assert not capfd.readouterr().err


def test_an_output_folder_with_a_run_is_not_overwritten_by_accident(tmp_path: Path):
    config = tiny(tmp_path, run={"overwrite": False})
    prepare(config, ranks=2)
    RunFolder(Path(config.run.output)).note("metrics.jsonl")
    (Path(config.run.output) / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"already \(metrics\.jsonl\), without a checkpoint; .* \(--overwrite\) to"):
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
    for overwrite in (True, False):
        with pytest.raises(ConfigError, match="which lowbit has no record of making") as caught:
            _checked(again(config, run={"overwrite": overwrite}))
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
