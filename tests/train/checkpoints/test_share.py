import contextlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lowbit.train.checkpoints.manifest import MANIFEST, TENSORS, DamagedShareError
from lowbit.train.checkpoints.save import DTYPES, commit_share, stage_share, verify_share
from tests.train.checkpoints.test_manifest import manifest

FLIPS = 300


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model/a": torch.full((3, 2), value),
        "model/odd": torch.arange(7, dtype=torch.uint8),
        "model/turned": torch.arange(6.0).view(2, 3).t(),
        "optimizer/a/step": torch.tensor(value),
        "none": torch.empty(0, 3),
        **{name: torch.ones(3, dtype=dtype) for name, dtype in DTYPES.items()},
    }


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


def test_no_flipped_bit_goes_unnoticed(share: Path):
    files = [share / MANIFEST, share / TENSORS]
    whole = {path: path.read_bytes() for path in files}
    draw, noticed = random.Random(0), 0
    for _ in range(FLIPS):
        path = draw.choice(files)
        data, position = bytearray(whole[path]), draw.randrange(8 * len(whole[path]))
        data[position // 8] ^= 1 << position % 8
        path.write_bytes(data)
        try:
            verify_share(share)
        except DamagedShareError:
            noticed += 1
        path.write_bytes(whole[path])
    assert noticed == FLIPS
    verify_share(share)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda share: os.truncate(share / TENSORS, 100), "has 100 bytes of tensors.safetensors"),
        (lambda share: (share / TENSORS).unlink(), "cannot be read: No such file"),
        (lambda share: (share / MANIFEST).unlink(), "has no manifest.json"),
    ],
)
def test_damage_is_told(share: Path, damage: Any, text: str):
    damage(share)
    with pytest.raises(DamagedShareError, match=text):
        verify_share(share)


def test_tensors_that_are_a_pipe_are_not_waited_for(share: Path):
    (share / TENSORS).unlink()
    os.mkfifo(share / TENSORS)
    with pytest.raises(DamagedShareError, match="has a tensors.safetensors that is not a regular file"):
        verify_share(share)


def test_a_manifest_that_lies_about_tensors_is_noticed(share: Path):
    read = verify_share(share)
    read.tensors["model/a"]["shape"] = [2, 3]
    (share / MANIFEST).write_bytes(read.to_bytes())
    with pytest.raises(DamagedShareError, match="other tensors"):
        verify_share(share)


def write_share(target: Path, *contents: Any) -> None:
    stage_share(target, *contents)
    commit_share(target)


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
