"""The manifest of a share: JSON with a digest that reveals any changed bit. Needs no PyTorch.

A manifest may come from somebody else: pydantic checks it, and nothing in it is executed.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from lowbit.escape import printable
from lowbit.files import read_bounded

FORMAT = 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
FILES = (MANIFEST, TENSORS)
FOLDER = "checkpoints"
NO_CHECKPOINT = (
    "run.resume is true; {} has no checkpoint; allowed: run.resume=auto (--resume=auto) to begin without one"
)
FINISHED = (
    "run.output {} holds a run that has ended (summary.json) and no checkpoint to go on from; allowed: another folder, "
    "or run.overwrite=true (--overwrite), without run.resume, to delete it"
)

_STEP, _RANK, _STAGED = (re.compile(text) for text in (r"step-(\d{8,})", r"rank-(\d+)", r"\.rank-(\d+)"))

_Count = Annotated[int, Field(ge=1, le=1 << 16)]  # ranks, stages or layers of a stage
_Layout = TypedDict(
    "_Layout",
    {
        "pipeline.ranks": _Count,
        "pipeline.data_parallel": _Count,
        "pipeline.stages_per_rank": _Count,
        "pipeline.schedule": str,
        "layers": list[_Count],
        "rows": Annotated[int, Field(ge=1)],
    },
)


class _Codec(TypedDict):
    after_layer: int
    direction: Literal["forward", "backward", "anchor"]
    outgoing: bool
    codec: str
    values: dict[str, Any]


class _File(TypedDict):
    bytes: int
    sha256: str


class _Tensor(TypedDict):
    dtype: str
    shape: list[NonNegativeInt]


class DamagedShareError(ValueError):
    """A share differs from what was written; the text says how, without the path, and is safe to print."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes one rank's share of a step. The fields with a default differ from step to step.

    Attributes:
        step: steps done. rank: the one that wrote the share; ranks: of the whole run, each of which wrote one.
        attempt: names the processes that wrote a checkpoint; equal in all shares that belong together.
        layout: of the model over ranks and stages (`lowbit_run.train.identity.layout_of`).
        identity: all that losses depend on, by configuration key (`lowbit_run.train.identity`).
        versions: of lowbit and PyTorch.
        changes: made to identity, layout and versions whenever the run resumed, oldest first.
        codecs: state of the codecs at boundaries, without its tensors (`lowbit_run.train.checkpoints.state`).
        aliases: for parameters that are copies, the name of the original.
        file: length and SHA-256 of `TENSORS`. tensors: dtype and shape by name.
    """

    step: int = 0
    rank: NonNegativeInt
    ranks: _Count
    attempt: str
    layout: _Layout
    identity: dict[str, Any]
    versions: dict[str, str]
    changes: list[dict[str, Any]] = field(default_factory=list)
    codecs: list[_Codec] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    file: _File = field(default_factory=lambda: _File(bytes=0, sha256=""))
    tensors: dict[str, _Tensor] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`."""
        return seal({"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Manifest":
        """Make a manifest from values that a file or a peer holds.

        Raises:
            DamagedShareError: it has another format, or something in it has the wrong type.
        """
        if (written := values.get("format", FORMAT)) != FORMAT:
            raise DamagedShareError(f"has format {written!r}; this version of lowbit reads format {FORMAT}")
        try:
            manifest = _manifests().validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise DamagedShareError(f"has a manifest that is not as lowbit writes it: {problem}") from None
        layout = manifest.layout
        stages = layout["pipeline.ranks"] * layout["pipeline.stages_per_rank"]
        if (
            manifest.ranks != layout["pipeline.ranks"] * layout["pipeline.data_parallel"]
            or manifest.rank >= manifest.ranks
            or stages != len(layout["layers"])
        ):
            raise DamagedShareError("has a manifest that is not as lowbit writes it: ranks, stages and layers differ")
        return manifest


_manifests = functools.cache(lambda: TypeAdapter(Manifest))


def seal(values: Mapping[str, Any]) -> bytes:
    """Return JSON that begins with a digest of the rest."""
    text = json.dumps(values)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"sha256": digest, **values}).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """Invert `seal`. Raises DamagedShareError: `seal` would not write exactly these bytes."""
    try:
        values = json.loads(data)
        values.pop("sha256")
        if seal(values) == data:
            return values
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise DamagedShareError(f"has a {MANIFEST} that was changed or cut short")


def read_manifest(share: Path) -> Manifest:
    """Read the manifest of a share, not its tensors. Raises DamagedShareError: it is missing, or was changed."""
    try:
        data = read_bounded(share / MANIFEST)
    except OSError as error:
        raise DamagedShareError(f"has no {MANIFEST} that can be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedShareError(f"has a {MANIFEST} that cannot be read: {error}") from error
    manifest = Manifest.from_values(unseal(data))
    place = share.name.removeprefix("."), share.parent.name  # a dot marks a share that waits for those of other ranks
    if (f"rank-{manifest.rank}", step_name(manifest.step)) != place:
        raise DamagedShareError(f"is that of rank {manifest.rank} at step {manifest.step}")
    return manifest


def check_regular(path: Path) -> None:
    """Raise DamagedShareError for a pipe or device, which may block when it is read, or never end."""
    if path.exists() and not path.is_file():
        raise DamagedShareError(f"has a {path.name} that is not a regular file")


def step_name(step: int) -> str:
    """Name the folder of a step."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> dict[int, Path]:
    """Folders of steps in a folder of checkpoints, in ascending order; anything else there is ignored."""
    return _numbered(folder, _STEP)


def shares_in(step: Path, *, staged: bool = False) -> dict[int, Path]:
    """Folders of shares in the folder of a step (or `staged`: not yet moved into place), by rank, ascending."""
    return _numbered(step, _STAGED if staged else _RANK)


def shares_newest_first(folder: Path) -> list[Path]:
    """List shares of checkpoints, those of the newest step first."""
    return [share for step in reversed(steps_in(folder).values()) for share in shares_in(step).values()]


def newest_step(folder: Path) -> int | None:
    """Guess from manifests alone which step a resume will begin with; None without checkpoints.

    This is the newest step with all shares in this folder; if none has all, as on several machines, the newest of all.
    """
    newest = None
    for step, path in reversed(steps_in(folder).items()):
        attempts: dict[str, set[int]] = {}
        for share in shares_in(path).values():
            try:
                manifest = read_manifest(share)
            except DamagedShareError:
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
