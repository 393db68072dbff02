"""Calibration files: minima and maxima by layer in one safetensors file, replaced atomically, read whole or refused."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


class CalibrationError(ValueError):
    """A calibration cannot be used: it is missing, cut short, or made for something else."""


def join(lows: Mapping[str, Tensor], highs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file: "layer.low" and "layer.high"."""
    return {f"{name}.low": t for name, t in lows.items()} | {f"{name}.high": t for name, t in highs.items()}


def write(
    path: str | Path, lows: Mapping[str, Tensor], highs: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file beside the target, then rename it: a reader finds the old file or the new one."""
    from safetensors.torch import save

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = save({name: t.contiguous() for name, t in join(lows, highs).items()}, dict(metadata))
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


def read(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """Return minima, maxima and metadata of a file whose metadata's `format` is `kind`.

    Raises:
        CalibrationError: no such file, not a safetensors file, cut short, or of another format.
    """
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
    if metadata.get("format") != kind:
        raise CalibrationError(f"{path} has the format {metadata.get('format')!r}; expected {kind!r}")
    lows, highs = (
        {name.removesuffix(end): tensor for name, tensor in tensors.items() if name.endswith(end)}
        for end in (".low", ".high")
    )
    return lows, highs, metadata
