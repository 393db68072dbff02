from __future__ import annotations

import os

import pytest

from lowbit.config import ConfigError
from lowbit.train.config import DataConfig
from lowbit.train.data import capped, documents, library_files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"two")
    (tmp_path / "1.txt").write_bytes(b"one")
    (tmp_path / "3.md").write_bytes(b"three")
    (tmp_path / ".hidden").write_bytes(b"no")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1.txt"], [b"one"]),
        (["."], [b"one", b"three", b"two"]),
        (["**/*.txt"], [b"one", b"two"]),
        (["*.md", "1.txt"], [b"three", b"one"]),
    ],
)
def test_files_folders_and_patterns(folder, names, expected):
    text = tuple(str(folder / name) for name in names)
    assert list(documents(DataConfig(text=text))) == expected


@pytest.mark.parametrize("name", ["absent.txt", "*.none"])
def test_a_path_without_files_is_named(folder, name):
    with pytest.raises(ConfigError, match=r"data\.text has '.*" + name.replace("*", r"\*")):
        list(documents(DataConfig(text=(str(folder / name),))))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(folder):
    (folder / "1.txt").chmod(0)
    with pytest.raises(ConfigError, match=r"1\.txt: Permission denied"):
        list(documents(DataConfig(text=(str(folder / "1.txt"),))))


def test_the_default_is_the_standard_library_and_always_the_same():
    names = [path.name for path in library_files()]
    assert names == [path.name for path in library_files()]
    assert "dataclasses.py" in names
    assert names != sorted(names)
    assert not any("site-packages" in str(path) for path in library_files())
    assert next(iter(documents(DataConfig()))) == library_files()[0].read_bytes()


def test_text_is_cut_at_the_limit():
    assert list(capped(iter([b"abc", b"de", b"f"]), 4)) == [b"abc", b"d"]
    assert list(capped(iter([b"abc", b"de"]), 3)) == [b"abc"]


def test_a_dataset_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "zwölf"], "label": [0, 1]})
    datasets.DatasetDict({"train": rows, "rest": rows.select([1])}).save_to_disk(tmp_path / "both")
    rows.save_to_disk(tmp_path / "one")
    both, one = str(tmp_path / "both"), str(tmp_path / "one")
    assert list(documents(DataConfig(dataset=one))) == [b"one", "zwölf".encode()]
    assert list(documents(DataConfig(dataset=both))) == [b"one", "zwölf".encode()]
    assert list(documents(DataConfig(dataset=both, dataset_split="rest"))) == ["zwölf".encode()]
    with pytest.raises(ConfigError, match=r"data.column is 'body'; .* has: text, label"):
        list(documents(DataConfig(dataset=one, column="body")))
    with pytest.raises(ConfigError, match=r"data.dataset_split is 'test'; .* has: train, rest"):
        list(documents(DataConfig(dataset=both, dataset_split="test")))
    with pytest.raises(ConfigError, match=r"data.dataset '.*' cannot be opened"):
        list(documents(DataConfig(dataset=str(tmp_path))))
