"""Files that commands write for the user to read and change: replaced only while nobody has changed them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lowbit.config.section import ConfigError

_FIRST = "# Written by `{}`; it replaces the file only while it is unchanged: "


def check_written(path: str, program: str, *, overwrite: bool) -> None:
    """Check that a file may be replaced: it is not there, or as the program has written it.

    Raises:
        ConfigError: it exists, and is something else.
    """
    file = Path(path)
    if overwrite or not file.exists():
        return
    first, _, rest = file.read_bytes().partition(b"\n")
    if first.decode(errors="replace") != _first(program, rest):
        raise ConfigError(
            f"output is {path!r}, which exists and holds what somebody else wrote; "
            "allowed: another file, or --overwrite"
        )


def write_text(path: str, program: str, text: str, *, overwrite: bool) -> None:
    """Write a file whole, below a line that tells whether somebody changes it.

    Raises:
        ConfigError: as `check_written`. OSError: it cannot be written.
    """
    check_written(path, program, overwrite=overwrite)
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        part.write_text(f"{_first(program, text.encode())}\n{text}", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _first(program: str, rest: bytes) -> str:
    return _FIRST.format(program) + hashlib.sha256(rest).hexdigest()[:16]
