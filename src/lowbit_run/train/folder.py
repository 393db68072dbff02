"""The folder of a run: a lock, and a record of the files that lowbit made there, so that it removes no other.

Every process that writes into the folder appends the names of its files to `lowbit-run.jsonl` before it makes them. A
run locks that file for as long as it writes into the folder.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from lowbit import escape
from lowbit.escape import printable
from lowbit_run.config import ConfigError
from lowbit_run.train.checkpoints.manifest import FOLDER, newest_step, shares_newest_first
from lowbit_run.train.config import TrainConfig

log = escape.logger(__name__)

MARK = "lowbit-run.jsonl"
FILES = ("metrics.jsonl", "evaluations.jsonl", "summary.json", "config.json", "ranks.json", "report.html")
IN_USE = "run.output {!r} is in use by {}; allowed: another folder, or to wait until it has ended"
_FOLDERS = (FOLDER, "tensorboard", "trace", "model", "merged")
_KEPT = "cache/"  # files there depend on text and tokenizer only, and are named by a digest of both
_PATIENCE_SECONDS = 5.0  # for the previous run to end: a process that was killed may take a moment
_TURN_SECONDS = 0.1


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
        names = [name for line in self._lines() if isinstance(made := line.get("made"), list) for name in made]
        # The record may have come with a copied folder: ignore names that lead out of this one.
        return {
            name
            for name in names
            if isinstance(name, str) and not (name.startswith("/") or ".." in PurePosixPath(name).parts)
        }

    def foreign(self, names: Iterable[str]) -> list[str]:
        """Return the existing files among `names` that lowbit did not make."""
        recorded = self.made()
        return [name for name in names if name not in recorded and os.path.lexists(self.path / name)]

    def note(self, *names: str) -> None:
        """Record files and folders ("model/") that will be made, with parent folders that do not exist yet."""
        folders = {f"{parent}/" for name in names for parent in PurePosixPath(name).parents}
        new = sorted(f for f in folders if f != "./" and not (self.path / f).exists())
        self._append({"made": [*new, *names]})

    def lock(self) -> str:
        """Keep other runs out of the folder until `unlock` or the end of this process.

        On a disk without locks it logs a warning.

        Returns:
            The run that holds the lock ("process 7 on host"); empty if this object has it now.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / MARK, os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._try_lock(self._lock):
            if time.monotonic() > deadline:
                self.unlock()
                locks = [line for line in self._lines() if line.keys() >= {"process", "host"}]
                return printable(f"process {locks[-1]['process']} on {locks[-1]['host']}") if locks else "another run"
            time.sleep(_TURN_SECONDS)
        self._append({"process": os.getpid(), "host": socket.gethostname()})
        return ""

    def unlock(self) -> None:
        """Release the lock, if this object holds it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def clear(self) -> None:
        """Remove lowbit's files, and its folders that are then empty; cached token ids and the record stay.

        Several processes may call it at once.
        """
        names = [name for name in self.made() if not name.startswith(_KEPT)]
        for name in sorted(names, key=lambda name: (name.endswith("/"), -len(name))):  # a folder after its contents
            with contextlib.suppress(OSError, ValueError):  # it is gone, or holds files of others
                path = self.path / name
                path.rmdir() if name.endswith("/") else path.unlink()

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

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            log.warning("%s cannot be locked (%s): make sure that no other run writes there", self.path, error.strerror)
        return True


def check_output(config: TrainConfig) -> None:
    """Check that `run.output` is writable and holds no files of others in the way."""
    run, output = config.run, Path(config.run.output)
    name = f"run.output {str(output)!r}"
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{name} cannot be written to: {reason}") from error
    folder = RunFolder(output)
    files = [*FILES]
    if run.save_model:
        # Others, such as a tokenizer's files, would keep the model in its staging folder.
        files += ["model/config.json", "model/model.safetensors", "model/adapter_model.safetensors"]
    if run.save_merged:
        files += ["merged/config.json", "merged/model.safetensors"]
    files += [name for name in _FOLDERS if (output / name).is_file()]
    if not run.resume:  # a resume may begin with shares that the user copied here
        shares = shares_newest_first(output / FOLDER)
        files += [str(file.relative_to(output)) for share in shares for file in sorted(share.iterdir())]
    if foreign := folder.foreign(files):
        unknown = "" if folder.marked else f" (there is no {MARK}: lowbit has not run here)"
        raise ConfigError(
            f"{name} holds {', '.join(foreign)}, which lowbit has no record of making{unknown}; "
            "nothing was touched; allowed: another folder, or to move these away"
        )
    earlier = [name for name in (*FILES, *_FOLDERS) if (output / name).exists()]
    if folder.marked and earlier and not (run.resume or run.overwrite):
        step = newest_step(output / FOLDER)
        goes_on = f"run.resume=true (--resume) to continue from step {step}, " if step is not None else ""
        raise ConfigError(
            f"{name} holds a run already ({', '.join(earlier)}){'' if goes_on else ', without a checkpoint'}; "
            f"allowed: another folder, {goes_on}or run.overwrite=true (--overwrite) to delete it"
        )
