"""The folder of a run: a lock, and a record of the files that lowbit made there, so that it removes no other.

Every process that writes into the folder appends the names of its files to `lowbit-run.jsonl` before it makes them. A
run locks that file for as long as it writes into the folder.
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
"""Kept when a folder is cleared: its files depend on text and tokenizer only, and are named by a digest of both."""

PATIENCE_SECONDS = 5.0
"""Longest wait for the previous run to end: a process that was killed may take a moment."""

_TURN_SECONDS = 0.1
_STAGING = ".lowbit-part/"  # folders with this suffix belong to lowbit with everything in them


class RunFolder:
    """A folder with a record of the files that lowbit made in it. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None  # the descriptor that holds the lock

    @property
    def marked(self) -> bool:
        """Whether the folder has a record."""
        return (self.path / MARK).is_file()

    def made(self) -> set[str]:
        """Return files and folders ("model/") that lowbit made, relative to the folder; some may be gone."""
        names: set[str] = set()
        for line in self._lines():
            if line.get("cleared"):
                names = {name for name in names if name.startswith(KEPT)}
            made = line.get("made")
            # The record may have come with a copied folder: ignore names that lead out of this one.
            names.update(
                name
                for name in (made if isinstance(made, list) else ())
                if isinstance(name, str) and not (name.startswith("/") or ".." in PurePosixPath(name).parts)
            )
        return names

    def foreign(self, names: Iterable[str]) -> list[str]:
        """Return the existing files among `names` that lowbit did not make."""
        recorded = self.made()
        return [name for name in names if name not in recorded and os.path.lexists(self.path / name)]

    def note(self, *names: str) -> None:
        """Record files and folders ("model/") that will be made, with parent folders that do not exist yet."""
        folders = {f"{parent}/" for name in names for parent in PurePosixPath(name).parents}
        new = sorted(f for f in folders if f != "./" and not (self.path / f).exists())
        self._append({"made": [*new, *names]})

    def lock(self, patience: float = PATIENCE_SECONDS) -> str:
        """Keep other runs out of the folder until `unlock` or the end of this process.

        On a disk without locks it logs a warning.

        Args:
            patience: seconds to wait for another run to end.

        Returns:
            The run that holds the lock ("process 7 on host"); empty if this object has it now.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / MARK, os.O_RDWR | os.O_CREAT, 0o666)
        if not self._try_lock(self._lock, patience):
            self.unlock()
            return self._holder()
        self._append({"process": os.getpid(), "host": socket.gethostname()})
        return ""

    def in_use(self, patience: float = PATIENCE_SECONDS) -> str:
        """Return the run that has locked the folder, as `lock` does, but change nothing; empty if it is free."""
        if not self.marked:
            return ""
        with (self.path / MARK).open("r+b") as file:
            return "" if self._try_lock(file.fileno(), patience) else self._holder()

    def check_there(self) -> None:
        """Check that nobody removed the folder that this object has locked: what the run writes would be lost.

        Raises:
            ConfigError: it was removed, or another one is in its place.
        """
        if self._lock is not None and (os.fstat(self._lock).st_nlink == 0 or not self.marked):
            raise ConfigError(
                f"run.output {str(self.path)!r} was removed during the run, with all that was written there; "
                "allowed: to leave it until the run has ended"
            )

    def unlock(self) -> None:
        """Release the lock, if this object holds it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clear(self) -> None:
        """Remove lowbit's files, and its folders that are then empty; cached token ids (`KEPT`) and the record stay.

        Nothing behind a symbolic link that leads out of the folder is removed. Several processes may call it at once.
        """
        names = [name for name in self.made() if not name.startswith(KEPT)]
        for name in sorted(names, key=lambda name: (name.endswith("/"), -len(name))):  # a folder after its contents
            path = self.path / name
            with contextlib.suppress(OSError, ValueError):  # it is gone, or holds files of others
                if not self._is_inside(path):
                    continue
                if name.endswith(_STAGING) and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif name.endswith("/"):
                    path.rmdir()
                else:
                    path.unlink()
        if self.marked:
            self._append({"cleared": True})

    def staging(self, name: str) -> Path:
        """Make an empty folder for `adopt`; one of an earlier attempt is emptied.

        Raises:
            FileExistsError: the folder exists, and lowbit did not make it.
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
            FileExistsError: a file of others is in the way; nothing was moved.
        """
        files = (path for path in sorted(staging.rglob("*")) if path.is_file())
        sources = {f"{name}/{path.relative_to(staging).as_posix()}": path for path in files}
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

    def _append(self, values: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # One unbuffered write, so that processes do not mix their lines. It begins with a newline, which ends a line
        # that a crash cut short.
        with (self.path / MARK).open("ab", buffering=0) as file:
            file.write(f"\n{json.dumps(values)}\n".encode())
            os.fsync(file.fileno())

    def _lines(self) -> list[dict[str, Any]]:
        """Read the lines of the record that are JSON objects: a crash may have cut one short."""
        lines: list[dict[str, Any]] = []
        if self.marked:
            for text in (self.path / MARK).read_text("utf-8", errors="replace").split("\n"):
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
                        "%s cannot be locked (%s): make sure that no other run writes there", self.path, error.strerror
                    )
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_TURN_SECONDS)

    def _holder(self) -> str:
        locks = [line for line in self._lines() if line.keys() >= {"process", "host"}]
        return printable(f"process {locks[-1]['process']} on {locks[-1]['host']}") if locks else "another process"

    def _is_inside(self, path: Path) -> bool:
        """Whether a path stays in the folder after following symbolic links."""
        return Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(self.path))
