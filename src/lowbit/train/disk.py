"""Files that are whole or absent after a crash: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to the disk; its folder is not."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def move(source: Path, target: Path) -> None:
    """Rename a file or folder within a folder, and flush that folder to the disk."""
    os.rename(source, target)
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Have the names in a folder survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
