"""Read files that may come from anybody within bounds, and write files whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20
"""Largest file that is read as JSON, unless the caller sets a lower limit."""


def read_bounded(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the contents of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than `most` bytes, or is a pipe or device, which may block or never end.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return data


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8, without NaN and Infinity.

    Raises:
        ValueError: it is invalid, or nested too deeply.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"it holds {constant}")

    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole: a reader sees the old content or the new one, and a failure leaves the old one.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file in the same folder, which replaces `path` when the block has ended.

    The name ends like that of `path`, since some libraries choose the format by it.
    """
    part = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
