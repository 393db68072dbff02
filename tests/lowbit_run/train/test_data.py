import os
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lowbit_run.config import ConfigError
from lowbit_run.train import from_mapping
from lowbit_run.train.config import DataConfig
from lowbit_run.train.data import (
    Order,
    Windows,
    capped,
    documents,
    encode_documents,
    files_named,
    library_files,
    load_data,
)
from lowbit_run.train.folder import RunFolder
from lowbit_run.train.pretrained import ByteTokenizer, load_tokenizer
from tests.refused import refused


def test_windows_are_numbered_and_targets_follow_inputs():
    windows = Windows(np.arange(14, dtype=np.uint8), 4)
    inputs, targets = windows.batch(torch.tensor([2, 0]))
    assert len(windows) == 3
    assert inputs.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert targets.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert inputs.dtype == targets.dtype == torch.int64
    assert len(Windows(np.arange(4), 4)) == 0
    assert len(Windows(np.arange(0), 4)) == 0


def test_an_epoch_has_every_sample_once_and_the_next_has_another_order():
    """Which depends on the seed and the step alone."""
    order = Order(samples=11, batch=3, seed=5)
    epochs = [torch.cat([order.ids(3 * e + s) for s in range(3)]).tolist() for e in range(3)]
    for ids in epochs:
        assert len(set(ids)) == 9
        assert set(ids) <= set(range(11))
    assert len({tuple(ids) for ids in epochs}) == 3
    again = Order(samples=11, batch=3, seed=5)
    assert [again.ids(step).tolist() for step in (8, 7, 6)] == [epochs[2][i : i + 3] for i in (6, 3, 0)]
    assert order.ids(3).tolist() != Order(samples=11, batch=3, seed=2).ids(3).tolist()


def _text(tmp_path: Path, length: int) -> tuple[str]:
    path = tmp_path / f"{length}.txt"
    path.write_bytes(bytes(i % 251 for i in range(length)))
    return (str(path),)


def test_the_last_share_or_another_file_is_held_out(tmp_path: Path):
    text = _text(tmp_path, 1000)
    config = DataConfig(text=text, sequence=10, held_out_share=0.1)
    found = load_data(config)
    assert (len(found.train.tokens), len(found.held_out.tokens)) == (900, 100)
    assert np.concatenate([found.train.tokens, found.held_out.tokens])[-1] == 999 % 251
    other = load_data(DataConfig(text=text, held_out=_text(tmp_path, 50), sequence=10))
    assert (len(other.train.tokens), len(other.held_out.tokens)) == (1000, 50)
    Path(*text).write_bytes(bytes(1000))
    assert load_data(config).fingerprint() != found.fingerprint()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A word tokenizer with an end-of-text token, in Hugging Face format."""
    fast = Fast(models.WordLevel({"<unk>": 0, "<end>": 1, "few": 2, "bits": 3}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", eos_token="<end>", additional_special_tokens=[]
    )
    tokenizer.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def test_token_ids_are_kept_until_they_are_damaged_or_of_another_tokenizer(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "text.txt").write_text("few bits " * 100)
    config = DataConfig(text=(str(tmp_path / "text.txt"),), tokenizer=folder, sequence=4, batch=2, held_out_share=0)
    load = partial(load_data, config, cache=tmp_path / "cache")
    first = load()
    assert first.train.tokens[:4].tolist() == [2, 3, 2, 3]
    with monkeypatch.context() as patch:
        patch.setattr("lowbit_run.train.data.encode_documents", lambda *_: pytest.fail("encoded again"))
        assert load().fingerprint() == first.fingerprint()
    [kept] = (tmp_path / "cache").iterdir()
    for damage in (lambda data: data[:-9], lambda data: data[:4], lambda _: b""):
        kept.write_bytes(damage(kept.read_bytes()))
        caplog.clear()
        assert load().fingerprint() == first.fingerprint()
        assert [r.message.count("cannot be used and is written again") for r in caplog.records] == [1]
    RunFolder(tmp_path).clear()
    assert f"cache/{kept.name}" in RunFolder(tmp_path).made()
    assert load().fingerprint() == first.fingerprint()
    file = Path(folder) / "tokenizer.json"
    file.write_text(file.read_text().replace('"few"', '"many"'))
    assert load().train.tokens[:2].tolist() == [0, 3]


def test_one_of_several_ranks_on_a_machine_encodes_the_text(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
):
    encoded: list[str] = []

    def slowly(*given: Any) -> Any:
        encoded.append(threading.current_thread().name)
        time.sleep(0.2)  # in which the others ask, too
        return encode_documents(*given)

    monkeypatch.setattr("lowbit_run.train.data.encode_documents", slowly)
    (tmp_path / "text.txt").write_text("few bits " * 100)
    config = DataConfig(text=(str(tmp_path / "text.txt"),), tokenizer=folder, sequence=4, batch=2, held_out_share=0)
    with ThreadPoolExecutor(3) as pool:
        loaded = list(pool.map(lambda _: load_data(config, cache=tmp_path / "run" / "cache"), range(3)))
    assert len({each.fingerprint() for each in loaded}) == len(encoded) == 1


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_no_more_of_a_large_file_is_read_than_is_used(tmp_path: Path, kind: str):
    path = tmp_path / "large"
    line = '{"prompt": "what is it?", "completion": "a bit"}\n' if kind == "jsonl" else "a bit is the unit\n"
    path.write_text(100 * line)
    os.truncate(path, 1 << 28)  # zeros that take no room on the disk
    tracemalloc.start()
    loaded = load_data(DataConfig(text=(str(path),), format=kind, sequence=64, batch=2, max_bytes=4000))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loaded.train) >= 2
    assert most < 64 << 20
    assert [note.split(" were not")[0] for note in loaded.notes] == (
        [f"samples of {(1 << 28) - 4000 // len(line) * len(line)} bytes"]
        if kind == "jsonl"
        else [f"{(1 << 28) - 4000:,} bytes of the text"]
    )


def test_bytes_are_their_own_ids_and_hugging_face_agrees(tmp_path: Path):
    text = "Grüße,\n\t 你好 \x00 it's  1234"
    ByteTokenizer().hugging_face().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = ByteTokenizer().encode(text.encode()).tolist()
    assert ids == list(text.encode()) == theirs(text)["input_ids"]
    assert theirs.decode(ids) == text
    assert len(theirs) == ByteTokenizer.size == 256


def test_a_folder_tokenizer_ends_documents(folder: str):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.size == 4
    assert tokenizer.encode(b"few bits \xff few").tolist() == [2, 3, 0, 2, 1]


def test_documents_that_are_no_text_are_counted(tmp_path: Path, folder: str):
    """Such as pictures beside notes: a tokenizer would write the replacement character for what it cannot read."""
    for name, content in {"1.txt": "few bits é " * 40, "2.txt": "few bits é "}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "3.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "4.txt").write_text("few", encoding="utf-16")
    values: Any = {"text": str(tmp_path / "*.*"), "tokenizer": folder, "batch": 1, "sequence": 4}

    def notes(**data: Any) -> tuple[str, ...]:
        return load_data(from_mapping({"data": values | data, "pipeline": {"microbatches": 1}}).data).notes

    told = "2 of 4 documents are not UTF-8, such as pictures: the tokenizer replaces bytes of theirs"
    assert notes() == (told,)
    assert notes(tokenizer="bytes") == ()
    assert "UTF-8" not in str(notes(max_bytes=12 * 40 - 2)), "or end within a character"


def test_what_is_not_read_or_read_twice_is_said(tmp_path: Path):
    for name in ("a/1.txt", "a/2.txt", "b/3.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("few bits " * 40)
    (tmp_path / "b" / "link").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "b" / "circle").symlink_to(tmp_path / "b", target_is_directory=True)
    sized: dict[str, Any] = {"sequence": 4, "batch": 1}

    def loaded(*text: str, **more: Any) -> Any:
        return load_data(DataConfig(text=tuple(str(tmp_path / each) for each in text), **sized | more))

    assert len(loaded("b").train.tokens) + len(loaded("b").held_out.tokens) == 3 * 360, "what links lead to, and once"
    assert loaded("b", held_out=(str(tmp_path / "c.txt"),)).notes == ()
    [note] = loaded("a", held_out=(str(tmp_path / "a/2.txt"),)).notes
    assert "a/2.txt, which the model is trained on as well" in note
    [note] = loaded("*").notes
    assert "matches 2 folders, too, whose files are not read" in note
    [note] = loaded("a", max_bytes=100).notes
    assert note == "620 bytes of the text were not read: data.max_bytes is 100"
    [note] = loaded("c.txt", held_out_share=0.01).notes
    assert note.startswith("data.held_out_share is 0.01, of which nothing remains to hold out")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1.txt"], [b"one"]),
        (["."], [b"one", b"three", b"two"]),
        (["**/*.txt"], [b"one", b"two"]),
        (["*.md", "1.txt"], [b"three", b"one"]),
    ],
)
def test_files_folders_and_patterns(tmp_path: Path, names: list[str], expected: list[bytes]):
    (tmp_path / "b").mkdir()
    for name, text in {"b/2.txt": "two", "1.txt": "one", "3.md": "three", ".hidden": "no"}.items():
        (tmp_path / name).write_text(text)
    assert list(documents(DataConfig(text=tuple(str(tmp_path / name) for name in names)))) == expected


def test_hidden_files_and_folders_of_a_folder_are_no_text(tmp_path: Path):
    """A clone's .git, the .cache of a download, and compiled Python; but a user may name a hidden folder itself."""
    root = tmp_path / ".data" / "notes"
    left_out = (".git/objects/ab/c", ".cache/huggingface/CACHEDIR.TAG", "b/.git", "b/.cache/x.txt", "b/__pycache__/y")
    for name in ("1.txt", "b/2.txt", "b/c..d/3.txt", *left_out):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "4.txt").symlink_to(root / "b/.cache/x.txt")  # as snapshots of the Hub's cache point to blobs
    (root / "gone.txt").symlink_to(root / "nowhere")
    expected = [root / name for name in ("1.txt", "4.txt", "b/2.txt", "b/c..d/3.txt")]
    assert files_named((str(root),), "data.text") == expected
    (tmp_path / "link").symlink_to(root)
    for same in (tmp_path / "link", root / "b" / ".."):
        assert [path.resolve() for path in files_named((str(same),), "t")] == [path.resolve() for path in expected]
    assert files_named((str(root / ".cache/huggingface"),), "t") == [root / ".cache/huggingface/CACHEDIR.TAG"]
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    (tmp_path / "empty" / ".git" / "HEAD").touch()
    with pytest.raises(ConfigError, match=r"data\.text has .*empty.*allowed: a folder with a file that is not hidden"):
        files_named((str(tmp_path / "empty"),), "data.text")


def test_what_is_no_file_is_refused_before_anything_waits_for_it(tmp_path: Path):
    """A pipe, such as <(zcat notes.gz), would be empty for all but the first process, which wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "link").symlink_to("x" * 300)
    refused(
        (lambda: files_named((str(tmp_path / "pipe"),), "data.text"), ConfigError, "data.text has '.*pipe', where "),
        (lambda: files_named(("/dev/null",), "data.text"), ConfigError, "data.text has '/dev/null', where there is no"),
        (
            lambda: files_named((str(tmp_path / "far"),), "data.text"),
            ConfigError,
            "data.text .*: File name too long: .*link",
        ),
        (lambda: files_named(("~nobody-here/x",), "data.text"), ConfigError, "data.text has '~nobody-here/x': .*home"),
    )
    [told] = refused((lambda: files_named(("the text " * 500,), "data.text"), ConfigError, "data.text has 'the text "))
    assert len(told) < 800, "a text in place of a path"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path: Path):
    (text,) = _text(tmp_path, 1)
    Path(text).chmod(0)
    with pytest.raises(ConfigError, match=r"1\.txt: Permission denied"):
        list(documents(DataConfig(text=(text,))))
    Path(text).parent.joinpath("closed").mkdir(mode=0)
    with pytest.raises(ConfigError, match=r"text folder .*closed: Permission denied"):
        files_named((str(tmp_path),), "data.text")


def test_the_default_is_the_standard_library_and_always_the_same():
    names = [path.name for path in library_files()]
    assert names == [path.name for path in library_files()]
    assert "dataclasses.py" in names
    assert names != sorted(names)
    assert not any("site-packages" in str(path) for path in library_files())
    first = library_files()[0].read_bytes()
    assert next(iter(documents(DataConfig()))) == first
    assert list(capped(iter([first, b"de", b"f"]), len(first) + 1)) == [first, b"d"]
    assert list(capped(iter([b"abc", b"de"]), 3)) == [b"abc"]


def test_a_dataset_on_disk(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "zwölf"], "label": [0, 1]})
    datasets.DatasetDict({"train": rows, "rest": rows.select([1])}).save_to_disk(tmp_path / "both")
    rows.save_to_disk(tmp_path / "one")

    def read(name: str, **options: str) -> list[bytes]:
        return list(documents(DataConfig(dataset=str(tmp_path / name), **options)))

    assert read("one") == read("both") == [b"one", "zwölf".encode()]
    assert read("both", dataset_split="rest") == ["zwölf".encode()]
    refused(
        (partial(read, "one", column="body"), ConfigError, r"data.column is 'body'; .* has: text, label"),
        (partial(read, "both", dataset_split="x"), ConfigError, r"data.dataset_split is 'x'; .* has: train, rest"),
        (partial(read, "."), ConfigError, r"data.dataset '.*' cannot be opened"),
    )


@pytest.mark.parametrize("kind", ["numpy", "pandas", "arrow", "torch"])
def test_a_dataset_on_disk_may_have_been_saved_with_a_format(tmp_path: Path, kind: str):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("pandas")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).with_format(kind).save_to_disk(tmp_path)
    assert list(documents(DataConfig(dataset=str(tmp_path)))) == [b"one", b"two"]


def test_a_dataset_whose_error_says_nothing_is_refused_in_one_line(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    with (
        mock.patch.object(datasets, "load_from_disk", side_effect=NotImplementedError),
        pytest.raises(ConfigError, match="cannot be opened: NotImplementedError$"),
    ):
        list(documents(DataConfig(dataset=str(tmp_path))))


@pytest.mark.parametrize("wrong", [None, ["a"], 3, {"a": "b"}], ids=repr)
def test_a_row_of_a_dataset_that_is_no_text_is_named(tmp_path: Path, wrong: object):
    datasets = pytest.importorskip("datasets")
    rows = ["two", None] if wrong is None else [wrong]
    datasets.Dataset.from_dict({"text": ["one"] * len(rows), "body": rows}).save_to_disk(tmp_path)
    read = documents(DataConfig(dataset=str(tmp_path), column="body"))
    with pytest.raises(ConfigError) as caught:
        list(read)
    assert f"data.dataset {str(tmp_path)!r} row {len(rows)}: body is {wrong!r}; allowed: text" in str(caught.value)
