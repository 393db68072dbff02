import contextlib
import json
import logging
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lowbit_run.train import ConfigError, StepMetrics, TrainConfig, export, launch, loop, run, train
from lowbit_run.train.checkpoints import resume
from lowbit_run.train.checkpoints.manifest import newest_step
from lowbit_run.train.checkpoints.save import CheckpointError
from lowbit_run.train.checkpoints.search import Search
from lowbit_run.train.metrics import read_summary
from tests.lowbit_run.train.checkpoints.test_save import save
from tests.lowbit_run.train.runs import LIMIT, ONE, RESUME, again, curve, losses, tiny
from tests.processes import Ranks


class _Stop(BaseException):
    """The run ends here."""


def part(config: TrainConfig, until: int) -> list[str]:
    """Train until a checkpoint and one step more; what was logged."""

    def on_step(metrics: StepMetrics) -> None:
        if metrics.step == until + 1:
            dist.barrier()  # or a rank that leaves early disturbs one that is not there yet
            raise _Stop

    handler = logging.Handler()
    logging.getLogger("lowbit_run").addHandler(handler)
    with mock.patch.object(handler, "emit") as emit, contextlib.suppress(_Stop):
        train(config, on_step=on_step)
    logging.getLogger("lowbit_run").removeHandler(handler)
    return [call.args[0].getMessage() for call in emit.call_args_list]


LAYOUTS = [
    (2, {"ranks": 2, "schedule": "DualPipeV", "stages_per_rank": 2}),
    (4, {"ranks": 4, "schedule": "1F1B", "stages_per_rank": 1}),
    (2, {"ranks": 2, "schedule": "1F1B", "layers": [3, 1]}),
    (4, {"ranks": 2, "schedule": "GPipe", "data_parallel": 2}),
    (2, {"ranks": 1, "schedule": "GPipe", "data_parallel": 2}),
    (1, ONE),
]


def test_a_run_goes_on_in_any_layout(ranks: Ranks, tmp_path: Path):
    """Alone, on two ranks there and back, on four, on two of unequal size, in two pipelines and replicas, alone."""
    config = tiny(
        tmp_path, model={"family": "gpt2"},  # which ties its embedding
        pipeline=ONE, gradients={"all_reduce": "fp32"}, run={"steps": 14, "checkpoint_every": 2},
    )  # fmt: skip
    train(whole := again(config, run={"output": str(tmp_path / "whole"), "checkpoint_every": 0}))
    part(config, 2)
    for number, (count, layout) in enumerate(LAYOUTS, 2):
        going_on = again(config, pipeline=ONE | layout, run=RESUME)
        outcomes = ranks.run(part, going_on, 2 * number, ranks=count, timeout=LIMIT)
        assert any("and is" in line and "pipeline." in line for line in outcomes[0]), outcomes
        assert not any(outcomes[1:]), "told by one rank"
    found, expected = curve(config), curve(whole)
    assert [step for step, *_ in found] == list(range(1, 15))
    assert found == [pytest.approx(values, rel=1e-5) for values in expected]
    summary = read_summary(Path(config.run.output) / "summary.json")
    assert summary.changes[0] == {"step": 2, "key": "pipeline.ranks", "before": 1, "after": 2}
    assert [c["step"] for c in summary.changes if c["key"] == "pipeline.schedule"] == [2, 4, 8]


def _resume_on_two_disks(config: TrainConfig) -> None:
    rank = dist.get_rank()
    with mock.patch.object(resume, "_PIECE_BYTES", 100):
        train(again(config, run=RESUME | {"output": f"{config.run.output}-{rank}", "steps": 4}))


@pytest.mark.slow
def test_parts_are_sent_from_the_machine_that_has_them(ranks: Ranks, tmp_path: Path):
    """A run of one rank goes on on two machines, of which the second has nothing."""
    config = tiny(tmp_path, pipeline=ONE, run={"steps": 4, "checkpoint_every": 2})
    train(whole := again(config, run={"output": str(tmp_path / "whole")}))
    part(config, 2)
    shutil.copytree(config.run.output, f"{config.run.output}-0")
    two = again(config, pipeline={"ranks": 2, "schedule": "1F1B"})
    ranks.run(_resume_on_two_disks, two, timeout=LIMIT)
    found = again(config, run={"output": f"{config.run.output}-0"})
    assert [line[1:] for line in curve(found)] == [pytest.approx(line[1:]) for line in curve(whole)]
    assert [p.name for p in tmp_path.glob("run-*/checkpoints/step-00000004/*")] == ["rank-0", "rank-1"]


AUTO = "TransformQuant(bits='auto')"


def _exchange_slowly(folder: Path, limit: float) -> list[str]:
    """Ranks 0 and 1 want what rank 0 has, in pieces that take a while; rank 2 wants nothing."""
    rank = dist.get_rank()
    save(folder / str(rank), [2])
    group = dist.new_group(timeout=timedelta(seconds=limit))
    found = Search(folder / str(rank) / "checkpoints", group).newest()
    assert found is not None
    send = resume.Messages.send

    def slowly(*args: Any) -> Any:
        time.sleep(0.1)
        return send(*args)

    names = [(0, name) for name in found.shares[0].tensors] if rank < 2 else []
    with (
        mock.patch("lowbit_run.train.checkpoints.save._BEAT_SECONDS", 0.1),
        mock.patch.object(resume, "_PIECE_BYTES", 100),
        mock.patch.object(resume.Messages, "send", slowly),
    ):
        got = resume.ShareExchange(found, folder / str(rank) / "checkpoints", group, limit).run(names)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in got.values()), "not the whole file"
    return [name for _, name in got]


def test_what_is_sent_may_take_longer_than_the_time_limit(ranks: Ranks, tmp_path: Path):
    outcomes = ranks.run(_exchange_slowly, tmp_path, 1.0, ranks=3)
    assert [bool(names) for names in outcomes] == [True, True, False]


@pytest.mark.slow
def test_boundaries_at_the_same_place_go_on_as_they_were(ranks: Ranks, tmp_path: Path):
    """From four stages to two: what lies after layer 1 stays, with what it has learned and chosen."""
    pipeline = {"ranks": 4, "forward": AUTO, "backward": "aq-sgd", "warmup_steps": 2}
    config = tiny(tmp_path, pipeline=pipeline, run={"steps": 8, "checkpoint_every": 4})
    ranks.run(part, config, 4, ranks=4, timeout=LIMIT)
    chosen = choices(config, 4)
    two = again(config, pipeline={"ranks": 2}, run=RESUME)
    lines = ranks.run(part, two, 100, timeout=LIMIT)[0]
    assert not any("without their earlier state" in line for line in lines), lines
    [(place, codec)] = [(name, codec) for name, codec in choices(config, 8).items() if "forward" in name]
    assert (place, codec) == ("after layer 1 forward", chosen["after layer 1 forward"])
    four = again(two, pipeline={"ranks": 4}, run={"steps": 10, "allow_change": ["run.steps"]})
    lines = ranks.run(part, four, 100, ranks=4, timeout=LIMIT)[0]
    [line] = [line for line in lines if "without their earlier state" in line]
    assert "boundary 0 forward, boundary 0 backward, boundary 2 forward, boundary 2 backward" in line
    first, second = (choices(config, step) for step in (8, 10))
    assert list(second) == [f"after layer {layer} forward" for layer in range(3)]
    assert set(second.values()) == set(first.values()), "taken from the nearest boundary"


def choices(config: TrainConfig, step: int) -> dict[str, float]:
    """The rates that a run has chosen, by place, as all manifests of a step record them."""
    paths = Path(config.run.output).glob(f"checkpoints/step-{step:08d}/*/manifest.json")
    [text] = {json.dumps(json.loads(path.read_text())["identity"]["pipeline.rates"]) for path in paths}
    return {f"after layer {layer} {direction}": bits for direction, layer, _, bits in json.loads(text)}


def test_a_rate_that_is_not_recorded_is_missed_in_one_line(ranks: Ranks, tmp_path: Path):
    """Where one rank had no boundary; checkpoints of versions that recorded choices elsewhere lack it, too."""
    pipeline = ONE | {"forward": AUTO, "warmup_steps": 1}
    config = tiny(tmp_path, pipeline=pipeline, run={"steps": 3, "checkpoint_every": 2})
    part(config, 2)
    for outcome in ranks.outcomes(losses, again(config, pipeline={"ranks": 2}, run=RESUME), timeout=LIMIT):
        assert outcome.kind == "CheckpointError"
        assert "does not record the rate of TransformQuant(bits='auto', " in outcome.text
        assert "for boundary 0 forward (after layer 1); allowed:" in outcome.text
        assert len(outcome.text.splitlines()) == 1


CHANGES: list[tuple[dict[str, dict[str, Any]], list[str]]] = [
    ({"model": {"heads": 1}}, ["model.heads", "model.kv_heads"]),
    ({"model": {"layers": 3}}, ["model.layers"]),
    ({"model": {"family": "mistral"}}, ["model.family"]),
    ({"data": {"held_out_share": 0.2}}, ["data.held_out_share"]),
    ({"data": {"batch": 4}}, ["data.batch"]),
    ({"optimizer": {"lr": 1e-4}}, ["optimizer.lr"]),
    ({"run": {"steps": 9, "seed": 5}}, ["run.seed", "run.steps"]),
    ({"pipeline": {"forward": "int4"}}, ["pipeline.forward", "pipeline.backward"]),
    ({"pipeline": {"warmup_steps": 7}}, ["pipeline.warmup_steps"]),
    ({"gradients": {"storage": "fp8"}}, ["gradients.storage"]),
    ({"activations": {"bits": 4}}, ["activations.bits"]),
    ({"run": {"precision": "bf16"}}, ["run.precision"]),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run with a checkpoint after step 2."""
    config = tiny(tmp_path_factory.mktemp("written"), pipeline=ONE, run={"checkpoint_every": 2})
    part(config, 2)
    return again(config, run=RESUME)


@pytest.fixture
def copy(written: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The same run, which a test may resume."""
    shutil.copytree(written.run.output, tmp_path / "run")
    return again(written, run={"output": str(tmp_path / "run")})


def test_a_resume_with_something_else_is_refused_by_name(written: TrainConfig):
    for changes, keys in CHANGES:
        with pytest.raises(ConfigError, match="is of a run that differs from this one") as caught:
            train(again(written, **changes))
        lines = str(caught.value).splitlines()
        assert sorted(line.split()[0] for line in lines[1:-1]) == sorted(keys)
        if any(key.startswith("model.") for key in keys):
            assert "cannot change: the weights belong to it; allowed: the same, or a new run" in lines[-1]
        else:
            assert all(f"--allow-change {key}" in lines[-1] for key in keys)


def test_what_is_the_same_run_goes_on(copy: TrainConfig):
    run = {"checkpoint_every": 1, "keep": 3, "threads": 2, "timeout_seconds": 50, "eval_batches": 1}
    same = {  # a warm-up that is over by then, a format in full, and averages of a single pipeline
        "pipeline": {"warmup_steps": 2, "forward": "Cast(dtype=torch.float32)"}, "gradients": {"all_reduce": "int4"},
    }  # fmt: skip
    summary = train(again(copy, run=run, **same))
    assert (summary.steps_here, summary.changes) == (1, [])


def test_the_text_is_known_by_its_content(copy: TrainConfig, tmp_path: Path):
    moved, other = tmp_path / "moved.txt", tmp_path / "other.txt"
    moved.write_bytes(Path(copy.data.text[0]).read_bytes())
    other.write_bytes(moved.read_bytes().replace(b"a", b"b"))
    with pytest.raises(ConfigError, match=r"data.text was \d+ tokens with digest \w+ and is \d+ tokens"):
        train(again(copy, data={"text": [str(other)]}))
    assert train(again(copy, data={"text": [str(moved)]})).steps_here == 1


def test_what_is_allowed_to_change_is_recorded(copy: TrainConfig):
    run = {"steps": 5, "allow_change": ["run.steps", "optimizer.lr"]}
    config = again(copy, run=run, optimizer={"lr": 1e-3})
    assert [line.partition(": ")[2] for line in part(config, 4) if "and is" in line] == [
        "run.steps was 3 and is 5 now", "optimizer.lr was 0.003 and is 0.001 now",
    ]  # fmt: skip
    summary = train(config)  # nothing differs any more
    expected = [
        {"step": 2, "key": "run.steps", "before": 3, "after": 5},
        {"step": 2, "key": "optimizer.lr", "before": 0.003, "after": 0.001},
    ]
    assert (summary.steps_here, summary.changes) == (1, expected)
    for name in ("summary.json", "checkpoints/step-00000005/rank-0/manifest.json"):
        assert json.loads((Path(config.run.output) / name).read_text())["changes"] == expected


def test_fewer_steps_than_are_done_are_refused(copy: TrainConfig):
    fewer = again(copy, run={"steps": 1, "allow_change": ["run.steps"]})
    with pytest.raises(CheckpointError, match="has done 2 steps; allowed for run.steps: at least as many"):
        losses(fewer)


def test_other_versions_are_told_and_recorded(copy: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "versions", lambda: {"torch": "9.9"})
    lines = part(copy, 100)
    assert any(line.endswith("and is 9.9 now") for line in lines), lines
    [change] = read_summary(Path(copy.run.output) / "summary.json").changes
    assert (change["key"], change["after"]) == ("torch", "9.9")


def test_all_ranks_refuse_with_the_same_words(ranks: Ranks, tmp_path: Path):
    """Where the only manifest lies on the first machine."""
    config = tiny(tmp_path, pipeline=ONE, run={"checkpoint_every": 2})
    part(config, 2)
    Path(config.run.output).rename(f"{config.run.output}-0")
    changed = again(config, pipeline={"ranks": 2, "schedule": "1F1B"}, run={"precision": "bf16"})
    first, second = ranks.outcomes(_resume_on_two_disks, changed, timeout=LIMIT)
    assert (first.kind, first.text) == (second.kind, second.text)
    assert first.kind == "CheckpointError"
    assert "run.precision was fp32 and is bf16 now" in first.text


def test_a_resume_without_a_checkpoint_is_an_error_unless_it_is_auto(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    config = tiny(tmp_path, run=RESUME | {"steps": 1})
    monkeypatch.setattr(launch, "start_ranks", lambda config: pytest.fail("started"))
    with pytest.raises(ConfigError, match=r"has no checkpoint; allowed: run.resume=auto"):
        run(config)
    for outcome in ranks.outcomes(losses, config, timeout=LIMIT):
        assert outcome.kind == "CheckpointError"
        assert "run/checkpoints has no checkpoint" in outcome.text
    beginning = again(config, pipeline=ONE, run={"resume": "auto"})
    assert train(beginning).steps_here == 1
    assert f"no checkpoint in {tmp_path}/run/checkpoints: starting with step 0" in caplog.text


def test_a_run_that_has_ended_is_not_begun_again_by_resume_auto(tmp_path: Path):
    """Without checkpoints, its metrics and its model would be lost."""
    config = tiny(tmp_path, pipeline=ONE, run={"steps": 2, "checkpoint_every": 0, "save_model": True})
    train(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match=r"run holds a run that has ended \(summary.json\) and no checkpoint"):
        train(again(config, run={"resume": "auto", "steps": 4, "overwrite": False}))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_the_summary_and_the_model_are_those_of_the_steps_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny(tmp_path, pipeline=ONE, run={"steps": 2, "checkpoint_every": 2, "save_model": True})
    train(config)
    model = tmp_path / "run" / "model"
    assert (model / "model.safetensors").exists()
    (model / "mine.safetensors").write_text("of the user")
    goes_on = again(config, run=RESUME | {"steps": 6, "allow_change": ["run.steps"]})
    part(goes_on, 4)
    assert not (tmp_path / "run" / "summary.json").exists()
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    train(goes_on)
    assert len([*model.glob("model-*.safetensors")]) > 1
    assert not (model / "model.safetensors").exists(), "whoever loads the model would take it"
    assert (model / "mine.safetensors").exists()


def test_a_broken_newest_step_costs_no_more_than_itself(tmp_path: Path):
    config = tiny(tmp_path, pipeline=ONE, run={"steps": 6, "checkpoint_every": 2})
    train(whole := again(config, run={"output": str(tmp_path / "whole")}))
    part(config, 5)
    folder = Path(config.run.output) / "checkpoints"
    assert newest_step(folder) == 4
    file = folder / "step-00000004" / "rank-0" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    lines = part(again(config, run=RESUME), 100)
    assert any("step-00000004 is skipped: rank-0 has a tensors.safetensors that was ch" in line for line in lines)
    assert curve(config) == curve(whole)
