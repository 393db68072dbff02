"""Documents: from files, folders and patterns, from a Hugging Face dataset, or from Python's own library."""

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

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def documents(data: DataConfig) -> Iterator[bytes]:
    """The training documents, always in the same order.

    Raises:
        ConfigError: a path or dataset that is not there, or cannot be read.
    """
    if data.dataset:
        return _dataset_documents(data)
    return _read(_find(data.text, "data.text") if data.text else library_files())


def held_out_documents(data: DataConfig) -> Iterator[bytes]:
    """The documents of `data.held_out`, like `documents`."""
    return _read(_find(data.held_out, "data.held_out"))


def library_files() -> list[Path]:
    """The sources of Python's standard library: real text that every machine has.

    In the order of a hash of their names, so that any part of them is a fair sample of the whole.
    """
    root = sysconfig.get_paths()["stdlib"]
    kept: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _NOT_LIBRARY]
        kept.extend(Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))
    kept.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    return [root / path for path in kept]


def capped(found: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Documents until `limit` bytes are reached, the last one cut short."""
    for document in found:
        yield document[:limit]
        limit -= len(document)
        if limit <= 0:
            return


def encode(texts: Iterable[bytes], tokenizer: Tokenizer) -> np.ndarray:
    """Token ids of all documents, one after the other: one dimension, unsigned integers."""
    parts = [tokenizer.encode(document) for document in texts]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def held_out_start(length: int, share: float) -> int:
    """Where the held-out share at the end of a text of `length` tokens or bytes begins."""
    return length - int(length * share)


def _find(patterns: tuple[str, ...], where: str) -> list[Path]:
    """Files by name, in the order of the patterns and sorted within each."""
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        elif path.exists():
            found = [path]
        else:
            found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise ConfigError(f"{where} {pattern!r}: no such file, folder or pattern with a match")
        files.extend(found)
    return files


def _read(files: Iterable[Path]) -> Iterator[bytes]:
    for path in files:
        try:
            yield path.read_bytes()
        except OSError as error:
            raise ConfigError(f"text file {path}: {error.strerror}") from error


def _dataset_documents(data: DataConfig) -> Iterator[bytes]:
    rows = _open_dataset(data)
    if data.column not in rows.column_names:
        raise ConfigError(
            f"data.column is {data.column!r}; dataset {data.dataset!r} has: {', '.join(rows.column_names)}"
        )
    return (row[data.column].encode() for row in rows)


def _open_dataset(data: DataConfig) -> Any:  # a datasets.Dataset, of an optional package
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"data.dataset is {data.dataset!r}, which needs: pip install 'lowbit[datasets]'") from error
    try:
        if not Path(data.dataset).is_dir():
            return datasets.load_dataset(data.dataset, data.dataset_config or None, split=data.dataset_split)
        found = datasets.load_from_disk(data.dataset)
    except Exception as error:  # the package raises many kinds, its own and those of its storage
        raise ConfigError(f"data.dataset {data.dataset!r} cannot be opened: {str(error).splitlines()[0]}") from error
    if isinstance(found, datasets.Dataset):
        return found
    if data.dataset_split not in found:  # a DatasetDict
        raise ConfigError(
            f"data.dataset_split is {data.dataset_split!r}; {data.dataset!r} has: {', '.join(map(str, found))}"
        )
    return found[data.dataset_split]
