from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from lowbit.codecs import SubspaceQuant, names
from lowbit.train import checkpoint
from lowbit.train.checkpoint import Checkpoints, pack, run_facts, unpack
from lowbit.train.config_file import from_mapping
from lowbit.train.section import ConfigError
from tests.ranks import Ranks

FACTS = {"ranks": 2, "data.batch": 8}


def _tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "model/a": torch.full((3, 2), float(step)),
        "optimizer/a/step": torch.tensor(float(step)),
        "random/cpu": torch.arange(9, dtype=torch.uint8),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "codecs/0": pack({"steps": step, "lanes": {"x": {"7": torch.ones(2)}}}),
    }


def _save(folder, steps: list[int], rank: int | None = None) -> list[int]:
    rank = torch.distributed.get_rank() if rank is None else rank
    checkpoints = Checkpoints(folder, rank=rank, keep=2, facts=FACTS)
    for step in steps:
        checkpoints.save(step, _tensors(step + rank))
    return checkpoints.steps()


@pytest.fixture
def alone():
    """A process group of this process only."""
    from lowbit.train.process_group import joined

    with joined(10):
        yield


def test_what_is_loaded_is_what_was_saved(tmp_path, alone):
    _save(tmp_path, [4])
    loaded = Checkpoints(tmp_path, rank=0, keep=2, facts=FACTS).load(4)
    expected = _tensors(4)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert unpack(loaded["codecs/0"])["lanes"]["x"]["7"].tolist() == [1, 1]


def test_the_last_ones_are_kept_and_the_newest_is_named(tmp_path, alone):
    assert _save(tmp_path, [2, 4, 6]) == [4, 6]
    assert (tmp_path / "latest").read_text() == "step-00000006"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest", "step-00000004", "step-00000006",
    ]  # fmt: skip


def test_a_crash_while_writing_leaves_the_older_ones(tmp_path, alone, monkeypatch):
    _save(tmp_path, [2])

    def crash(path, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", crash)  # the tensors are written by then
        with pytest.raises(KeyboardInterrupt):
            _save(tmp_path, [4])
    found = Checkpoints(tmp_path, rank=0, keep=2, facts=FACTS)
    assert found.steps() == [2]
    assert found.latest() == 2
    assert torch.equal(found.load(2)["model/a"], _tensors(2)["model/a"])
    assert _save(tmp_path, [4]) == [2, 4]


def test_saving_a_step_again_replaces_it(tmp_path, alone):
    _save(tmp_path, [2])
    Checkpoints(tmp_path, rank=0, keep=2, facts=FACTS).save(2, _tensors(9))
    loaded = Checkpoints(tmp_path, rank=0, keep=2, facts=FACTS).load(2)
    assert torch.equal(loaded["model/a"], _tensors(9)["model/a"])


@pytest.mark.parametrize(("key", "value"), [("ranks", 4), ("data.batch", 16)])
def test_another_kind_of_run_may_not_go_on(tmp_path, alone, key, value):
    _save(tmp_path, [2])
    other = Checkpoints(tmp_path, rank=0, keep=2, facts=FACTS | {key: value})
    with pytest.raises(
        ConfigError, match=f"written with {key} = {FACTS[key]}, this run has {value}"
    ):
        other.load(2)


OLDER = {
    "pipeline.forward": ["tah-quant"],
    "pipeline.backward": ["GroupInt(bits=6, group=32, symmetric=True)"],
}


@pytest.mark.parametrize(("forward", "goes_on"), [("tah-quant", True), ("int4", False)])
def test_formats_are_compared_by_what_they_are(tmp_path, alone, forward, goes_on):
    Checkpoints(tmp_path, rank=0, keep=2, facts=OLDER).save(2, _tensors(2))
    config = from_mapping({"pipeline": {"forward": forward}})
    facts = run_facts(config, ranks=2, stages=2)
    facts = {key: facts[key] for key in OLDER}
    found = Checkpoints(tmp_path, rank=0, keep=2, facts=facts)
    if goes_on:
        assert found.load(2).keys() == _tensors(2).keys()
    else:
        with pytest.raises(ConfigError, match=r"pipeline.forward = \['tah-quant'\]"):
            found.load(2)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_name_means_what_it_did_when_the_checkpoint_was_written(
    tmp_path, alone, monkeypatch, direction
):
    config = from_mapping({"pipeline": {direction: "subspace"}})
    for bits in (3, 2):
        monkeypatch.setitem(names.NAMES, "subspace", partial(SubspaceQuant, bits=bits))
        facts = run_facts(config, ranks=2, stages=2)
        found = Checkpoints(tmp_path, rank=0, keep=2, facts=facts)
        if bits == 3:
            found.save(2, _tensors(2))
            found.check(2)
    with pytest.raises(
        ConfigError, match=rf"pipeline.{direction} = .*bits=3.*, this run has .*bits=2"
    ):
        found.check(2)


def test_a_format_that_is_no_more_is_told_with_its_checkpoint(tmp_path, alone):
    first, now = (
        Checkpoints(tmp_path, rank=0, keep=2, facts={"pipeline.forward": [name]})
        for name in ("int9", "int4")
    )
    first.save(2, _tensors(2))
    with pytest.raises(
        ConfigError, match=r"checkpoint .*/rank-0 was .* \['int9'\], .*: codec is 'int9'"
    ):
        now.check(2)


def _latest(folder) -> int | None:
    rank = torch.distributed.get_rank()
    return Checkpoints(folder, rank=rank, keep=2, facts=FACTS).latest()


def test_ranks_take_the_newest_step_that_all_have(ranks: Ranks, tmp_path):
    assert ranks.run(_latest, tmp_path) == [None, None]
    assert ranks.run(_save, tmp_path, [2, 4]) == [[2, 4]] * 2
    (tmp_path / "step-00000004" / "rank-1").rename(tmp_path / "step-00000004" / ".rank-1")
    assert ranks.run(_latest, tmp_path) == [2, 2]
    assert json.loads((tmp_path / "step-00000002" / "rank-1" / "run.json").read_text())["step"] == 2


def test_ranks_without_a_step_in_common_say_so(ranks: Ranks, tmp_path):
    ranks.run(_save, tmp_path, [2])
    (tmp_path / "step-00000002" / "rank-1").rename(tmp_path / "step-00000002" / ".rank-1")
    outcomes = ranks.outcomes(_latest, tmp_path)
    for outcome in outcomes:
        assert outcome.kind == "ConfigError"
        assert "that all ranks have; rank 0: [2]; rank 1: none" in outcome.text
