import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowbit.codecs import Cast, parse
from lowbit.config import build
from lowbit.report import Report, run
from lowbit.train.config import DataConfig, LoraConfig, ModelConfig, OptimizerConfig
from lowbit.train.data import load_data
from lowbit_lab.bench import convergence
from lowbit_lab.bench.convergence import COMMAND, ConvergenceBenchmark, planned, recipe, summarized
from lowbit_lab.bench.training import Recipe, train
from tests.lab.bench.shown import shown
from tests.lab.evaluate.models import write_checkpoint

FP32 = Cast()
LOSS = {"fp32": 2.0, "int4": 2.5, "tah-quant": 2.25, "aq-sgd": 2.125}


@pytest.fixture
def settings(tmp_path: Path) -> ConvergenceBenchmark:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i * i) for i in range(2000)))
    return ConvergenceBenchmark(
        regimes=("scratch-warmup", "finetune"), boundaries=("fp32", "int4"), seeds=(0, 1),
        model=ModelConfig(dim=32, layers=2, heads=2), data=DataConfig(text=(str(text),), sequence=16, batch=2),
        finetune_text=(str(text),), stages=2, steps=3, warmup_steps=1, pretrain_steps=2, finetune_steps=2,
        finetune_samples=2, eval_windows=2, folder=str(tmp_path / "work"),
    )  # fmt: skip


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the training by a table of losses; what would have been trained, in order."""
    log: list[str] = []

    def train_all(settings: ConvergenceBenchmark, runs: list[Any], recipes: dict[str, Recipe], keep: str = ""):
        for one in runs:
            log.append("{regime} {boundary} seed {seed}".format(**one))
            if keep:
                Path(keep).parent.mkdir(exist_ok=True)
                Path(keep).touch()
            ways = zip(("forward", "backward"), convergence.codec_pair(one["boundary"], one["backward"]), strict=True)
            yield {
                **one,
                **{way: repr(codec) for way, codec in ways},
                "loss": LOSS[one["boundary"]] + one["seed"],
                "loss_through_codecs": None,
            }

    monkeypatch.setattr(convergence, "train_all", train_all)
    return log


def test_losses_are_compared_with_the_same_seed(settings: ConvergenceBenchmark, trained: list[str]):
    report = run(COMMAND, settings)
    assert len(report.rows) == len(trained) - 1 == 8  # and the checkpoint
    assert trained[0] == "pretrain fp32 seed 1234"
    for row in report.rows:
        assert row["over_fp32"] == (0.5 if row["boundary"] == "int4" else 0)


def test_without_fp32_there_is_nothing_to_compare_with(settings: ConvergenceBenchmark, trained: list[str]):
    report = run(COMMAND, dataclasses.replace(settings, boundaries=("int4",)))
    assert {row["over_fp32"] for row in report.rows} == {None}


def test_a_file_is_gone_on_with(settings: ConvergenceBenchmark, trained: list[str], tmp_path: Path):
    file = tmp_path / "c.json"
    run(COMMAND, dataclasses.replace(settings, seeds=(0,), regimes=("finetune",)), file=file)
    trained.clear()
    report = run(COMMAND, settings, file=file)
    assert "finetune int4 seed 0" not in trained
    assert "finetune int4 seed 1" in trained
    assert not any(name.startswith("pretrain") for name in trained)
    assert len(report.rows) == 8
    assert Report.read_json(file).rows == report.rows
    trained.clear()
    run(COMMAND, settings, file=file)
    assert trained == []


def test_rows_are_written_as_they_come(settings: ConvergenceBenchmark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def train_all(settings: ConvergenceBenchmark, runs: list[Any], recipes: dict[str, Recipe], keep: str = ""):
        yield {"boundary": "fp32", "seed": 0, "regime": "scratch-warmup", "loss": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(convergence, "train_all", train_all)
    with pytest.raises(KeyboardInterrupt):
        run(COMMAND, dataclasses.replace(settings, regimes=("scratch-warmup",)), file=tmp_path / "c.json")
    assert len(Report.read_json(tmp_path / "c.json").rows) == 1


def test_rows_of_other_settings_are_not_mixed_in(settings: ConvergenceBenchmark, trained: list[str], tmp_path: Path):
    run(COMMAND, settings, file=tmp_path / "c.json")
    with pytest.raises(ValueError, match=r"holds rows with optimizer.lr 0.001; this call has 0.1: name another"):
        run(COMMAND, dataclasses.replace(settings, optimizer=OptimizerConfig(lr=0.1)), file=tmp_path / "c.json")


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


def test_adapters_alone_are_trained_and_the_losses_are_those_with_and_without_codecs(
    settings: ConvergenceBenchmark, tmp_path: Path
):
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


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_real_run_of_another_model_in_bfloat16(settings: ConvergenceBenchmark, device: str):
    settings = dataclasses.replace(
        settings, seeds=(0,), precision="bf16", device=device, optimizer=OptimizerConfig(lr_warmup_steps=1),
        model=dataclasses.replace(settings.model, family="gpt2", vocab=300),
        data=dataclasses.replace(settings.data, max_bytes=4000),
    )  # fmt: skip
    report = run(COMMAND, settings)
    assert len(report.rows) == 4
    plain, coded = (
        next(r for r in report.rows if (r["regime"], r["boundary"]) == ("scratch-warmup", name))
        for name in ("fp32", "int4")
    )
    assert 5.5 < plain["loss"] < 6.0  # ln 300 is 5.7
    assert 4 < coded["bits_forward"] < 5
    assert 0 < abs(coded["over_fp32"]) < 0.1
    weights = torch.load(next(Path(settings.folder).glob("*.pt")), map_location="cpu")
    assert weights["transformer.wte.weight"].shape == (300, 32)


def test_a_gpu_that_is_not_there_is_an_error(settings: ConvergenceBenchmark, trained: list[str]):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="device is cuda; this machine has none"):
        run(COMMAND, dataclasses.replace(settings, device="cuda"))
    assert trained == []


def test_a_vocabulary_that_is_too_small_is_an_error(settings: ConvergenceBenchmark, trained: list[str]):
    with pytest.raises(ValueError, match="vocabulary has 7 entries, the tokenizer 256"):
        run(COMMAND, dataclasses.replace(settings, model=ModelConfig(dim=32, layers=2, heads=2, vocab=7)))
    assert trained == []


def test_formats_with_memory_need_samples_that_come_again():
    runs = planned(ConvergenceBenchmark(boundaries=("fp32", "aq-sgd"), seeds=(0,)))
    assert [one["regime"] for one in runs if one["boundary"] == "aq-sgd"] == ["finetune"]


def test_regimes_differ_in_warm_up_steps_rate_and_start(settings: ConvergenceBenchmark):
    warm, cold, tuned = (recipe(settings, r) for r in ("scratch-warmup", "scratch", "finetune"))
    assert (warm.warmup_steps, cold.warmup_steps, tuned.warmup_steps) == (1, 0, 0)
    assert (warm.steps, tuned.steps, recipe(settings, "pretrain").steps) == (3, 2, 2)
    assert tuned.optimizer.lr < cold.optimizer.lr
    assert tuned.start
    assert not cold.start
    for change in ({"pretrain_steps": 9}, {"data": DataConfig(held_out=("h.txt",))}, {"precision": "bf16"}):
        other = dataclasses.replace(settings, **change)
        assert recipe(other, "finetune").start != tuned.start


def test_the_default_texts_are_on_this_machine_and_apart():
    settings = ConvergenceBenchmark()
    scratch, tuned = (recipe(settings, regime) for regime in ("scratch", "finetune"))
    assert not set(scratch.data.text) & set(tuned.data.text)
    data = load_data(tuned.data)
    assert len(data.train) > settings.finetune_samples
    assert len(data.held_out) >= settings.eval_windows


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"regimes": ("warm",)}, r"regimes is .*; allowed: scratch-warmup"),
        ({"boundaries": ("int1",)}, "codec is 'int1'"),
        ({"backward": "nothing"}, "codec is 'nothing'"),
        (
            {"boundaries": ("int4 / SubspaceQuant(directions='auto')",), "regimes": ("finetune",)},
            r"regimes is \('finetune',\), and boundary .int4 / .* has .*; allowed with it: scratch-warmup",
        ),
        (
            {"boundaries": ("SubspaceQuant(directions='auto')",), "regimes": ("scratch-warmup",), "warmup_steps": 0},
            "warmup_steps is 0, and boundary .* has SubspaceQuant.*; allowed: at least 1",
        ),
        ({"boundaries": ("SubspaceQuant(directions=300)",)}, "boundaries has .*: directions is 300, .* 1 to 256"),
        ({"stages": 1}, "stages is 1; allowed: at least 2"),
        ({"stages": 9}, r"stages is 9; allowed: at most model.layers \(8\)"),
        ({"lora": {"rank": 4}}, "lora.rank is 4 and model.pretrained is empty"),
        ({"jobs": 0}, "jobs is 0"),
        ({"device": "gpu"}, "device is 'gpu'; allowed: cpu, cuda"),
        ({"precision": "fp16"}, "precision is 'fp16'; allowed: fp32, bf16"),
        ({"model": {"family": "gpt3"}}, "model.family is 'gpt3'; allowed: llama"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        build(ConvergenceBenchmark, wrong)


def test_missing_text_is_an_error_before_anything_is_trained(settings: ConvergenceBenchmark, trained: list[str]):
    with pytest.raises(ValueError, match="no such file"):
        run(COMMAND, dataclasses.replace(settings, finetune_text=("missing.txt",)))
    assert trained == []


def row(regime: str, boundary: str, seed: int, loss: float, over: float | None) -> dict:
    bits = 32.0 if boundary == "fp32" else 4.5
    curve = [[10, loss + 1], [20, loss]]
    return {
        "regime": regime, "boundary": boundary, "seed": seed, "loss": loss, "over_fp32": over, "curve": curve,
        "over_fp32_codecs": None if over is None else 2 * over,
        "bits_forward": bits, "bits_backward": bits, "state_bytes": 2_000_000 * (boundary != "fp32"),
    }  # fmt: skip


ROWS = [
    row("finetune", "int4", 0, 2.0, None),
    row("scratch", "fp32", 0, 1.0, 0.0),
    row("scratch", "fp32", 1, 3.0, 0.0),
    row("scratch", "int4", 0, 1.25, 0.25),
    row("scratch", "int4", 1, 3.75, 0.75),
]
PAIRS = [
    row(
        "scratch",
        f"SubspaceQuant(directions={r}, bits=2) / SubspaceQuant(directions={r}, bits=4)",
        0,
        0.9,
        r / 10000 - 0.1,
    )
    for r in (8, 16)
]


def test_means_and_spreads_are_over_seeds_of_one_regime_and_boundary():
    first, second, third = summarized(ROWS)
    assert (first["regime"], first["boundary"]) == ("scratch", "fp32")
    assert (third["regime"], third["seeds"], third["over_fp32"]) == ("finetune", 1, None)
    assert second["loss"] == 2.5
    assert second["over_fp32"] == 0.5
    assert second["over_fp32_spread"] == pytest.approx(0.5 / 2**0.5)
    assert (second["over_fp32_codecs"], third["over_fp32_codecs"]) == (1.0, None)
    assert second["state_mb"] == 2


def test_a_table_for_each_regime(tmp_path: Path):
    text = shown(COMMAND, ROWS, tmp_path)
    assert text.count("Held-out loss") == 2
    assert "+0.5000" in text
    assert "4.50" in text


def test_a_table_keeps_its_numbers_whole_on_80_columns(tmp_path: Path):
    text = shown(COMMAND, PAIRS, tmp_path)
    for word in ("bits=2/4)", "-0.0984", "9.00", "seeds", "SubspaceQuant(directions=16,"):
        assert word in text


def test_the_picture_has_a_panel_for_each_regime_and_a_point_for_each_boundary():
    (chart,) = COMMAND.charts
    panels = {title: {row["boundary"] for row in rows} for title, rows in chart.panels(ROWS + PAIRS)}
    names = {f"SubspaceQuant(directions={rank}, bits=2/4)" for rank in (8, 16)}
    assert panels == {"from scratch, no warm-up": {"int4", *names}}, "fp32 is the line at zero"
    int4 = chart.panels(ROWS)[0][1][0]
    assert [int4[value] for value in (chart.x, chart.low, chart.y, chart.high)] == [9.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("rows", [[], ROWS[:1], ROWS])
def test_a_picture_of_whatever_there_is(rows: list, tmp_path: Path):
    shown(COMMAND, rows, tmp_path)
