from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lowbit.train import train
from lowbit.train.folder import MARK, RunFolder
from tests.train.runs import again, tiny

ONE = {"ranks": 1, "stages_per_rank": 1, "schedule": "GPipe"}


def everything(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_clearing_removes_what_is_noted_and_nothing_else(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert not folder.marked
    (tmp_path / "tensorboard").mkdir()  # the user's, though empty
    folder.note("config.json", "model/sub/a", "model/b", "tensorboard/events", "never-made")
    for name in (
        "config.json",
        "model/sub/a",
        "model/b",
        "model/precious",
        "tensorboard/events",
        "mine",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert folder.marked
    assert folder.foreign(["config.json", "mine", "model/precious", "absent"]) == [
        "mine",
        "model/precious",
    ]
    folder.clear()
    assert everything(tmp_path) == {"mine", "model", "model/precious", "tensorboard"}
    folder.clear()
    assert everything(tmp_path) == {"mine", "model", "model/precious", "tensorboard"}


def test_a_foreign_mark_leads_nowhere_else(tmp_path: Path):
    outside, inside = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    inside.mkdir()
    (outside / "precious").write_text("x")
    (inside / "link").symlink_to(outside)
    (inside / "file").symlink_to(outside / "precious")
    made = [
        "../outside/precious",
        str(outside / "precious"),
        "link/precious",
        "link/",
        "file",
        "",
        ".",
        "/",
        3,
        "../",
    ]
    (inside / MARK).write_text(json.dumps({"made": made}) + '\nnonsense\n[]\n{"made": 3}\n\xff')
    RunFolder(inside).clear()
    assert (outside / "precious").exists()
    assert everything(inside) == {"link"}, "of a link in the folder, the link"


def test_a_line_cut_short_takes_no_other_along(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.note("a")
    with (tmp_path / MARK).open("a") as file:
        file.write('{"made": ["b"')
    folder.note("c")
    folder.note("d")
    assert folder.made() == {"a", "c", "d"}


def test_files_are_adopted_or_left_where_they_are(tmp_path: Path):
    folder = RunFolder(tmp_path)
    for names in (("old", "both"), ("both", "new")):
        staging = folder.staging("model")
        for name in names:
            (staging / name).write_text(name)
        folder.adopt(staging, "model")
    assert everything(tmp_path) == {MARK, "model", "model/both", "model/new"}
    folder.staging("model")
    staging = folder.staging("model")  # an earlier attempt was ended
    (staging / "new").write_text("newer")
    (staging / "precious").write_text("lowbit's")
    (tmp_path / "model" / "precious").write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"model/precious is not lowbit's and stays; .* lies in"
    ):
        folder.adopt(staging, "model")
    assert (tmp_path / "model" / "precious").read_text() == "mine"
    assert (tmp_path / "model" / "new").read_text() == "new"
    folder.clear()
    assert everything(tmp_path) == {"model", "model/precious"}
    os.mkdir(tmp_path / staging.name)
    with pytest.raises(FileExistsError, match="is not lowbit's; it needs the name"):
        folder.staging("model")


def test_a_run_overwrites_itself_and_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = tiny(
        tmp_path, pipeline=ONE, run={"checkpoint_every": 1, "save_model": True, "tensorboard": True}
    )
    output = Path(config.run.output)
    train(config)
    first = everything(output)
    foreign = {"model/precious.safetensors", "checkpoints/notes.txt", "tensorboard/mine", "mine"}
    for name in foreign:
        (output / name).write_text("precious")
    monkeypatch.chdir(output)
    train(again(config, run={"output": ".", "steps": 1, "checkpoint_every": 0}))
    second = everything(output)
    assert foreign <= second
    assert {(output / name).read_text() for name in foreign} == {"precious"}
    assert {name for name in second if "step-" in name} == set(), "checkpoints of the first run"
    assert {name for name in second if name.startswith("model/")} == {
        name for name in first if name.startswith("model/")
    } | {"model/precious.safetensors"}
    RunFolder(output).clear()
    kept = {"model", "checkpoints", "tensorboard", *foreign}
    assert everything(output) - {"cache"} == kept
