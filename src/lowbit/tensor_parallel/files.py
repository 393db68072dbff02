"""Calibration files: tensors by layer in one safetensors file, replaced atomically, read whole or refused."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor


class CalibrationError(ValueError):
    """A calibration cannot be used: it is missing, truncated, or made for another model or another setup."""


Tensors = Mapping[str, Mapping[str, Tensor]]
"""By kind ("low", "high", ...), then by layer."""
_DIGEST = "sha256"


def join(tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors of a file: "layer.kind"."""
    return {f"{name}.{kind}": t for kind, by_layer in tensors.items() for name, t in by_layer.items()}


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"/{name} {t.dtype} {tuple(t.shape)}/".encode())
        digest.update(t.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write(path: str | Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write a file next to the target, then rename it: a reader finds the old file or the new one."""
    from safetensors.torch import save

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: t.contiguous() for name, t in join(tensors).items()}
    data = save(whole, {**metadata, _DIGEST: _digest(whole, metadata)})
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def read(path: str | Path, kinds: Sequence[str], expected: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Return the tensors of these kinds, and the metadata; CalibrationError unless the file is whole and `expected`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}; allowed: a file that `lowbit calibrate` wrote") from error
    try:
        tensors = load(data)  # checks that the file is as long as its header says
    except (SafetensorError, KeyError) as error:
        raise CalibrationError(
            f"{path} is cut short, or not a safetensors file: it has {len(data)} bytes; {error}"
        ) from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__") or {}
    if metadata.get("format") != expected:
        raise CalibrationError(f"{path} has the format {metadata.get('format')!r}; expected {expected!r}")
    if metadata.pop(_DIGEST, None) != _digest(tensors, metadata):
        raise CalibrationError(f"{path} is damaged: its digest differs from that of its contents; calibrate again")
    found = {
        kind: {name.removesuffix(f".{kind}"): t for name, t in tensors.items() if name.endswith(f".{kind}")}
        for kind in kinds
    }
    return found, metadata
