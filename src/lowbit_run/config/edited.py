"""Write files that users may edit, without replacing what they have edited."""

import hashlib
from pathlib import Path

from lowbit import files
from lowbit_run.config.section import ConfigError


def check_written(path: str, program: str, *, overwrite: bool) -> None:
    """Check that a file may be replaced: it does not exist, or is unchanged since the program wrote it.

    Raises:
        ConfigError: it exists, and the program did not write it, or it has changed since.
    """
    file = Path(path)
    if overwrite or not file.exists():
        return
    first, _, rest = file.read_bytes().partition(b"\n")
    if first.decode(errors="replace") != _first_line(program, rest):
        raise ConfigError(
            f"output is {path!r}, which already exists and was not written by lowbit, or was changed since; "
            "allowed: another file, or --overwrite"
        )


def write_unless_changed(path: str, program: str, text: str, *, overwrite: bool) -> None:
    """Write a file for the user to read and edit, below a line with a digest that shows whether it was edited.

    Raises:
        ConfigError: from `check_written`. OSError: it cannot be written.
    """
    check_written(path, program, overwrite=overwrite)
    files.write(Path(path), f"{_first_line(program, text.encode())}\n{text}")


def _first_line(program: str, rest: bytes) -> str:
    digest = hashlib.sha256(rest).hexdigest()[:16]
    return f"# Written by `{program}`; it replaces the file only while it is unchanged: {digest}"
