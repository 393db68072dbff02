import contextlib
import os
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from lowbit_run.train.checkpoints import save as saving
from lowbit_run.train.checkpoints import search
from lowbit_run.train.checkpoints.manifest import TENSORS, Manifest, newest_step, step_name
from lowbit_run.train.checkpoints.save import Checkpoints
from lowbit_run.train.checkpoints.search import SavedStep, Search
from tests.lowbit_run.train.checkpoints.test_share import flip, manifest, tensors
from tests.processes import Ranks


def run_manifest(ranks: int, **changes: Any) -> Manifest:
    """What the manifests of all steps of a run have in common."""
    layout = manifest().layout | {"pipeline.ranks": ranks, "layers": [1] * ranks}
    values = {"rank": 0, "ranks": ranks, "attempt": "a", "layout": layout, "identity": {}, "versions": {}}
    return Manifest(**(values | changes))


def save(folder: Path, steps: list[int], **changes: Any) -> None:
    """Write these steps as the rank that this is."""
    ranks = changes.pop("ranks", dist.get_world_size())
    checkpoints = Checkpoints(folder, rank=dist.get_rank(), keep=2)
    for step in steps:
        checkpoints.save(step, tensors(step), run_manifest(ranks, **changes))


def newest(folder: Path) -> tuple[SavedStep | None, list[str]]:
    """What a search finds, and what it warns of."""
    with mock.patch.object(search.log, "warning") as warning:
        saved = Search(folder / "checkpoints", None).newest()
    return saved, [call.args[0] % call.args[1:] for call in warning.call_args_list]


def shares(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder / "checkpoints")) for p in folder.glob("checkpoints/*/*"))


@pytest.fixture
def alone():
    """A process group of this process only."""
    from lowbit_run.job.process_group import joined

    with joined(10):
        yield


def test_the_last_ones_are_kept(tmp_path: Path, alone: None):
    save(tmp_path, [2, 4, 6])
    assert shares(tmp_path) == ["step-00000004/rank-0", "step-00000006/rank-0"]
    saved, warned = newest(tmp_path)
    assert saved is not None
    assert (saved.step, saved.holders, warned) == (6, {0: 0}, [])
    assert newest_step(tmp_path / "checkpoints") == 6


def test_a_damaged_step_is_skipped_and_none_intact_is_an_error(tmp_path: Path, alone: None):
    save(tmp_path, [2, 4])
    first, second = (tmp_path / "checkpoints" / step_name(step) / "rank-0" / TENSORS for step in (2, 4))
    flip(second, 999)
    saved, [line] = newest(tmp_path)
    assert saved is not None
    assert saved.step == 2
    reason = "rank-0 has a tensors.safetensors that was changed"
    assert line.startswith(f"checkpoint {tmp_path}/checkpoints/step-00000004 is skipped: {reason}")
    flip(first, 999)
    with pytest.raises(saving.CheckpointError, match=rf"is intact: step-00000004: {reason}.*; step-00000002: "):
        newest(tmp_path)


def test_files_of_others_stay(tmp_path: Path, alone: None):
    save(tmp_path, [2, 4])
    folder = tmp_path / "checkpoints"
    (folder / "notes.txt").write_text("mine")
    (folder / step_name(2) / "rank-0" / "mine.txt").write_text("mine")
    save(tmp_path, [6, 8])
    assert shares(tmp_path) == ["step-00000002/rank-0", "step-00000006/rank-0", "step-00000008/rank-0"]
    assert os.listdir(folder / step_name(2) / "rank-0") == ["mine.txt"]
    assert (folder / "notes.txt").exists()

    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved / "checkpoints")  # without the record: it is not lowbit's there
    save(moved, [10, 12, 14])
    assert [name[:13] for name in shares(moved)] == [f"step-{step:08}" for step in (2, 6, 8, 12, 14)]


def test_ranks_gone_leave_no_shares(tmp_path: Path, ranks: Ranks):
    ranks.run(save, tmp_path, [2])
    ranks.run(save, tmp_path, [4, 6], ranks=1)
    assert shares(tmp_path) == ["step-00000004/rank-0", "step-00000006/rank-0"]


def test_only_shares_that_belong_together_count(ranks: Ranks, tmp_path: Path):
    assert ranks.run(newest, tmp_path) == [(None, [])] * 2
    ranks.run(save, tmp_path, [2, 4])
    shutil.rmtree(tmp_path / "checkpoints" / step_name(4) / "rank-1")
    (saved, warned), (other, silent) = ranks.run(newest, tmp_path)
    assert saved == other
    assert (saved.step, saved.holders, silent) == (2, {0: 0, 1: 1}, [])
    assert "step-00000004 is skipped: rank-1 is on no rank's disk" in warned[0]
    ranks.run(partial(save, attempt="b"), tmp_path, [4])
    first = tmp_path / "checkpoints" / step_name(4) / "rank-0"
    shutil.rmtree(first)
    shutil.copytree(tmp_path / "checkpoints" / step_name(2) / "rank-0", first)
    assert ranks.run(newest, tmp_path)[0][0].step == 2


def _save_up_to(folder: Path, last: str) -> None:
    """Save a first step, in which this rank dies when its share is written ("staged") or in its place."""
    commit = saving.commit_share

    def dies(target: Path) -> None:
        if dist.get_rank() == 0 and last == "committed":
            commit(target)
        raise KeyboardInterrupt

    with mock.patch.object(saving, "commit_share", dies), contextlib.suppress(KeyboardInterrupt):
        save(folder, [2])


def _newest_late(folder: Path) -> tuple[SavedStep | None, list[str]]:
    """`newest`, where both ranks find a share that is not in its place yet, and rank 1 takes longer to move it."""
    remove = saving.remove_share

    def late(target: Path) -> None:
        time.sleep((1 + dist.get_rank()) / 4)
        remove(target)

    with mock.patch.object(saving, "remove_share", late):
        return newest(folder)


@pytest.mark.parametrize(("last", "step"), [("staged", None), ("committed", 2)])
def test_a_step_counts_from_the_first_share_that_is_in_its_place(
    ranks: Ranks, tmp_path: Path, last: str, step: int | None
):
    """By then all are on the disks: a crash in between loses nothing, and one before that leaves no half of a step."""
    ranks.run(_save_up_to, tmp_path, last)
    for saved, warned in ranks.run(_newest_late, tmp_path):
        assert (saved and saved.step, warned) == (step, [])
    ranks.run(save, tmp_path, [2])
    assert ranks.run(newest, tmp_path)[0][0].step == 2
    assert shares(tmp_path) == ["step-00000002/rank-0", "step-00000002/rank-1"]


def _newest_of_two_disks(folder: Path) -> SavedStep | None:
    return newest(folder / f"disk-{dist.get_rank()}")[0]


def test_disks_of_several_machines_are_one(ranks: Ranks, tmp_path: Path):
    """Rank 1's share lies where rank 0 is, and rank 0's copy of its own is damaged."""
    ranks.run(save, tmp_path / "disk-0", [2])
    shutil.copytree(tmp_path / "disk-0", tmp_path / "disk-1")
    one, two = (tmp_path / f"disk-{i}" / "checkpoints" / step_name(2) for i in range(2))
    shutil.rmtree(two / "rank-1")
    flip(one / "rank-0" / TENSORS, 999)
    saved, other = ranks.run(_newest_of_two_disks, tmp_path)
    assert saved == other
    assert saved.holders == {0: 1, 1: 0}
    flip(two / "rank-0" / TENSORS, 999)
    for outcome in ranks.outcomes(_newest_of_two_disks, tmp_path):
        assert outcome.kind == "CheckpointError"
        assert "step-00000002: rank-0 has" in outcome.text


def test_of_many_shares_that_are_missing_a_few_are_named(tmp_path: Path, alone: None):
    layout = manifest().layout | {"pipeline.ranks": 1, "pipeline.data_parallel": 1 << 16}
    save(tmp_path, [2], ranks=1 << 16, layout=layout | {"layers": [1]})
    saved, warned = newest(tmp_path)
    assert saved is not None
    assert "65531 more up to rank-65535 are on no rank's disk; the whole" in warned[0]
    assert len(warned[0]) < 1000


def test_of_equal_pipelines_one_suffices(ranks: Ranks, tmp_path: Path):
    layout = manifest().layout | {"pipeline.data_parallel": 2}
    ranks.run(partial(save, layout=layout, ranks=4), tmp_path, [2])
    saved = ranks.run(newest, tmp_path)[0]
    assert saved[0].step == 2
    assert "rank-2 is on no rank's disk, rank-3 is on no rank's disk; the whole model is" in saved[1][0]
    for path in tmp_path.glob("checkpoints/*/rank-1"):
        shutil.rmtree(path)
    for outcome in ranks.outcomes(newest, tmp_path):
        assert outcome.kind == "CheckpointError"
        assert "step-00000002: rank-1 is on no" in outcome.text


def _save_where_one_fails(folder: Path, failing: int) -> None:
    save(folder, [2, 4])
    write = saving.write_file

    def full(path: Path, chunks: Any) -> None:
        write(path, list(chunks)[:1])
        raise OSError(28, "No space left on device")

    with mock.patch.object(saving, "write_file", full if dist.get_rank() == failing else write):
        save(folder, [6])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_ends_all_ranks_with_one_line_and_costs_no_older_step(ranks: Ranks, tmp_path: Path, failing: int):
    outcomes = ranks.outcomes(_save_where_one_fails, tmp_path, failing)
    where = tmp_path / "checkpoints" / step_name(6) / f"rank-{failing}"
    for outcome in outcomes:
        assert outcome.kind == "TransientError"
        assert outcome.text == (
            f"rank {failing} cannot write its share of step 6, {where}: No space left on device; "
            "older checkpoints are as they were"
        )
    assert shares(tmp_path) == [f"step-0000000{s}/rank-{r}" for s in (2, 4) for r in (0, 1)]
    assert ranks.run(newest, tmp_path)[0][0].step == 4


def test_a_disk_that_is_really_full(tmp_path: Path, alone: None):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        save(small, [2])
        big = {"model/a": torch.zeros(1 << 16)}
        with pytest.raises(saving.TransientError, match=r"step 4, .*: No space left on device"):
            Checkpoints(small, rank=0, keep=2).save(4, big, run_manifest(1))
        assert shares(small) == ["step-00000002/rank-0"]
        saved, _ = newest(small)
        assert saved is not None
        assert load_file(small / "checkpoints" / step_name(2) / "rank-0" / TENSORS)["model/a"][0, 0] == 2
    finally:
        subprocess.run(["umount", str(small)], check=True)


def _slow_together(seconds: float) -> list[int]:
    import time

    def work() -> int:
        time.sleep(seconds * dist.get_rank())
        return dist.get_rank()

    with mock.patch.object(saving, "_BEAT_SECONDS", 0.1):
        return saving.together(work)


def test_ranks_that_take_long_say_that_they_live(ranks: Ranks):
    assert ranks.run(_slow_together, 0.5) == [[0, 1]] * 2


class _LateThread:
    """A thread that ends as soon as somebody asks whether it is alive."""

    def __init__(self, target: Any, name: str) -> None:
        self._target = target

    def join(self, timeout: float) -> None:
        pass

    def is_alive(self) -> bool:
        self._target()
        return False


def test_an_error_that_comes_at_any_moment_is_raised_as_it_is(alone: None):
    def work() -> None:
        raise LookupError("of work")

    with mock.patch.object(saving.threads, "start", _LateThread), pytest.raises(LookupError, match="of work"):
        saving.together(work)
