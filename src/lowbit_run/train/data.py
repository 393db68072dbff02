"""Read documents, and cut their tokens into numbered windows, in a seeded order.

Documents come from files, a Hugging Face dataset or Python's standard library.

Every rank computes the sample ids of a step from the seed and the step number. So nothing about the data is sent,
and a run that resumes at step N sees exactly the samples that it would have seen.
"""

import codecs
import fcntl
import glob
import hashlib
import os
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit import escape
from lowbit.escape import one_line, printable, shown
from lowbit.files import replacing
from lowbit.wire.errors import first_line
from lowbit_run.config import ConfigError
from lowbit_run.train import dates
from lowbit_run.train.answers import Answers, encode, fit, fit_held_out, read_samples
from lowbit_run.train.config import DataConfig
from lowbit_run.train.folder import RunFolder
from lowbit_run.train.pretrained import ByteTokenizer, Tokenizer, definition, is_own, tokenizer_for

log = escape.logger(__name__)

_PIECE_BYTES = 16 << 20
_TURN_SECONDS, _QUIET_SECONDS = 900.0, 10.0  # to wait for another process that encodes; before a line says so
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


class Windows:
    """Windows of `sequence` token ids, back to back; the token after a window is its last target."""

    def __init__(self, tokens: np.ndarray, sequence: int) -> None:
        self.tokens, self.sequence = tokens, sequence

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence)

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples: int64, (len(ids), sequence) each."""
        starts = ids.numpy()[:, None] * self.sequence
        both = torch.from_numpy(self.tokens[starts + np.arange(self.sequence + 1)].astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def positions(self, ids: Tensor) -> Tensor | None:
        """Return None: each window is one text, and positions count from its beginning."""

    def learned(self, ids: Tensor) -> int | None:
        """Return None: every token is a target."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Everything that training depends on."""
        return (self.tokens,)


class Order:
    """The samples of each step: every epoch is a new permutation, without an incomplete last batch."""

    def __init__(self, *, samples: int, batch: int, seed: int) -> None:
        self.samples, self.batch, self.seed = samples, batch, seed
        self.steps_per_epoch = samples // batch
        self._permutation = lru_cache(maxsize=1)(self._permute)

    def ids(self, step: int) -> Tensor:
        """Return the sample ids of a step (from 0): int64, (batch,), all different."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._permutation(epoch)[position * self.batch : (position + 1) * self.batch]

    def _permute(self, epoch: int) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randperm(self.samples, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training and held-out windows, and their tokenizer. notes: warnings for the user, one sentence each.

    `date`: the day that the chat template wrote into the samples as today; empty if it wrote none.
    """

    train: Windows | Answers
    held_out: Windows | Answers
    tokenizer: Tokenizer
    date: str = ""
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits, by which ranks check that they have the same tokens."""
        digest = hashlib.sha256()
        for windows in (self.train, self.held_out):
            for array in windows.arrays:
                digest.update(f"{array.dtype} {windows.sequence} {len(array)}".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def described(self) -> str:
        """Describe the training and held-out data in words."""
        if isinstance(self.train, Answers) and isinstance(self.held_out, Answers):
            return f"{self.train.described()}; {self.held_out.samples:,} samples held out"
        train, held_out = (sum(map(len, windows.arrays)) for windows in (self.train, self.held_out))
        return f"{train:,} to train on, {held_out:,} held out"


def load_data(data: DataConfig, *, pretrained: str = "", cache: Path | None = None, date: str = "") -> Data:
    """Read, tokenize and cut the text.

    Args:
        pretrained: folder of the model, whose tokenizer is used unless `data` names one; empty: bytes.
        cache: folder that keeps the token ids of a Hugging Face tokenizer, so that they are computed only once.
        date: day for chat templates, unless `data` sets one; empty: today.
    """
    tokenizer, foreign = tokenizer_for(data.tokenizer, pretrained), list[str]()
    if pretrained and not is_own(tokenizer, data.tokenizer, pretrained):
        foreign.append(f"data.tokenizer is {data.tokenizer!r}, which is not the tokenizer of the model {pretrained!r}")
    if data.format == "jsonl":
        loaded = _load_samples(data, tokenizer, data.date or date or dates.today())
        return replace(loaded, notes=(*foreign, *loaded.notes))
    are_text: list[bool] = []  # of each document
    sizes: list[int] = []
    tokens = _tokens(_checked(capped(documents(data), data.max_bytes), are_text, sizes), tokenizer, cache)
    if not len(tokens):
        raise ConfigError(f"{_source(data)} is empty; allowed: text with at least one token")
    if data.held_out:
        texts = read_files(files_named(data.held_out, "data.held_out"), data.max_bytes)
        held_out = _tokens(_checked(texts, are_text, []), tokenizer, cache)
    else:
        tokens, held_out = np.split(tokens, [held_out_start(len(tokens), data.held_out_share)])
    notes = [*foreign, *_about_files(data, len(held_out) > data.sequence)]
    if data.dataset and sum(sizes) >= data.max_bytes:
        notes.append(f"the data set was read to its first {data.max_bytes:,} bytes (data.max_bytes)")
    if left_out := sum(_unread(getattr(data, key), f"data.{key}", data.max_bytes) for key in ("text", "held_out")):
        notes.append(f"{left_out:,} bytes of the text were not read: data.max_bytes is {data.max_bytes}")
    if not all(are_text) and not isinstance(tokenizer, ByteTokenizer):
        notes.append(
            f"{are_text.count(False)} of {len(are_text)} documents are not UTF-8, such as pictures: "
            "the tokenizer replaces bytes of theirs"
        )
    if any(text.endswith(".jsonl") for text in data.text):
        notes.append("data.text names .jsonl files and data.format is text: the model learns their lines as they are")
    train, evaluated = Windows(tokens, data.sequence), Windows(held_out, data.sequence)
    if len(train) < data.batch:
        raise ConfigError(
            f"data.batch is {data.batch} and data.sequence is {data.sequence}; {_source(data)} has {len(tokens)} "
            f"tokens to train on; allowed: at least {data.batch * data.sequence + 1}, or smaller batches or sequences"
        )
    if data.held_out and not len(evaluated):
        raise ConfigError(
            f"data.held_out has {len(held_out)} tokens; allowed: more than data.sequence ({data.sequence})"
        )
    return Data(train=train, held_out=evaluated, tokenizer=tokenizer, notes=tuple(notes))


def _load_samples(data: DataConfig, tokenizer: Tokenizer, day: str) -> Data:
    inner = None if isinstance(tokenizer, ByteTokenizer) else tokenizer.hugging_face()
    dated = inner and dates.on_day(inner, day)
    inner = dated or inner
    samples, left_out = read_samples(files_named(data.text, "data.text"), limit=data.max_bytes, tokenizer=inner)
    if data.held_out:
        files = files_named(data.held_out, "data.held_out")
        held_out, more = read_samples(files, limit=data.max_bytes, tokenizer=inner)
    else:
        start = held_out_start(len(samples), data.held_out_share)
        samples, held_out, more = samples[:start], samples[start:], 0
    notes = [*_about_files(data, bool(held_out))]
    day = day if dated and not all(sample.plain for sample in (*samples, *held_out)) else ""
    if day:
        notes.append(f"the chat template writes today's date: in this run it is always {day} (data.date)")
    elif data.date:
        notes.append(f"data.date is {data.date}, and no chat template writes a date")
    if left_out + more:
        notes.append(f"samples of {left_out + more} bytes were not read: data.max_bytes is {data.max_bytes}")
    if count := sum(sample.learns_last for sample in (*samples, *held_out)):
        notes.append(
            f"{count} of {len(samples) + len(held_out)} conversations are learned for their last answer only: "
            "the chat template writes earlier answers differently"
        )
    encoded, encoded_held_out = encode(samples, tokenizer), encode(held_out, tokenizer)
    if count := sum(sample.splits for sample in (*encoded, *encoded_held_out)):
        notes.append(
            f"{count} of {len(samples) + len(held_out)} samples have an answer that begins inside a token, such as a "
            "word whose space ends the prompt: the prompt alone is encoded differently; move such spaces to answers"
        )
    train, cut = fit(encoded, data.sequence)
    evaluated, too_long = fit_held_out(encoded_held_out, data.sequence)
    loaded = Data(
        train=Answers(train, data.sequence, packing=data.packing),
        held_out=Answers(evaluated, data.sequence, packing=data.packing),
        tokenizer=tokenizer,
        date=day,
        notes=(*notes, *cut, *too_long),
    )  # fmt: skip
    if len(loaded.train) < data.batch:
        cause = f" ({'; '.join(cut)})" if cut else ""
        raise ConfigError(
            f"data.batch is {data.batch}; {_source(data)} has {len(samples)} samples to train on, "
            f"{len(loaded.train)} windows of {data.sequence} tokens{cause}; allowed: at most as many as windows"
        )
    if data.held_out and not len(loaded.held_out):
        cause = f" ({'; '.join(too_long)})" if too_long else ""
        raise ConfigError(f"data.held_out has no sample to evaluate on{cause}; allowed: at least one")
    return loaded


def _about_files(data: DataConfig, held_out: bool) -> Iterator[str]:
    """Yield notes about files that are read for two purposes or not at all, and about nothing that is held out."""
    for pattern in (*data.text, *data.held_out):
        path = Path(pattern).expanduser()
        if not path.exists() and "**" not in path.parts and (folders := sum(each.is_dir() for each in _found(path))):
            yield f"{shown(pattern)} matches {folders} folders, too, whose files are not read: name the folders"
    if data.text and data.held_out:
        named = ({each.resolve() for each in files_named(getattr(data, k), f"data.{k}")} for k in ("text", "held_out"))
        if both := sorted(set.intersection(*named)):
            more = f" and {len(both) - 1} more" if len(both) > 1 else ""
            yield f"data.held_out has {printable(str(both[0]))}{more}, which the model is trained on as well"
    if not held_out and data.held_out_share and not data.held_out:
        yield f"data.held_out_share is {data.held_out_share:g}, of which nothing remains to hold out of so little text"


def _unread(patterns: tuple[str, ...], key: str, limit: int) -> int:
    """Return how many bytes of files lie beyond the limit."""
    return max(0, sum(path.stat().st_size for path in files_named(patterns, key)) - limit)


def _source(data: DataConfig) -> str:
    if data.dataset:
        return f"data.dataset {data.dataset!r}"
    return f"data.text {', '.join(data.text)}" if data.text else "Python's standard library"


def _tokens(documents: Iterator[bytes], tokenizer: Tokenizer, cache: Path | None) -> np.ndarray:
    """Return the token ids of all documents, from the cache if it has them."""
    if cache is None or isinstance(tokenizer, ByteTokenizer):
        return encode_documents(documents, tokenizer)
    texts, inner = list(documents), tokenizer.hugging_face()
    digest = hashlib.sha256(f"{inner!r} {definition(inner)}".encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    path = cache / f"tokens-{digest.hexdigest()[:16]}.npy"
    folder = cache.parent
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):  # so that one rank of a machine encodes, and the others read what it wrote
        if (tokens := _read(path)) is None:
            tokens = encode_documents(texts, tokenizer)
            RunFolder(folder).note(f"{cache.name}/{path.name}")
            cache.mkdir(exist_ok=True)
            with replacing(path) as part:  # ranks of other machines may share the folder and read
                np.save(part, tokens)
    return tokens


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine out of a folder, where its file system can; at most for `_TURN_SECONDS`."""
    handle, begin, quiet = os.open(folder, os.O_RDONLY), time.monotonic(), True
    try:
        while time.monotonic() < begin + _TURN_SECONDS:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if quiet and time.monotonic() > begin + _QUIET_SECONDS:
                    log.warning("waiting for another process, which encodes a text into %s/cache", folder)
                    quiet = False
                time.sleep(0.1)
            except OSError:  # such as a file system without locks
                break
        yield
    finally:
        os.close(handle)


def _checked(documents: Iterable[bytes], are_text: list[bool], sizes: list[int]) -> Iterator[bytes]:
    """Yield the documents; note of each its size, and whether it is UTF-8, which may be cut short in a character."""
    for document in documents:
        sizes.append(len(document))
        try:
            codecs.getincrementaldecoder("utf-8")().decode(document)
            are_text.append(True)
        except UnicodeDecodeError:
            are_text.append(False)
        yield document


def _read(path: Path) -> np.ndarray | None:
    """Read the token ids that an earlier run cached; None if the file is missing or unreadable."""
    if not path.is_file():
        return None
    try:
        tokens = np.load(path, mmap_mode="r")
        if tokens.ndim == 1 and tokens.dtype.kind == "u":
            return tokens
        problem = f"it holds {tokens.dtype} {tokens.shape}"
    except (OSError, ValueError, EOFError) as error:
        problem = str(error)
    log.warning("%s cannot be used and is written again: %s", path, printable(problem))
    return None


def documents(data: DataConfig) -> Iterator[bytes]:
    """Yield the training documents, always in the same order; of files, at most `data.max_bytes` bytes in total."""
    if data.dataset:
        rows = _open_dataset(data)
        if data.column not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise ConfigError(f"data.column is {data.column!r}; dataset {data.dataset!r} has: {columns}")
        return _column(data, rows)
    return read_files(files_named(data.text, "data.text") if data.text else library_files(), data.max_bytes)


def _column(data: DataConfig, rows: Any) -> Iterator[bytes]:
    for number, row in enumerate(rows.select_columns(data.column).with_format(None), 1):
        if not isinstance(text := row[data.column], str):
            raise ConfigError(
                f"data.dataset {data.dataset!r} row {number}: {data.column} is {shown(text, 60)}; allowed: text, "
                "in a data.column without other values"
            )
        yield text.encode()


def library_files() -> list[Path]:
    """List the sources of Python's standard library: real text that every machine has.

    They are ordered by a hash of their names, so that any part of them is a fair sample of the whole.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - _NOT_LIBRARY
        names += [Path(folder, file).relative_to(root) for file in files if file.endswith(".py")]
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    return [root / name for name in names]


def capped(texts: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Yield documents up to `limit` bytes in total, cutting the last one short."""
    for document in texts:
        yield document[:limit]
        limit -= len(document)
        if limit <= 0:
            return


def encode_documents(texts: Iterable[bytes], tokenizer: Tokenizer) -> np.ndarray:
    """Encode documents, one after the other: one dimension, unsigned integers."""
    parts = [tokenizer.encode(document) for document in texts]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def held_out_start(length: int, share: float) -> int:
    """Return the index at which the held-out end of `length` tokens, bytes or samples begins."""
    return length - int(length * share)


def files_named(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Expand patterns to files, in the order of the patterns and sorted within each; `key`: the setting, for errors."""
    files: list[Path] = []
    for pattern in patterns:
        try:
            path = Path(pattern).expanduser()
            matches = sorted(_files_at(path))
        except (OSError, RuntimeError) as error:  # RuntimeError: a home that is not known
            reason = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{key} has {shown(pattern)}: {one_line(reason, 300)}") from error
        if not matches:
            folder = "a folder with a file that is not hidden"
            allowed = folder if path.is_dir() else "a file, a folder, or a pattern that matches a file"
            raise ConfigError(f"{key} has {shown(pattern)}, where there is no file; allowed: {allowed}")
        files.extend(matches)
    return files


def _files_at(path: Path) -> Iterable[Path]:
    """List the regular files: a pipe or the like would be empty for all but the first process that reads it."""
    if path.is_dir():
        return _files_below(path)
    if path.is_file():
        return [path]
    return (each for each in _found(path) if each.is_file())


def _found(pattern: Path) -> list[Path]:
    return [Path(each) for each in glob.glob(str(pattern), recursive=True)]


def _files_below(root: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders without hidden ones (.git, .cache, ...); `root` may be hidden."""
    seen = {os.path.realpath(root)}  # links may lead around in a circle
    for folder, subfolders, names in os.walk(root, onerror=_refuse_folder, followlinks=True):
        kept = sorted(name for name in subfolders if not name.startswith(".") and name != "__pycache__")
        places = {name: os.path.realpath(os.path.join(folder, name)) for name in kept}
        subfolders[:] = [name for name in kept if places[name] not in seen]
        seen.update(places.values())
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _refuse_folder(error: OSError) -> None:
    raise ConfigError(f"text folder {error.filename}: {error.strerror}") from error


def read_files(files: Iterable[Path], limit: int) -> Iterator[bytes]:
    """Yield the files' contents, `limit` bytes in total; nothing beyond is read, however large a file is."""
    for path in files:
        try:
            with path.open("rb") as file:
                pieces = []
                while limit > 0 and (piece := file.read(min(limit, _PIECE_BYTES))):
                    pieces.append(piece)
                    limit -= len(piece)
        except OSError as error:
            raise ConfigError(f"text file {path}: {error.strerror}") from error
        yield b"".join(pieces)
        if limit <= 0:
            return


def _open_dataset(data: DataConfig) -> Any:  # a datasets.Dataset, of an optional package
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"data.dataset is {data.dataset!r}, which needs: pip install 'lowbit[datasets]'") from error
    try:
        if not Path(data.dataset).is_dir():
            return datasets.load_dataset(data.dataset, data.dataset_config or None, split=data.dataset_split)
        opened = datasets.load_from_disk(data.dataset)
    except Exception as error:  # the package raises errors of its own and of its storage
        raise ConfigError(f"data.dataset {data.dataset!r} cannot be opened: {first_line(error)}") from error
    if isinstance(opened, datasets.Dataset):
        if data.dataset_split != DataConfig.dataset_split:
            raise ConfigError(
                f"data.dataset_split is {data.dataset_split!r}, and data.dataset {data.dataset!r} has no splits, where "
                "it has no effect; allowed: a folder with splits"
            )
        return opened
    if data.dataset_split not in opened:  # a DatasetDict
        splits = ", ".join(map(str, opened))
        raise ConfigError(f"data.dataset_split is {data.dataset_split!r}; {data.dataset!r} has: {splits}")
    return opened[data.dataset_split]
