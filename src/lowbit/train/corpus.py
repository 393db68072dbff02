"""Documents from files, a Hugging Face dataset or Python's standard library, and their token ids."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.config import ConfigError
from lowbit.train.config import DataConfig
from lowbit.train.tokenizer import Tokenizer

_PIECE_BYTES = 16 << 20
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def documents(data: DataConfig) -> Iterator[bytes]:
    """Yield the training documents, always in the same order; of files, at most `data.max_bytes` bytes in total.

    Raises:
        ConfigError: a path or dataset does not exist or cannot be read.
    """
    if data.dataset:
        rows = _open_dataset(data)
        if data.column not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise ConfigError(f"data.column is {data.column!r}; dataset {data.dataset!r} has: {columns}")
        return (row[data.column].encode() for row in rows)
    return read_files(files_named(data.text, "data.text") if data.text else library_files(), data.max_bytes)


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


def encode(texts: Iterable[bytes], tokenizer: Tokenizer) -> np.ndarray:
    """Encode documents, one after the other: one dimension, unsigned integers."""
    parts = [tokenizer.encode(document) for document in texts]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def held_out_start(length: int, share: float) -> int:
    """Return the index at which the held-out end of `length` tokens, bytes or samples begins."""
    return length - int(length * share)


def files_named(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Expand patterns to files, in the order of the patterns and sorted within each; `key`: the setting, for errors.

    Raises:
        ConfigError: a path does not exist.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not matches:
            allowed = "a folder with a file" if path.is_dir() else "a file, a folder, or a pattern that matches a file"
            raise ConfigError(f"{key} has {pattern!r}, where there is no file; allowed: {allowed}")
        files.extend(matches)
    return files


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
        raise ConfigError(f"data.dataset {data.dataset!r} cannot be opened: {str(error).splitlines()[0]}") from error
    if isinstance(opened, datasets.Dataset):
        return opened
    if data.dataset_split not in opened:  # a DatasetDict
        splits = ", ".join(map(str, opened))
        raise ConfigError(f"data.dataset_split is {data.dataset_split!r}; {data.dataset!r} has: {splits}")
    return opened[data.dataset_split]
