"""The folder of a run: which files in it lowbit made, so that it never removes or replaces any other.

All processes that write into the folder append the names of files to `lowbit-run.jsonl` before they make them. Only
these files count as lowbit's own. A run locks `lowbit-run.jsonl` while it writes into the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from lowbit.config import ConfigError
from lowbit.terminal import printable

log = logging.getLogger(__name__)

MARK = "lowbit-run.jsonl"
KEPT = "cache/"
"""Stays when a folder is cleared: its files depend on text and tokenizer only, and are named by a digest of both."""

PATIENCE_SECONDS = 5.0
"""How long a run waits for the one before to end: a process that was killed may take a moment."""

_TURN_SECONDS = 0.1
_LONGEST_NAME = 255  # bytes of a part of a path; no disk takes more
_STAGING = ".lowbit-part/"  # ends the names of folders that are lowbit's with all that they hold
_LOCKED: dict[tuple[int, int], int] = {}  # descriptors that hold this process's locks, by device and inode


class RunFolder:
    """A folder with a record of the files that lowbit made in it. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = 0  # the descriptor of its lock

    @property
    def marked(self) -> bool:
        """Whether there is a record."""
        return (self.path / MARK).is_file()

    def made(self) -> set[str]:
        """Files and folders ("model/") that lowbit made, relative to the folder. They need not exist any more."""
        names: set[str] = set()
        for line in self._lines():
            with contextlib.suppress(KeyError, TypeError):
                if line.get("cleared") is True:
                    names = {name for name in names if name.startswith(KEPT)}
                names.update(filter(_is_inside, line["made"]))
        return names

    def foreign(self, names: Iterable[str]) -> list[str]:
        """The files among `names` that exist and that lowbit did not make."""
        made = self.made()
        return [name for name in names if name not in made and os.path.lexists(self.path / name)]

    def note(self, *names: str) -> None:
        """Record files and folders ("model/") that are about to be made, with parent folders that do not exist yet."""
        folders = {f"{parent}/" for name in names for parent in PurePosixPath(name).parents}
        new = sorted(f for f in folders if f != "./" and not (self.path / f).exists())
        self._append({"made": [*new, *names]})

    def lock(self, patience: float = PATIENCE_SECONDS) -> str:
        """Keep other runs out of the folder until `unlock` or the end of this process, which may lock it repeatedly.

        On a disk without locks it logs a warning.

        Args:
            patience: seconds to wait for another run to end.

        Returns:
            The process that has locked it ("process 7 on host"); empty if this one has.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = self._open()
        file = _identity(descriptor)
        if file in _LOCKED or not self._try_lock(descriptor, patience):
            os.close(descriptor)
            return "" if file in _LOCKED else self._holder()
        _LOCKED[file] = self._held = descriptor
        self._append({"made": [], "process": os.getpid(), "host": socket.gethostname()})
        return ""

    def in_use(self, patience: float = PATIENCE_SECONDS) -> str:
        """The other process that has locked the folder; empty if none has. Changes nothing."""
        if not self.marked:
            return ""
        try:
            descriptor = os.open(self.path / MARK, os.O_RDWR)
        except OSError:
            return ""  # writing here raises the error
        try:
            free = _identity(descriptor) in _LOCKED or self._try_lock(descriptor, patience)
        finally:
            os.close(descriptor)
        return "" if free else self._holder()

    def check_there(self) -> None:
        """Check that the folder which this process has locked has not been removed: what it writes would be lost.

        Raises:
            ConfigError: it has, or another one is in its place.
        """
        if self._own and (os.fstat(self._own).st_nlink == 0 or not (self.path / MARK).exists()):
            raise ConfigError(
                f"run.output {str(self.path)!r} was removed during the run, with all that was written there; "
                "allowed: to leave it until the run has ended"
            )

    def unlock(self) -> None:
        """Release the lock, if this process holds it."""
        with contextlib.suppress(OSError):
            status = os.fstat(self._own) if self._own else (self.path / MARK).stat()  # which may have been removed
            if (held := _LOCKED.pop((status.st_dev, status.st_ino), None)) is not None:
                os.close(held)

    @property
    def _own(self) -> int:
        """The descriptor of the lock that this object holds; 0 without one."""
        return self._held if self._held in _LOCKED.values() else 0

    def clear(self) -> None:
        """Remove lowbit's files, and its folders that are empty then; cached token ids (`KEPT`) and the record stay.

        Several processes may do so at once.
        """
        made = {name for name in self.made() if not name.startswith(KEPT)}
        for path in (self.path / name for name in made if not name.endswith("/")):
            if self._is_inside(path):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    path.unlink()
        for name in sorted(made, key=len, reverse=True):
            path = self.path / name
            if not name.endswith("/") or path.is_symlink() or not self._is_inside(path):
                continue
            if name.endswith(_STAGING):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # it holds something that is not ours, or is gone
                    path.rmdir()
        if self.marked:
            self._append({"made": [], "cleared": True})

    def out_of_reach(self) -> list[str]:
        """Files of lowbit that `clear` does not remove, because a symbolic link leads out of the folder."""
        files = [name for name in self.made() if not name.endswith("/") and os.path.lexists(self.path / name)]
        return sorted(name for name in files if not self._is_inside(self.path / name))

    def staging(self, name: str) -> Path:
        """An empty folder for `adopt`; one of an earlier attempt is emptied.

        Raises:
            FileExistsError: there is one that lowbit did not make.
        """
        hidden = f".{name}{_STAGING}"
        path = self.path / hidden
        if os.path.lexists(path):
            if hidden not in self.made() or path.is_symlink():
                raise FileExistsError(f"{path} was not made by lowbit, which needs this name; move it away")
            shutil.rmtree(path)
        self.note(hidden)
        path.mkdir()
        return path

    def adopt(self, staging: Path, name: str) -> None:
        """Move all files of a staging folder into the folder `name`, and remove lowbit's older files there.

        Raises:
            FileExistsError: a file in the way is not lowbit's; then nothing was moved.
        """
        sources = {
            f"{name}/{path.relative_to(staging).as_posix()}": path
            for path in sorted(staging.rglob("*"))
            if path.is_file()
        }
        if others := self.foreign(sources if (self.path / name).is_dir() else [name]):
            raise FileExistsError(
                f"{self.path / others[0]} was not made by lowbit and stays; what was to go there is in {staging}"
            )
        old = {n for n in self.made() if n.startswith(f"{name}/") and not n.endswith("/")}
        self.note(*sources)
        for file, source in sources.items():
            (self.path / file).parent.mkdir(parents=True, exist_ok=True)
            source.replace(self.path / file)
        for file in old - sources.keys():
            if self._is_inside(self.path / file):
                (self.path / file).unlink(missing_ok=True)
        shutil.rmtree(staging)

    def _open(self) -> int:
        return os.open(self.path / MARK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def _append(self, values: dict[str, Any]) -> None:
        line = json.dumps(values) + "\n"
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = self._open()
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a crash cut the last line short
                line = "\n" + line
            os.write(descriptor, line.encode())  # a single write, so that processes do not mix theirs
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _lines(self) -> list[dict[str, Any]]:
        """The lines of the record that are JSON objects."""
        lines: list[dict[str, Any]] = []
        if self.marked:  # a pipe, for example, would block
            with contextlib.suppress(OSError):
                for text in (self.path / MARK).read_text("utf-8", errors="replace").splitlines():
                    with contextlib.suppress(ValueError, RecursionError):
                        if isinstance(line := json.loads(text), dict):
                            lines.append(line)
        return lines

    def _try_lock(self, descriptor: int, patience: float) -> bool:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    log.warning(
                        "%s cannot be locked (%s): take care that no other run writes there", self.path, error.strerror
                    )
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_TURN_SECONDS)

    def _holder(self) -> str:
        known = [line for line in self._lines() if "process" in line and "host" in line]
        if not known:
            return "another process"
        return printable(f"process {known[-1]['process']} on {known[-1]['host']}")

    def _is_inside(self, path: Path) -> bool:
        """Whether a path stays in the folder when symbolic links are followed."""
        try:
            return path.parent.resolve().is_relative_to(self.path.resolve())
        except (OSError, RuntimeError):  # links that form a circle
            return False


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _is_inside(name: object) -> bool:
    """Whether a recorded name is a possible path inside the folder."""
    if not isinstance(name, str) or name in ("", ".", "/") or "\0" in name:
        return False
    try:
        lengths = [len(os.fsencode(part)) for part in name.split("/")]
    except UnicodeEncodeError:
        return False
    path = PurePosixPath(name)
    return max(lengths) <= _LONGEST_NAME and not path.is_absolute() and ".." not in path.parts
