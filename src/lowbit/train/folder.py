"""The folder of a run: which files in it lowbit made, so that it never removes or replaces any other.

Names are written down in `lowbit-run.jsonl` before the files are made, a line at a time, by all processes that write
into the folder. Nothing else is ever taken for lowbit's own, whatever its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

MARK = "lowbit-run.jsonl"
_STAGING = ".lowbit-part/"  # ends the names of folders that are lowbit's with all that they hold


class RunFolder:
    """A folder with the record of what lowbit made in it.

    Args:
        path: the folder, which exists as soon as something is made in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def marked(self) -> bool:
        """Whether lowbit has made anything here, as far as it has a record."""
        return (self.path / MARK).is_file()

    def made(self) -> set[str]:
        """Files and folders ("model/") that lowbit made, relative to the folder. They need not exist any more."""
        found: set[str] = set()
        with contextlib.suppress(OSError):
            for line in (self.path / MARK).read_text("utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    found.update(filter(_is_inside, json.loads(line)["made"]))
        return found

    def note(self, *names: str) -> None:
        """Write down that these files, and folders ("model/"), are about to be made.

        Folders on the way that do not exist yet are noted with them.
        """
        folders = {f"{parent}/" for name in names for parent in PurePosixPath(name).parents}
        new = sorted(f for f in folders if f != "./" and not (self.path / f).exists())
        line = json.dumps({"made": [*new, *names]}) + "\n"
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / MARK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if (
                size and os.pread(descriptor, 1, size - 1) != b"\n"
            ):  # a crash cut the last line short
                line = "\n" + line
            os.write(
                descriptor, line.encode()
            )  # a single write, so that processes do not mix theirs
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def foreign(self, names: Iterable[str]) -> list[str]:
        """Those of these files that exist and that lowbit did not make."""
        made = self.made()
        return [name for name in names if name not in made and os.path.lexists(self.path / name)]

    def clear(self) -> None:
        """Remove what lowbit made, and folders of its own that are empty then. Several processes may do so at once."""
        made = self.made()
        for name in made:
            path = self.path / name
            if not name.endswith("/") and self._leads_inside(path):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    path.unlink()
        for name in sorted(made, key=len, reverse=True):
            path = self.path / name
            if name.endswith(_STAGING) and self._leads_inside(path) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif name.endswith("/") and self._leads_inside(path) and not path.is_symlink():
                with contextlib.suppress(
                    OSError
                ):  # it holds something that is not ours, or is gone
                    path.rmdir()
        (self.path / MARK).unlink(missing_ok=True)

    def adopt(self, staging: Path, name: str) -> None:
        """Move all files of a folder that lowbit has just filled into the folder `name`, and drop what it had there.

        Raises:
            FileExistsError: a file of that name is not lowbit's; then nothing was moved.
        """
        files = [
            f"{name}/{path.relative_to(staging).as_posix()}"
            for path in sorted(staging.rglob("*"))
            if path.is_file()
        ]
        in_the_way = files if (self.path / name).is_dir() else [name]
        if others := self.foreign(in_the_way):
            raise FileExistsError(
                f"{self.path / others[0]} is not lowbit's and stays; what was to go there lies in {staging}"
            )
        old = [n for n in self.made() if n.startswith(f"{name}/") and not n.endswith("/")]
        self.note(*files)
        for file in files:
            target = self.path / file
            target.parent.mkdir(parents=True, exist_ok=True)
            (staging / PurePosixPath(file).relative_to(name)).replace(target)
        for file in set(old) - set(files):
            if self._leads_inside(self.path / file):
                (self.path / file).unlink(missing_ok=True)
        shutil.rmtree(staging)

    def staging(self, name: str) -> Path:
        """A new, empty folder for `adopt`; one that an earlier attempt left is emptied.

        Raises:
            FileExistsError: there is one that lowbit did not make.
        """
        hidden = f".{name}{_STAGING}"
        path = self.path / hidden
        if os.path.lexists(path):
            if hidden not in self.made() or path.is_symlink():
                raise FileExistsError(f"{path} is not lowbit's; it needs the name")
            shutil.rmtree(path)
        self.note(hidden)
        path.mkdir()
        return path

    def _leads_inside(self, path: Path) -> bool:
        """Whether no symbolic link on the way leads out of the folder."""
        return path.parent.resolve().is_relative_to(self.path.resolve())


def _is_inside(name: object) -> bool:
    return (
        isinstance(name, str)
        and name not in ("", ".", "/")
        and not PurePosixPath(name).is_absolute()
        and (".." not in PurePosixPath(name).parts)
    )
