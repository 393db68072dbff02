import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowbit.train.checkpoints.manifest import (
    MANIFEST,
    DamagedShareError,
    Manifest,
    newest_step,
    read_manifest,
    seal,
    shares_in,
    step_name,
    unseal,
)


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


def put(folder: Path, found: Manifest) -> None:
    share = folder / step_name(found.step) / f"rank-{found.rank}"
    share.mkdir(parents=True)
    (share / MANIFEST).write_bytes(found.to_bytes())


def test_what_is_sealed_comes_back():
    assert Manifest.from_values(unseal(manifest().to_bytes())) == manifest()


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
        with pytest.raises(DamagedShareError, match="changed or cut short"):
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


def test_a_manifest_belongs_to_its_place(tmp_path: Path):
    put(tmp_path, manifest())
    share = tmp_path / "step-00000004" / "rank-0"
    assert read_manifest(share) == manifest()
    with pytest.raises(DamagedShareError, match="is that of rank 0 at step 4"):
        read_manifest(share.rename(share.with_name("rank-1")))


@pytest.mark.parametrize("kind", ["pipe", "device", "long"])
def test_a_manifest_that_is_no_file_or_endless_is_not_read(tmp_path: Path, kind: str):
    share = tmp_path / "step-00000004" / "rank-0"
    share.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(share / MANIFEST)
    elif kind == "device":
        (share / MANIFEST).symlink_to("/dev/zero")
    else:
        with (share / MANIFEST).open("wb") as file:
            file.truncate(1 << 40)
    expected = "more than 67108864 bytes" if kind == "long" else "is not a regular file"
    with pytest.raises(DamagedShareError, match=expected):
        read_manifest(share)


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


def test_it_is_read_without_pytorch():
    program = "import sys, lowbit.train.checkpoints.manifest; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    assert done.stdout == "False\n"


def test_a_step_that_another_rank_drops_meanwhile_has_no_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = tmp_path / step_name(4)
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # it still was when somebody looked
    assert shares_in(step) == {}
