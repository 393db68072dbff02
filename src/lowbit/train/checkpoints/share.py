"""One rank's share of a checkpoint on its disk: named tensors in safetensors, and a manifest of their digests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.train import disk
from lowbit.train.checkpoints.manifest import (
    FILES,
    MANIFEST,
    TENSORS,
    DamagedError,
    Manifest,
    check_regular,
    read_manifest,
)

_NAMES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""Dtypes by the names that safetensors has for them."""


def stage_share(target: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write a share beside its place and flush it to the disk; `commit_share` moves it there.

    A tensor at a time is taken to the CPU, and none is copied that lies there already in one piece.

    Args:
        target: the share's folder, which stays as it is.
        manifest: of these tensors; what it says of files and tensors is filled in.

    Raises:
        OSError: the disk is full, for example. What was written is removed again.
    """
    part = staged(target)
    remove_share(part)
    made = [path for path in (target.parent.parent, target.parent) if not path.exists()]
    part.mkdir(parents=True)
    try:
        files, entries = _write_tensors(part / TENSORS, tensors)
        manifest = replace(manifest, files=files, tensors=entries)
        disk.write(part / MANIFEST, [manifest.to_bytes()])
        disk.sync_folder(part)
        disk.sync_folder(part.parent)
        for folder in made:
            disk.sync_folder(folder.parent)
    except OSError:
        with contextlib.suppress(OSError):
            remove_share(part)
        raise


def commit_share(target: Path) -> None:
    """Move a staged share to its place; what lowbit wrote there before goes.

    Raises:
        OSError: there is none, for example.
    """
    old = target.with_name(f".{target.name}.old")
    remove_share(old)
    if target.exists() and staged(target).exists():
        disk.move(target, old)
    disk.move(staged(target), target)
    remove_share(old)


def staged(target: Path) -> Path:
    """Where a share waits until all ranks have written theirs."""
    return target.with_name(f".{target.name}")


def remove_share(share: Path) -> None:
    """Remove what lowbit writes into a share's folder, and the folder.

    Raises:
        OSError: the folder holds something else, which stays.
    """
    if share.is_dir():
        for name in FILES:
            (share / name).unlink(missing_ok=True)
        share.rmdir()


def drop_share(share: Path) -> None:
    """Remove a share as far as it is lowbit's; whatever else its folder holds stays. Several ranks may do so at once.

    Without its manifest, which goes first, a share is none.
    """
    with contextlib.suppress(OSError):  # it holds something else, or another rank was faster
        remove_share(share)
    with contextlib.suppress(OSError):  # another share is still there
        share.parent.rmdir()


def verify_share(share: Path) -> Manifest:
    """Read every byte of a share.

    Raises:
        DamagedError: something is not as it was written, missing, or there beside it.
    """
    found = read_manifest(share)
    try:
        if foreign := sorted({path.name for path in share.iterdir()} - set(FILES)):
            raise DamagedError(f"holds {foreign[0]}, which its manifest does not list")
        path, expected = share / TENSORS, found.files[TENSORS]
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
    _check_entries(path, found)
    return found


class Reader:
    """Tensors of a share that was verified, by name, one at a time."""

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


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Write a file in safetensors' format; entries for the manifest: of the file, and of each tensor."""
    # Large elements first, so that each tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, entries, end = {}, {}, 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [start, end]}
        entries[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            data = _bytes(tensors[name].detach().cpu())
            entries[name]["crc32"] = zlib.crc32(data)
            yield data

    def noted(chunk: bytes | memoryview) -> bytes | memoryview:
        digest.update(chunk)
        return chunk

    disk.write(path, map(noted, chunks()))
    size = 8 + len(text) + end
    return {TENSORS: {"bytes": size, "sha256": digest.hexdigest()}}, entries


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, of which nothing is copied where it lies in one piece."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _check_entries(path: Path, manifest: Manifest) -> None:
    """Raise unless the file has the tensors that the manifest lists."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            entries = {}
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                entries[name] = (part.get_dtype(), list(part.get_shape()))
    except SafetensorError as error:
        raise DamagedError(f"has a {TENSORS} that is none: {error}") from error
    if entries != {n: (e["dtype"], e["shape"]) for n, e in manifest.tensors.items()}:
        raise DamagedError(f"has other tensors in {TENSORS} than its manifest lists")
    if unknown := {dtype for dtype, _ in entries.values()} - DTYPES.keys():
        raise DamagedError(f"has tensors of {', '.join(sorted(unknown))}")
