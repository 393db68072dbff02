"""The manifest of a share: JSON that reveals a change to any of its bits. Needs no PyTorch.

The types of all values in a foreign manifest are checked; nothing in it is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.terminal import printable

FORMAT = 2
"""Number of the format; 1 was PyTorch's own, of older versions."""

MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
FILES = (MANIFEST, TENSORS)
OLDER = "is of an older lowbit and is not read, because reading its format can run code"

_COUNTS = ("pipeline.ranks", "pipeline.data_parallel", "pipeline.stages_per_rank", "rows")
_STEP, _RANK = re.compile(r"step-(\d{8,})"), re.compile(r"rank-(\d+)")
_STAGED = re.compile(r"\.rank-(\d+)")

_MOST = 1 << 16  # ranks, stages or layers of a stage in a manifest
_MOST_BYTES = 64 << 20  # of a manifest


class DamagedError(ValueError):
    """A share is not as it was written; the text says how, without its path, and is safe to print."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes one rank's share of a step. The fields with a default differ from step to step.

    Attributes:
        step: steps done. rank: whose share; ranks: of the whole run, each of which wrote one.
        attempt: the same in all shares that belong together: a name of the processes that wrote them.
        layout: of the model over ranks and stages (`lowbit.train.identity.layout_of`).
        identity: all that losses depend on, by configuration key (`lowbit.train.identity`).
        versions: of lowbit and PyTorch.
        changes: of the identity, layout and versions when runs resumed, oldest first.
        codecs: state of the codecs at boundaries, without its tensors (`lowbit.train.checkpoints.state`).
        aliases: for parameters that are copies, the name of the original.
        files: length and SHA-256 by name. tensors: dtype, shape and CRC-32 of the bytes by name.
    """

    step: int = 0
    rank: int
    ranks: int
    attempt: str
    layout: dict[str, Any]
    identity: dict[str, Any]
    versions: dict[str, str]
    changes: list[dict[str, Any]] = field(default_factory=list)
    codecs: list[dict[str, Any]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`."""
        return seal({"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Manifest:
        """A manifest from a file or a peer.

        Raises:
            DamagedError: it has another format, or something in it has the wrong type.
        """
        values = dict(values)
        written = values.pop("format", FORMAT)
        if written != FORMAT:
            raise DamagedError(f"has format {written!r}; this version of lowbit reads format {FORMAT}")
        fields = {each.name: str(each.type) for each in dataclasses.fields(cls)}
        if unlike := fields.keys() ^ values.keys():
            raise DamagedError(f"has a manifest that lacks or has {', '.join(sorted(unlike))}")
        for name, kind in fields.items():
            if type(values[name]).__name__ != kind.partition("[")[0]:
                raise DamagedError(f"has a manifest whose {name} is not of type {kind}")
        manifest = cls(**values)
        try:
            sound = all(manifest._conditions())
        except (KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise DamagedError("has a manifest that is not as lowbit writes it")
        if set(manifest.files) != {TENSORS}:
            raise DamagedError(f"lists the files {', '.join(manifest.files)}; expected {TENSORS}")
        return manifest

    def _conditions(self) -> Iterator[bool]:
        """Conditions that every manifest of lowbit meets, for all fields in use."""
        for entry in self.tensors.values():
            yield isinstance(entry["dtype"], str) and isinstance(entry["crc32"], int)
            yield all(type(n) is int and n >= 0 for n in entry["shape"])
        for entry in self.files.values():
            yield isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
        for unit in self.codecs:
            yield isinstance(unit["after_layer"], int) and isinstance(unit["outgoing"], bool)
            yield isinstance(unit["codec"], str) and isinstance(unit["values"], dict)
            yield unit["direction"] in ("forward", "backward")
        for change in self.changes:
            yield change.keys() == {"step", "key", "before", "after"}
        yield all(isinstance(name, str) for name in self.aliases.values())
        places, replicas, stages, rows = (self.layout[key] for key in _COUNTS)
        yield all(type(n) is int and 0 < n <= _MOST for n in (places, replicas, stages, self.ranks))
        yield type(rows) is int and rows > 0
        yield self.ranks == places * replicas and 0 <= self.rank < self.ranks
        yield isinstance(self.layout["pipeline.schedule"], str)
        yield all(type(n) is int and 0 < n <= _MOST for n in self.layout["layers"])
        yield places * stages == len(self.layout["layers"])


def seal(values: Mapping[str, Any]) -> bytes:
    """JSON with a digest of itself in front."""
    text = json.dumps(values)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"sha256": digest, **values}).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The inverse of `seal`.

    Raises:
        DamagedError: `seal` would not write exactly these bytes.
    """
    try:
        values = json.loads(data)
        values.pop("sha256")
        same = seal(values) == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        same, values = False, {}
    if not same:
        raise DamagedError(f"has a {MANIFEST} that was changed or cut short")
    return values


def read_manifest(share: Path) -> Manifest:
    """The manifest of a share, whose tensors are not checked.

    Raises:
        DamagedError: there is none, it was changed, or it has another format.
    """
    if (share / ".metadata").exists() and not (share / MANIFEST).exists():
        raise DamagedError(OLDER)
    try:
        data = read_manifest_bytes(share)
    except OSError as error:
        raise DamagedError(f"has no {MANIFEST} that can be read: {error.strerror}") from error
    manifest = Manifest.from_values(unseal(data))
    place = share.name.removeprefix("."), share.parent.name  # a dot: the share waits for those of other ranks
    if (f"rank-{manifest.rank}", step_name(manifest.step)) != place:
        raise DamagedError(f"is that of rank {manifest.rank} at step {manifest.step}")
    return manifest


def read_manifest_bytes(share: Path) -> bytes:
    """The content of the manifest of a share.

    Raises:
        DamagedError: it is a pipe or device, or too long. OSError: it cannot be read.
    """
    check_regular(share / MANIFEST)
    with (share / MANIFEST).open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise DamagedError(f"has a {MANIFEST} of more than {_MOST_BYTES} bytes")
    return data


def check_regular(path: Path) -> None:
    """Raise DamagedError for a pipe or device, which may block or act when it is read; OSError if there is no file."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DamagedError(f"has a {path.name} that is not a regular file")


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> dict[int, Path]:
    """Folders of steps in a folder of checkpoints, in ascending order; anything else there is ignored."""
    return _numbered(folder, _STEP)


def shares_in(step: Path) -> dict[int, Path]:
    """Folders of shares in the folder of a step, by rank, in ascending order."""
    return _numbered(step, _RANK)


def staged_in(step: Path) -> dict[int, Path]:
    """Folders of shares that were not moved to their places, by rank."""
    return _numbered(step, _STAGED)


def newest_step(folder: Path) -> int | None:
    """The step that a resume will probably begin with, from manifests alone; None if there is none.

    The newest step with all shares in this folder; if none has all, as on several machines, the newest with any.
    """
    newest = None
    for step, path in reversed(steps_in(folder).items()):
        attempts: dict[str, set[int]] = {}
        for share in shares_in(path).values():
            try:
                manifest = read_manifest(share)
            except (DamagedError, OSError):
                continue
            newest = newest or step
            attempts.setdefault(manifest.attempt, set()).add(manifest.rank)
            if len(attempts[manifest.attempt]) == manifest.ranks:
                return step
    return newest


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # another rank may have dropped it just now
        return {}
    matches = [(pattern.fullmatch(path.name), path) for path in paths]
    return dict(sorted((int(match[1]), path) for match, path in matches if match and path.is_dir()))
