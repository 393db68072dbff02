import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lowbit.codecs import TransformQuant, names
from lowbit_run.train import TrainConfig, from_mapping
from lowbit_run.train.data import load_data
from lowbit_run.train.identity import FIXED, Change, changes_between, layout_of, run_identity
from lowbit_run.train.layout import make_layout
from lowbit_run.train.pretrained import ByteTokenizer
from tests.lowbit_run.train.runs import again, base, tiny

LOCAL = {
    "output", "device", "backend", "threads", "connections", "timeout_seconds", "checkpoint_every",
    "checkpoint_minutes", "keep", "resume", "supervise",
    "restarts", "rejoin_seconds", "grace_seconds", "checksums", "allow_change", "overwrite",
    "eval_every", "eval_batches", "prompt", "tensorboard", "trackers", "progress", "report", "trace", "trace_steps",
    "save_model", "save_dtype", "save_merged",
    "method",  # known by the settings that it stands for
}  # fmt: skip
TEXT = {"dataset", "dataset_config", "dataset_split", "column", "max_bytes"}  # known by their outcome
LAYOUT = {"ranks", "data_parallel", "stages_per_rank", "schedule"}
LAYERS = {"layers"}  # which manifests list for each stage


def identity(config: TrainConfig) -> dict[str, Any]:
    return run_identity(config, data=load_data(config.data), vocab=256)


def test_every_setting_is_compared_or_free_on_purpose(tmp_path: Path):
    """A new setting fails here until it is decided whether a resume may change it."""
    config = tiny(tmp_path)
    every = {
        f"{section}.{field.name}"
        for section in (field.name for field in dataclasses.fields(TrainConfig))
        for field in dataclasses.fields(getattr(config, section))
    }
    free = (
        {"activations.plan", "activations.checkpoint"}
        | {f"run.{key}" for key in LOCAL}
        | {f"data.{key}" for key in TEXT}
    )
    free |= {f"pipeline.{key}" for key in LAYOUT | LAYERS}
    free |= {f"elastic.{key}" for key in ("lighthouse", "at_least", "error_feedback")}
    assert identity(config).keys() == every - free | {"activations.layers"}  # what a plan for each layer says
    assert set(FIXED) <= every
    layout = layout_of(config, make_layout(config.pipeline, ranks=2, layers=4))
    assert {key for key in layout if "." in key} == {f"pipeline.{key}" for key in LAYOUT}


def test_a_tokenizer_is_known_wherever_it_lies(tmp_path: Path):
    configs = []
    for name in ("a", "b"):
        ByteTokenizer().hugging_face().save_pretrained(tmp_path / name)
        configs.append(again(tiny(tmp_path), data={"tokenizer": str(tmp_path / name)}))
    assert identity(configs[0]) == identity(configs[1])
    assert identity(configs[0])["data.tokenizer"] != "bytes"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_name_means_what_it_did_when_the_checkpoint_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
):
    config = tiny(tmp_path, pipeline={"backward": "int6"} | {direction: "transform"})
    monkeypatch.setitem(names.short_names(), "transform", partial(TransformQuant, bits=3.0))
    before = identity(config)
    assert changes_between(before, identity(config), step=2) == []
    full = again(config, pipeline={direction: before[f"pipeline.{direction}"]})
    assert changes_between(before, identity(full), step=2) == []
    monkeypatch.setitem(names.short_names(), "transform", partial(TransformQuant, bits=2.0))
    [change] = changes_between(before, identity(config), step=2)
    assert change.key == f"pipeline.{direction}"
    assert "bits=3" in str(change.before)
    assert "bits=2" in str(change.after)


def test_an_option_that_a_checkpoint_does_not_know_had_its_default(tmp_path: Path):
    config = tiny(tmp_path)
    for key, other in {"optimizer.lr_end": 0.5, "model.dropout": 0.1, "run.precision": "bf16"}.items():
        section, name = key.split(".")
        default = getattr(getattr(TrainConfig(), section), name)
        usual, changed = (identity(again(config, **{section: {name: value}})) for value in (default, other))
        before = {name: value for name, value in usual.items() if name != key}
        assert changes_between(before, usual, step=2) == []
        assert changes_between(before, changed, step=2) == [Change(key, default, other)]


def test_an_option_that_is_gone_changes_nothing(tmp_path: Path):
    now = identity(tiny(tmp_path))
    assert changes_between(now | {"pipeline.boundary": "lowbit"}, now, step=2) == []


def test_what_is_gone_not_recorded_or_foreign_is_a_change(tmp_path: Path):
    config = tiny(tmp_path)
    now = identity(config)
    gone = Change("pipeline.forward", ["Quant9(bits=9)"], now["pipeline.forward"])
    assert changes_between(now | {gone.key: gone.before}, now, step=2) == [gone]
    assert str(gone) == ("pipeline.forward was ['Quant9(bits=9)'] and is ['Cast(dtype=torch.float32)'] now")
    before = {key: value for key, value in now.items() if key != "data.text"}
    assert changes_between(before, now, step=2) == [Change("data.text", "not recorded", now["data.text"])]
    two = identity(again(config, pipeline={"data_parallel": 2}, gradients={"all_reduce": "fp32"}))
    averages = (now["gradients.all_reduce"], two["gradients.all_reduce"])
    assert averages == (None, "Cast(dtype=torch.float32)"), "they count where there are several pipelines"
    shown = str(Change("pipeline.schedule", "1F1B\x1b[2J\n" + "x" * 9999, "GPipe"))
    assert shown.startswith(r"pipeline.schedule was 1F1B\x1b[2J\nxxx"), "without acting on the terminal"
    assert shown.endswith("... and is GPipe now")
    assert len(shown) < 600


@pytest.mark.parametrize(("step", "differs"), [(3, True), (4, True), (5, False)])
def test_a_warm_up_counts_until_it_is_over(step: int, differs: bool):
    values = [{"pipeline.warmup_steps": warmup} for warmup in (2, 5)]
    for before, after in (values, values[::-1]):
        assert bool(changes_between(before, after, step=step)) == differs
    assert from_mapping({"run": {"steps": 20}}).codec_warmup_steps == 5, "follows from run.steps"


def test_a_run_with_adapters_of_before_goes_on_in_float32_only(tmp_path: Path):
    config = again(tiny(tmp_path), model={"pretrained": base(tmp_path)}, lora={"rank": 2})
    before = {key: value for key, value in identity(config).items() if key != "model.weights"}
    assert not changes_between(before, identity(again(config, model={"weights": "fp32"})), step=1)
    (change,) = changes_between(before, identity(config), step=1)
    assert str(change) == "model.weights was fp32 and is auto now"
