import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lowbit.config import ConfigError
from lowbit.train.config import DataConfig
from lowbit.train.data import Order, Windows, capped, documents, library_files, load_data
from lowbit.train.folder import RunFolder
from lowbit.train.pretrained import ByteTokenizer, load_tokenizer

__all__ = ["folder"]  # a fixture


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
    order = Order(samples=11, batch=3, seed=5)
    epochs = [torch.cat([order.ids(3 * e + s) for s in range(3)]).tolist() for e in range(3)]
    for ids in epochs:
        assert len(set(ids)) == 9
        assert set(ids) <= set(range(11))
    assert len({tuple(ids) for ids in epochs}) == 3


def test_order_depends_on_seed_and_step_alone():
    first, second = Order(samples=40, batch=8, seed=1), Order(samples=40, batch=8, seed=1)
    backwards = [second.ids(step).tolist() for step in reversed(range(12))]
    assert [first.ids(step).tolist() for step in range(12)] == backwards[::-1]
    assert first.ids(3).tolist() != Order(samples=40, batch=8, seed=2).ids(3).tolist()


def _text(tmp_path, length):
    path = tmp_path / f"{length}.txt"
    path.write_bytes(bytes(i % 251 for i in range(length)))
    return (str(path),)


def test_the_last_share_is_held_out(tmp_path):
    data = DataConfig(text=_text(tmp_path, 1000), sequence=10, held_out_share=0.1)
    found = load_data(data)
    assert (len(found.train.tokens), len(found.held_out.tokens)) == (900, 100)
    assert np.concatenate([found.train.tokens, found.held_out.tokens])[-1] == 999 % 251


def test_held_out_text_may_be_another_file(tmp_path):
    text, held_out = _text(tmp_path, 1000), _text(tmp_path, 50)
    found = load_data(DataConfig(text=text, held_out=held_out, sequence=10))
    assert (len(found.train.tokens), len(found.held_out.tokens)) == (1000, 50)


def test_a_fingerprint_tells_texts_apart(tmp_path):
    config = DataConfig(text=_text(tmp_path, 1000), sequence=10)
    before = load_data(config).fingerprint()
    assert load_data(config).fingerprint() == before
    (tmp_path / "1000.txt").write_bytes(bytes(1000))
    assert load_data(config).fingerprint() != before


def test_token_ids_are_kept_and_not_worked_out_again(tmp_path, folder, monkeypatch):
    (tmp_path / "text.txt").write_text("few bits " * 100)
    config = DataConfig(text=(str(tmp_path / "text.txt"),), tokenizer=folder, sequence=4, batch=2, held_out_share=0)
    first = load_data(config, cache=tmp_path / "cache")
    assert first.train.tokens[:4].tolist() == [2, 3, 2, 3]
    monkeypatch.setattr("lowbit.train.data.encode_documents", lambda *_: pytest.fail("encoded again"))
    again = load_data(config, cache=tmp_path / "cache")
    assert again.fingerprint() == first.fingerprint()
    assert again.train.batch(torch.tensor([0]))[0].tolist() == [[2, 3, 2, 3]]


def test_token_ids_that_cannot_be_read_are_made_anew(tmp_path, folder, caplog):
    (tmp_path / "text.txt").write_text("few bits " * 100)
    config = DataConfig(text=(str(tmp_path / "text.txt"),), tokenizer=folder, sequence=4, batch=2, held_out_share=0)
    first = load_data(config, cache=tmp_path / "cache").fingerprint()
    [kept] = (tmp_path / "cache").iterdir()
    assert f"cache/{kept.name}" in RunFolder(tmp_path).made()
    for damage in (lambda data: data[:-9], lambda data: data[:4], lambda _: b""):
        kept.write_bytes(damage(kept.read_bytes()))
        caplog.clear()
        assert load_data(config, cache=tmp_path / "cache").fingerprint() == first
        assert [r.message.count("cannot be used and is written again") for r in caplog.records] == [1]
    RunFolder(tmp_path).clear()
    assert f"cache/{kept.name}" in RunFolder(tmp_path).made()
    assert load_data(config, cache=tmp_path / "cache").fingerprint() == first


def test_ids_of_a_tokenizer_that_was_replaced_are_not_taken(tmp_path, folder):
    (tmp_path / "text.txt").write_text("few bits " * 100)
    config = DataConfig(text=(str(tmp_path / "text.txt"),), tokenizer=folder, sequence=4, batch=2, held_out_share=0)
    load_data(config, cache=tmp_path / "cache")
    file = Path(folder) / "tokenizer.json"
    file.write_text(file.read_text().replace('"few"', '"many"'))
    assert load_data(config, cache=tmp_path / "cache").train.tokens[:2].tolist() == [0, 3]


@pytest.mark.parametrize(
    ("length", "values", "message"),
    [
        (0, {}, r"data.text .*/0.txt is empty"),
        (100, {"sequence": 100}, "data.sequence is 100; .* has 95 tokens to train on; .* at most 94"),
        (100, {"sequence": 20}, "data.batch is 8; .* has 4 windows of 20 tokens"),
    ],
)
def test_too_little_text_is_one_clear_line(tmp_path, length, values, message):
    with pytest.raises(ConfigError, match=message):
        load_data(DataConfig(text=_text(tmp_path, length), **values))


def test_too_little_held_out_text_is_one_clear_line(tmp_path):
    text, held_out = _text(tmp_path, 1000), _text(tmp_path, 10)
    with pytest.raises(ConfigError, match=r"data.held_out has 10 tokens; .* data.sequence \(10\)"):
        load_data(DataConfig(text=text, held_out=held_out, sequence=10))


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
        [f"samples of {(1 << 28) - 4000 // len(line) * len(line)} bytes"] if kind == "jsonl" else []
    )


WORDS = {"<unk>": 0, "<end>": 1, "few": 2, "bits": 3}


@pytest.fixture
def folder(tmp_path):
    """A word tokenizer with an end-of-text token, in Hugging Face format."""
    fast = Fast(models.WordLevel(WORDS, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", eos_token="<end>", additional_special_tokens=[]
    )
    tokenizer.save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def test_bytes_are_their_own_ids_and_hugging_face_agrees(tmp_path):
    text = "Grüße,\n\t 你好 \x00 it's  1234"
    ByteTokenizer().hugging_face().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = ByteTokenizer().encode(text.encode()).tolist()
    assert ids == list(text.encode()) == theirs(text)["input_ids"]
    assert theirs.decode(ids) == text
    assert len(theirs) == ByteTokenizer.size == 256


def test_a_folder_tokenizer_ends_documents(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.size == 4
    assert tokenizer.encode(b"few bits \xff few").tolist() == [2, 3, 0, 2, 1]


@pytest.fixture
def texts(tmp_path):
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
def test_files_folders_and_patterns(texts, names, expected):
    text = tuple(str(texts / name) for name in names)
    assert list(documents(DataConfig(text=text))) == expected


@pytest.mark.parametrize("name", ["absent.txt", "*.none"])
def test_a_path_without_files_is_named(texts, name):
    with pytest.raises(ConfigError, match=r"data\.text has '.*" + name.replace("*", r"\*")):
        list(documents(DataConfig(text=(str(texts / name),))))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(texts):
    (texts / "1.txt").chmod(0)
    with pytest.raises(ConfigError, match=r"1\.txt: Permission denied"):
        list(documents(DataConfig(text=(str(texts / "1.txt"),))))


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
