"""Files of calibrations: one safetensors file, written whole or not at all, read whole or with a reason."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


class CalibrationError(ValueError):
    """A calibration cannot be used: it is missing, cut short, or made for something else. Names both values."""


def write(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file beside the target and move it there: a reader finds the old file or the new one."""
    from safetensors.torch import save

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = save({name: t.contiguous() for name, t in tensors.items()}, dict(metadata))
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


def read(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file whose metadata's `format` is `kind`.

    Raises:
        CalibrationError: no such file, not a safetensors file, cut short, or of another format.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}; allowed: a file that `lowbit calibrate` wrote") from error
    header = _header(path, data)
    metadata = header.get("__metadata__", {})
    if metadata.get("format") != kind:
        raise CalibrationError(f"{path} has the format {metadata.get('format')!r}; expected {kind!r}")
    try:
        return load(data), metadata
    except (SafetensorError, KeyError) as error:
        raise CalibrationError(f"{path} is no safetensors file: {error}") from error


def _header(path: str | Path, data: bytes) -> dict[str, dict]:
    """What the file says of itself, if it is all there."""
    size = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data):
        told = f"{size} bytes of header" if len(data) >= 8 else "a header of at least 8 bytes"
        raise CalibrationError(
            f"{path} is cut short, or no safetensors file: it has {len(data)} bytes, and should begin with {told}"
        )
    try:
        header = json.loads(data[8:size])
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CalibrationError(f"{path} is no safetensors file: {error}") from error
    whole = size + max(ends, default=0)
    if whole != len(data):
        raise CalibrationError(f"{path} is cut short: it has {len(data)} bytes, and its header tells of {whole}")
    return header
