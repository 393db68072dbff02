"""One rank's share of a checkpoint on its disk: named tensors in safetensors, and a manifest with their digest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
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
    DamagedShareError,
    Manifest,
    check_regular,
    read_manifest,
)  # fmt: skip

DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes by their names in safetensors."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def stage_share(target: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write a share next to its final place and flush it to disk; `commit_share` moves it into place.

    One tensor at a time is copied to the CPU; contiguous CPU tensors are not copied.

    Args:
        target: the share's folder, which does not change yet.
        manifest: of these tensors, without `file` and `tensors`.

    Raises:
        OSError: for example, the disk is full. The files written so far are removed.
    """
    part = staged(target)
    remove_share(part)
    new = [path for path in (target.parent.parent, target.parent) if not path.exists()]
    part.mkdir(parents=True)
    try:
        manifest = _write_tensors(part / TENSORS, manifest, tensors)
        write_file(part / MANIFEST, [manifest.to_bytes()])
        for folder in (part, part.parent, *(path.parent for path in new)):
            _flush_folder(folder)
    except OSError:
        with contextlib.suppress(OSError):
            remove_share(part)
        raise


def commit_share(target: Path) -> None:
    """Move a staged share into place, removing an older share there. Raises OSError: for example, nothing is staged."""
    if staged(target).exists():
        remove_share(target)
    os.rename(staged(target), target)
    _flush_folder(target.parent)


def staged(target: Path) -> Path:
    """Return the folder that holds a share until all ranks have written theirs."""
    return target.with_name(f".{target.name}")


def remove_share(share: Path) -> None:
    """Remove a share: the files that lowbit writes, and the folder.

    Raises:
        OSError: the folder holds other files, which stay.
    """
    if share.is_dir():
        for name in FILES:  # the manifest first: without it, the folder does not count as a share
            (share / name).unlink(missing_ok=True)
        share.rmdir()


def verify_share(share: Path) -> Manifest:
    """Read every byte of a share, and return its manifest.

    Raises:
        DamagedShareError: a file was changed or added, or is missing.
    """
    manifest = read_manifest(share)
    try:
        if foreign := sorted({path.name for path in share.iterdir()} - set(FILES)):
            raise DamagedShareError(f"holds {foreign[0]}, which its manifest does not list")
        path = share / TENSORS
        check_regular(path)
        if (size := path.stat().st_size) != manifest.file["bytes"]:
            raise DamagedShareError(f"has {size} bytes of {TENSORS}; {manifest.file['bytes']} were written")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedShareError(f"cannot be read: {error.strerror}") from error
    if digest != manifest.file["sha256"]:
        raise DamagedShareError(f"has a {TENSORS} that was changed")
    _check_entries(path, manifest)
    return manifest


def _check_entries(path: Path, manifest: Manifest) -> None:
    """Raise unless the file holds the tensors that the manifest lists: ranks make room for them by that list."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            entries = {name: {"dtype": s.get_dtype(), "shape": list(s.get_shape())} for name, s in slices.items()}
    except SafetensorError as error:
        raise DamagedShareError(f"has a {TENSORS} that is not in safetensors' format: {error}") from error
    if entries != manifest.tensors:
        raise DamagedShareError(f"has other tensors in {TENSORS} than its manifest lists")
    if unknown := {entry["dtype"] for entry in entries.values()} - DTYPES.keys():
        raise DamagedShareError(f"has tensors of unknown dtypes: {', '.join(sorted(unknown))}")


class Reader:
    """Tensors of a verified share, by name, one at a time."""

    def __init__(self, share: Path) -> None:
        from safetensors import safe_open

        self._file = safe_open(share / TENSORS, framework="pt")

    def __call__(self, name: str) -> Tensor:
        """Read a tensor into CPU memory of its own. Raises SafetensorError: no tensor has that name."""
        return self._file.get_tensor(name).clone()


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to the disk; the entry in its folder is not flushed."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    """Flush the entries of a folder, so that they survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_tensors(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
    """Write a file in safetensors' format; returns the manifest with its digest.

    safetensors' own writer would hold a copy of all tensors in memory.
    """
    # Large elements first, so that each tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {
        name: {"dtype": _NAMES[tensors[name].dtype], "shape": list(tensors[name].shape)} for name in names
    }
    header, end = {}, 0
    for name in names:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = entries[name] | {"data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                yield flat.view(torch.uint8).numpy().data

    write_file(path, (digest.update(chunk) or chunk for chunk in chunks()))
    return replace(manifest, file={"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}, tensors=entries)
