import dataclasses
import math
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowbit.codecs import Cast, parse
from lowbit_lab.bench import convergence
from lowbit_lab.bench.convergence import COMMAND, ConvergenceBenchmark, planned, recipe, summarized
from lowbit_lab.bench.training import TrainingRecipe, train
from lowbit_run.report import Report, run
from lowbit_run.train.config import DataConfig, LoraConfig, ModelConfig
from tests.lowbit_lab.evaluate.models import write_checkpoint
from tests.lowbit_run.train.runs import base

FP32 = Cast()
LOSS = {"fp32": 2.0, "int4": 2.5, "tah-quant": 2.25, "aq-sgd": 2.125}


@pytest.fixture
def settings(text: str, tmp_path: Path) -> ConvergenceBenchmark:
    return ConvergenceBenchmark(
        regimes=("scratch-warmup", "finetune"), boundaries=("fp32", "int4"), seeds=(0, 1),
        model=ModelConfig(dim=32, layers=2, heads=2), data=DataConfig(text=(text,), sequence=16, batch=2),
        finetune_text=(text,), stages=2, steps=3, warmup_steps=1, pretrain_steps=2, finetune_steps=2,
        finetune_samples=2, eval_windows=2, folder=str(tmp_path / "work"),
    )  # fmt: skip


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the training by a table of losses; what would have been trained, in order."""
    log: list[str] = []

    def train_all(settings: ConvergenceBenchmark, runs: list[Any], recipes: dict[str, TrainingRecipe], keep: str = ""):
        for one in runs:
            log.append("{regime} {boundary} seed {seed}".format(**one))
            if keep:
                Path(keep).parent.mkdir(exist_ok=True)
                Path(keep).touch()
            formats = convergence.formats_in(one["boundary"], one["backward"])
            yield {
                **one,
                "forward": repr(formats.forward),
                "backward": repr(formats.backward),
                "loss": LOSS[one["boundary"]] + one["seed"],
                "loss_through_codecs": None,
            }

    monkeypatch.setattr(convergence, "train_all", train_all)
    return log


def test_a_file_of_compared_losses_is_gone_on_with(settings: ConvergenceBenchmark, trained: list[str], tmp_path: Path):
    file = tmp_path / "c.json"
    run(COMMAND, dataclasses.replace(settings, seeds=(0,), regimes=("finetune",)), file=file)
    assert trained[0] == "pretrain fp32 seed 1234"
    trained.clear()
    report = run(COMMAND, settings, file=file)
    assert [row["over_fp32"] for row in report.rows] == [0.5 if row["boundary"] == "int4" else 0 for row in report.rows]
    assert "finetune int4 seed 0" not in trained
    assert "finetune int4 seed 1" in trained
    assert not any(name.startswith("pretrain") for name in trained)
    assert len(report.rows) == 8
    assert Report.read_json(file).rows == report.rows
    trained.clear()
    run(COMMAND, settings, file=file)
    assert trained == []


def test_rows_of_a_boundary_with_other_formats_are_not_mixed_in(
    settings: ConvergenceBenchmark, trained: list[str], tmp_path: Path
):
    file = tmp_path / "c.json"
    six = "GroupInt(bits=6, group=32, symmetric=True)"
    run(COMMAND, dataclasses.replace(settings, backward=six), file=file)
    trained.clear()
    report = run(COMMAND, settings, file=file)
    assert trained == [], "the same formats, whatever the settings say"
    assert {parse(row["backward"]) for row in report.rows} == {FP32, parse(six)}
    with pytest.raises(ValueError, match=r"holds rows of int4 with GroupInt\(bits=6.* backward"):
        run(COMMAND, dataclasses.replace(settings, backward="int8"), file=file)
    run(COMMAND, dataclasses.replace(settings, backward="int8", boundaries=("fp32",)), file=file)


@pytest.mark.slow
def test_real_runs_in_two_processes(settings: ConvergenceBenchmark, tmp_path: Path):
    settings = dataclasses.replace(settings, jobs=2, boundaries=("fp32", "aq-sgd"), seeds=(0,))
    report = run(COMMAND, settings, file=tmp_path / "c.json")
    found = {(row["regime"], row["boundary"]): row for row in report.rows}
    assert set(found) == {("scratch-warmup", "fp32"), ("finetune", "fp32"), ("finetune", "aq-sgd")}
    assert found["finetune", "fp32"]["loss"] < found["scratch-warmup", "fp32"]["loss"]
    assert 4 < found["finetune", "aq-sgd"]["bits_forward"] < 32
    assert found["finetune", "aq-sgd"]["state_bytes"] > 0
    assert abs(found["finetune", "aq-sgd"]["over_fp32"]) < 0.1
    assert [path.suffix for path in Path(settings.folder).iterdir()] == [".pt"]


def test_adapters_alone_are_trained_with_and_without_codecs(settings: ConvergenceBenchmark, tmp_path: Path):
    pytest.importorskip("peft")
    folder = write_checkpoint(tmp_path / "model")
    settings = dataclasses.replace(
        settings, regimes=("finetune",), boundaries=("fp32", "GroupInt(bits=2, group=32)"), seeds=(0,), stages=2,
        model=ModelConfig(pretrained=str(folder)), lora=LoraConfig(rank=2), finetune_lr=1e-2,
    )  # fmt: skip
    exact, coarse = run(COMMAND, settings).rows
    assert exact["loss"] == exact["loss_through_codecs"]
    assert coarse["over_fp32"] == coarse["loss"] - exact["loss"] != 0
    assert coarse["over_fp32_codecs"] == coarse["loss_through_codecs"] - exact["loss"] != coarse["over_fp32"]
    model, _ = train(recipe(settings, "finetune"), "fp32", seed=0)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after = {name.replace("base_layer.", ""): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert any("lora_B" in name and tensor.any() for name, tensor in after.items())


def test_anchors_save_loss_through_the_codec(settings: ConvergenceBenchmark, tmp_path: Path):
    int2, letters = "GroupInt(bits=2, group=32)", random.Random(0).choices(string.ascii_letters, k=6000)
    (tmp_path / "letters.txt").write_text("".join(letters))
    settings = dataclasses.replace(
        settings, regimes=("finetune",), boundaries=("fp32", int2, f"anchor:{int2}"), seeds=(0,),
        model=ModelConfig(pretrained=base(tmp_path, dim=16, tied=True)), finetune_warmup_steps=20, finetune_steps=22,
        finetune_samples=40, finetune_text=(str(tmp_path / "letters.txt"),), eval_windows=16,
    )  # fmt: skip
    exact, coarse, anchored = run(COMMAND, settings).rows
    assert exact["curve"][:20] == coarse["curve"][:20] == anchored["curve"][:20]
    assert anchored["bits_forward"] == coarse["bits_forward"], "ids are known to both ends"
    assert anchored["state_bytes"] > coarse["state_bytes"]
    assert abs(anchored["over_fp32_codecs"]) < abs(coarse["over_fp32_codecs"]) / 2


def test_what_cannot_be_used_is_an_error_before_anything_is_trained(settings: ConvergenceBenchmark, trained: list[str]):
    few = ModelConfig(dim=32, layers=2, heads=2, vocab=7)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": few}, "vocabulary has 7 entries, the tokenizer 256"),
        ({"finetune_text": ("gone",)}, "where there is no file"),
    ]  # fmt: skip
    if not torch.cuda.is_available():
        wrong.append(({"device": "cuda"}, "device is cuda; this machine has none"))
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            run(COMMAND, dataclasses.replace(settings, **change))
    assert trained == []


def test_regimes_differ_in_warm_up_steps_rate_start_and_formats(
    settings: ConvergenceBenchmark, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level("WARNING"):
        runs = planned(ConvergenceBenchmark(boundaries=("fp32", "aq-sgd"), seeds=(0,)))
    assert "aq-sgd left out of scratch" in caplog.text
    assert [one["regime"] for one in runs if one["boundary"] == "aq-sgd"] == ["finetune"]
    warm, cold, tuned = (recipe(settings, r) for r in ("scratch-warmup", "scratch", "finetune"))
    assert (warm.warmup_steps, cold.warmup_steps, tuned.warmup_steps) == (1, 0, 0)
    assert (warm.steps, tuned.steps, recipe(settings, "pretrain").steps) == (3, 2, 2)
    assert tuned.optimizer.lr < cold.optimizer.lr
    assert tuned.start
    assert not cold.start
    for change in ({"pretrain_steps": 9}, {"data": DataConfig(held_out=("h.txt",))}, {"precision": "bf16"}):
        other = dataclasses.replace(settings, **change)
        assert recipe(other, "finetune").start != tuned.start


def row(regime: str, boundary: str, seed: int, loss: float, over: float | None) -> dict[str, Any]:
    return {
        "regime": regime, "boundary": boundary, "seed": seed, "loss": loss, "over_fp32": over,
        "over_fp32_codecs": None if over is None else 2 * over, "curve": [[10, loss + 1], [20, loss]],
        "bits_forward": 4.5, "bits_backward": 4.5, "state_bytes": 2_000_000 * (boundary != "fp32"),
    }  # fmt: skip


def test_means_and_spreads_are_over_seeds_of_one_regime_and_boundary():
    first, second, third = summarized([
        row("finetune", "int4", 0, 2.0, None), row("scratch", "fp32", 0, 1.0, 0), row("scratch", "fp32", 1, 3.0, 0),
        row("scratch", "int4", 0, 1.25, 0.25), row("scratch", "int4", 1, 3.75, 0.75),
    ])  # fmt: skip
    assert (first["regime"], first["boundary"]) == ("scratch", "fp32")
    assert (third["regime"], third["seeds"], third["over_fp32"]) == ("finetune", 1, None)
    assert (second["loss"], second["over_fp32"], second["state_bytes"]) == (2.5, 0.5, 2_000_000)
    assert second["over_fp32_spread"] == pytest.approx(0.5 / 2**0.5)
    assert (second["over_fp32_codecs"], third["over_fp32_codecs"]) == (1.0, None)
    _, paired = summarized([
        row("scratch", "fp32", 0, 1.0, 0), row("scratch", "int4", 0, 1.25, 0.25), row("scratch", "int4", 1, 9.0, None),
    ])  # fmt: skip
    assert (paired["seeds"], paired["loss"], paired["over_fp32"]) == (1, 1.25, 0.25), "others have no fp32"
    for bad in (None, math.nan):
        _, diverged = summarized([
            row("scratch", "fp32", 0, 1.0, 0), row("scratch", "int4", 0, 1.25, 0.25),
            {**row("scratch", "int4", 1, 1.0, None), "loss": bad},
        ])  # fmt: skip
        assert (diverged["diverged"], diverged["loss"], diverged["over_fp32"]) == (1, None, None)
        assert convergence._finding([diverged]) == "Held-out loss by bits of the boundary format"
    # A difference within the spread of the seeds is none.
    one = {"regime": "scratch", "boundary": "tah-quant-published", "bits_total": 8.0}
    for cost, spread, text in (
        (-0.0004, None, "0.000 nats"), (-0.0004, 0.0003, "0.000 nats"), (0.012, 0.004, "+0.012 nats"),
        (-0.003, 0.004, "no measurable difference"),
    ):  # fmt: skip
        found = convergence._finding([one | {"over_fp32": cost, "over_fp32_spread": spread}])
        assert found.endswith(f": {text} in 8.0 bits")
