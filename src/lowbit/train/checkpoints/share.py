"""One rank's share of a checkpoint on its disk: named tensors in safetensors, and a manifest of their digests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.train.checkpoints.manifest import (
    FILES,
    MANIFEST,
    TENSORS,
    DamagedError,
    Manifest,
    check_regular,
    read_manifest,
)  # fmt: skip

DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes by the names that safetensors has for them."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def stage_share(target: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write a share beside its place and flush it to the disk; `commit_share` moves it there.

    One tensor at a time is copied to the CPU; contiguous CPU tensors are not copied.

    Args:
        target: the share's folder, which does not change yet.
        manifest: of these tensors, without `files` and `tensors`.

    Raises:
        OSError: the disk is full, for example. What was written is removed again.
    """
    part = staged(target)
    remove_share(part)
    new = [path for path in (target.parent.parent, target.parent) if not path.exists()]
    part.mkdir(parents=True)
    try:
        files, entries = _write_tensors(part / TENSORS, tensors)
        write_file(part / MANIFEST, [replace(manifest, files=files, tensors=entries).to_bytes()])
        for folder in (part, part.parent, *(path.parent for path in new)):
            _flush_folder(folder)
    except OSError:
        with contextlib.suppress(OSError):
            remove_share(part)
        raise


def commit_share(target: Path) -> None:
    """Move a staged share to its place; an earlier share of lowbit there is removed.

    Raises:
        OSError: there is none, for example.
    """
    old = target.with_name(f".{target.name}.old")
    remove_share(old)
    if target.exists() and staged(target).exists():
        _move(target, old)
    _move(staged(target), target)
    remove_share(old)


def staged(target: Path) -> Path:
    """Folder of a share until all ranks have written theirs."""
    return target.with_name(f".{target.name}")


def remove_share(share: Path) -> None:
    """Remove a share: the files that lowbit writes, and the folder.

    Raises:
        OSError: the folder holds other files, which stay.
    """
    if share.is_dir():
        for name in FILES:  # the manifest first: without it, the folder is no share
            (share / name).unlink(missing_ok=True)
        share.rmdir()


def drop_share(share: Path) -> None:
    """Remove a share, and its step's folder if it is empty then. Other files stay. Several ranks may do so at once."""
    with contextlib.suppress(OSError):  # it holds something else, or another rank was faster
        remove_share(share)
    with contextlib.suppress(OSError):  # another share is still there
        share.parent.rmdir()


def verify_share(share: Path) -> Manifest:
    """Read every byte of a share.

    Raises:
        DamagedError: a file was changed or added, or is missing.
    """
    manifest = read_manifest(share)
    try:
        if foreign := sorted({path.name for path in share.iterdir()} - set(FILES)):
            raise DamagedError(f"holds {foreign[0]}, which its manifest does not list")
        path, expected = share / TENSORS, manifest.files[TENSORS]
        check_regular(path)
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise DamagedError(f"has {size} bytes of {TENSORS}; {expected['bytes']} were written")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror}") from error
    if digest != expected["sha256"]:
        raise DamagedError(f"has a {TENSORS} that was changed")
    _check_entries(path, manifest)
    return manifest


class Reader:
    """Tensors of a verified share, by name, one at a time."""

    def __init__(self, share: Path) -> None:
        from safetensors import safe_open

        self._file = safe_open(share / TENSORS, framework="pt")

    def __call__(self, name: str) -> Tensor:
        """A tensor on the CPU, in memory of its own.

        Raises:
            SafetensorError: there is none of that name.
        """
        return self._file.get_tensor(name).clone()


def crc32(tensor: Tensor) -> int:
    """CRC-32 of a CPU tensor's bytes."""
    return zlib.crc32(_bytes(tensor))


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to the disk; the entry in its folder is not flushed."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _move(source: Path, target: Path) -> None:
    """Rename within a folder, and flush the folder to the disk."""
    os.rename(source, target)
    _flush_folder(target.parent)


def _flush_folder(path: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a file in safetensors' format; returns the manifest's `files` and `tensors`."""
    # Large elements first, so that each tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, entries, end = {}, {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entries[name] | {"data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes | memoryview]:
        start = len(text).to_bytes(8, "little") + text
        digest.update(start)
        yield start
        for name in names:
            data = _bytes(tensors[name].detach().cpu())
            entries[name]["crc32"] = zlib.crc32(data)
            digest.update(data)
            yield data

    write_file(path, chunks())
    return {TENSORS: {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}}, entries


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor; a contiguous one is not copied."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _check_entries(path: Path, manifest: Manifest) -> None:
    """Raise unless the file has the tensors that the manifest lists."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            entries = {name: (part.get_dtype(), list(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        raise DamagedError(f"has a {TENSORS} that is not in safetensors' format: {error}") from error
    if entries != {n: (e["dtype"], e["shape"]) for n, e in manifest.tensors.items()}:
        raise DamagedError(f"has other tensors in {TENSORS} than its manifest lists")
    if unknown := {dtype for dtype, _ in entries.values()} - DTYPES.keys():
        raise DamagedError(f"has tensors of unknown dtypes: {', '.join(sorted(unknown))}")
