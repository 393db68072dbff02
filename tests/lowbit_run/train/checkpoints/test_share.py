import contextlib
import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lowbit_run.train.checkpoints.manifest import (
    MANIFEST,
    TENSORS,
    DamagedShareError,
    Manifest,
    newest_step,
    read_manifest,
    seal,
    shares_in,
    step_name,
    unseal,
)
from lowbit_run.train.checkpoints.save import DTYPES, commit_share, stage_share, verify_share
from tests.test_import import python

FLIPS = 300


def manifest(**changes: Any) -> Manifest:
    """A manifest of a share with one tensor."""
    layout = {
        "pipeline.ranks": 2, "pipeline.data_parallel": 1, "pipeline.stages_per_rank": 1, "pipeline.schedule": "1F1B",
        "layers": [2, 1], "rows": 2,
    }  # fmt: skip
    values: dict[str, Any] = {
        "step": 4, "rank": 0, "ranks": 2, "attempt": "a", "layout": layout,
        "identity": {"optimizer.lr": 1e-08, "data.text": "ä"}, "versions": {"lowbit": "1"}, "changes": [], "codecs": [],
        "aliases": {}, "file": {"bytes": 1, "sha256": "0"},
        "tensors": {"model/a": {"dtype": "F32", "shape": [2]}},
    }  # fmt: skip
    return Manifest(**(values | changes))


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model/a": torch.full((3, 2), value),
        "model/odd": torch.arange(7, dtype=torch.uint8),
        "model/turned": torch.arange(6.0).view(2, 3).t(),
        "optimizer/a/step": torch.tensor(value),
        "none": torch.empty(0, 3),
        **{name: torch.ones(3, dtype=dtype) for name, dtype in DTYPES.items()},
    }


def write_share(target: Path, *contents: Any) -> None:
    stage_share(target, *contents)
    commit_share(target)


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """A share that is whole."""
    path = tmp_path / "step-00000004" / "rank-0"
    write_share(path, manifest(), tensors())
    return path


def test_what_is_read_is_what_was_written(share: Path):
    entries, read = verify_share(share).tensors, load_file(share / TENSORS)
    assert entries.keys() == read.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert read_manifest(share).identity == manifest().identity


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)


def test_no_flipped_bit_goes_unnoticed(share: Path):
    draw = random.Random(0)
    for _ in range(FLIPS):
        path = share / draw.choice([MANIFEST, TENSORS])
        position = draw.randrange(8 * path.stat().st_size)
        flip(path, position)
        with pytest.raises(DamagedShareError):
            verify_share(share)
        flip(path, position)
    verify_share(share)


def replace(path: Path, make: Callable[[Path], Any]) -> None:
    """Something else in the place of a file."""
    path.unlink()
    make(path)


def lie(share: Path) -> None:
    """A manifest that is whole, but gives a tensor another shape."""
    read = verify_share(share)
    read.tensors["model/a"]["shape"] = [2, 3]
    (share / MANIFEST).write_bytes(read.to_bytes())


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda share: os.truncate(share / TENSORS, 100), "has 100 bytes of tensors.safetensors"),
        (lambda share: (share / TENSORS).unlink(), "cannot be read: No such file"),
        (lambda share: replace(share / TENSORS, os.mkfifo), "has a tensors.safetensors that is not a regular file"),
        (lambda share: (share / ".metadata").touch(), "holds .metadata, which its manifest does not list"),
        (lie, "other tensors"),
        (lambda share: (share / MANIFEST).unlink(), "has no manifest.json"),
        (lambda share: (share / MANIFEST).write_bytes(b""), "has a manifest.json that was changed or cut short"),
        (lambda share: replace(share / MANIFEST, os.mkfifo), "is not a regular file"),
        (lambda share: replace(share / MANIFEST, lambda p: p.symlink_to("/dev/zero")), "is not a regular file"),
        (lambda share: os.truncate(share / MANIFEST, 1 << 40), "more than 64 MiB"),
        (lambda share: share.rename(share.with_name("rank-1")), "is that of rank 0 at step 4"),
    ],
)
def test_damage_is_told(share: Path, damage: Callable[[Path], Any], text: str):
    with pytest.raises(DamagedShareError, match=text):
        verify_share(damage(share) or share)


class _Interrupted(BaseException):
    """The machine stops here."""


def _stop_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[str]:
    """Let the n-th call that changes the disk fail; gives the list of those that were made."""
    calls: list[str] = []

    def failing(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                raise error
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, failing(name, getattr(os, name)))
    return calls


@pytest.mark.parametrize("error", [_Interrupted(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("again", [False, True])
def test_a_crash_at_any_moment_leaves_whole_shares_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, again: bool
):
    """Writing a step for the first time, and once more over what is there."""
    number, calls = 0, [""]
    while number <= len(calls):
        number += 1
        folder = tmp_path / str(number)
        older, share = (folder / f"step-0000000{step}" / "rank-0" for step in (2, 4))
        write_share(older, manifest(step=2), tensors(2))
        if again:
            write_share(share, manifest(), tensors(3))
        with monkeypatch.context() as patch:
            calls = _stop_at(patch, number, error)
            with contextlib.suppress(type(error)):
                write_share(share, manifest(), tensors(4))
        assert torch.equal(load_file(older / TENSORS)["model/a"], tensors(2)["model/a"])
        verify_share(older)
        if (share / MANIFEST).exists():  # without one, a folder is no share
            verify_share(share)
        write_share(share, manifest(), tensors(5))
        verify_share(share)
        assert torch.equal(load_file(share / TENSORS)["model/a"], tensors(5)["model/a"])
        assert os.listdir(share.parent) == ["rank-0"]
    assert number > 8


def put(folder: Path, found: Manifest) -> None:
    share = folder / step_name(found.step) / f"rank-{found.rank}"
    share.mkdir(parents=True)
    (share / MANIFEST).write_bytes(found.to_bytes())


def test_every_flipped_bit_of_a_manifest_is_noticed():
    data = manifest().to_bytes()
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(DamagedShareError):
            unseal(bytes(flipped))


def test_another_way_to_write_the_same_is_noticed():
    values = json.loads(manifest().to_bytes())
    for data in (json.dumps(values, indent=1).encode(), manifest().to_bytes() + b"\n", b"", b"[]", b"{", b"[" * 99_999):
        with pytest.raises(DamagedShareError):
            unseal(data)


def test_a_foreign_manifest_is_checked():
    layout = manifest().layout
    wrong: list[tuple[str, Any, str]] = [
        ("format", 3, "has format 3; this version of lowbit reads format 1"),
        ("ranks", [], "ranks: Input should be a valid int"),
        ("ranks", 2_000_000_000, "ranks: Input should be less"),
        ("rank", 2, "ranks, stages and layers differ"),
        ("layout", {}, "layout.pipeline.ranks: Field required"),
        ("layout", layout | {"layers": [1 << 40, 1]}, "layout.layers.0: Input"),
        ("layout", layout | {"layers": [1, 1, 1]}, "ranks, stages and layers differ"),
        ("layout", layout | {"pipeline.data_parallel": 2}, "ranks, stages and layers differ"),
        ("codecs", [{"after_layer": "x"}], "codecs.0.after_layer"),
        ("tensors", {"\x1b[2J": {"dtype": "F32", "shape": [-1]}}, r"tensors.\\x1b\[2J.shape.0"),
    ]
    for key, value, text in wrong:
        values = {"format": 1, **dataclasses.asdict(manifest()), key: value}
        with pytest.raises(DamagedShareError, match=text):
            Manifest.from_values(unseal(seal(values)))


def test_the_newest_step_is_the_newest_that_is_whole(tmp_path: Path):
    assert newest_step(tmp_path / "absent") is None
    for name in ("step-abc", "step-00000009", ".step-00000010", "step-00000011/rank-x"):
        (tmp_path / name).mkdir(parents=True)
    assert newest_step(tmp_path) is None
    put(tmp_path, manifest())
    assert newest_step(tmp_path) == 4, "the other machine has the other share"
    put(tmp_path, manifest(rank=1))
    put(tmp_path, manifest(step=6))
    assert newest_step(tmp_path) == 4, "step 6 was not finished"
    put(tmp_path, manifest(step=6, rank=1, attempt="b"))
    assert newest_step(tmp_path) == 4, "these do not belong together"


def test_a_step_that_another_rank_drops_meanwhile_has_no_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = tmp_path / step_name(4)
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # it still was when somebody looked
    assert shares_in(step) == {}


def test_it_is_read_without_pytorch():
    assert python("import sys, lowbit_run.train.checkpoints.manifest; print('torch' in sys.modules)") == "False"
