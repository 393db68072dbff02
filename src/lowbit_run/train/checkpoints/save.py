"""Save checkpoints: every rank writes its share; once all have done so, each moves its own into place.

A share is a folder with named tensors in safetensors' format, and a manifest with their digest.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.escape import lines
from lowbit.wire import threads
from lowbit.wire.messages import gather_json
from lowbit_run.config import ConfigError
from lowbit_run.train.checkpoints.manifest import (
    FILES,
    FOLDER,
    MANIFEST,
    TENSORS,
    DamagedShareError,
    Manifest,
    check_regular,
    read_manifest,
    shares_in,
    step_name,
    steps_in,
)  # fmt: skip
from lowbit_run.train.folder import RunFolder

_BEAT_SECONDS = 1.0
DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes by their names in safetensors."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ConfigError):
    """A run cannot begin with the checkpoints in its folder, and a retry would not help. Same text on every rank."""

    on_all_ranks = True


class TransientError(CheckpointError):
    """A checkpoint could not be written or sent, because of a full disk for example; a retry may succeed."""


class Checkpoints:
    """The checkpoints of one rank.

    Args:
        output: folder of the run. rank: writes the shares. keep: number of steps that stay.
    """

    def __init__(self, output: Path, *, rank: int, keep: int) -> None:
        self.folder, self.rank, self.keep = output / FOLDER, rank, keep
        self._output = RunFolder(output)

    def save(
        self, step: int, tensors: Mapping[str, Tensor], run: Manifest, group: dist.ProcessGroup | None = None
    ) -> None:
        """Write this rank's share of a step, and drop steps older than the last `keep`.

        Shares move into place only once those of all ranks are on disk. So if any of them is in place after a crash,
        the step is complete, and `Search` moves the others.

        Args:
            step: steps done so far. run: the manifest without `step`, `file` and `tensors`.

        Raises:
            TransientError: a rank could not write its share. Older steps stay; all shares of this one are removed.
        """
        target = self.folder / step_name(step) / f"rank-{self.rank}"
        manifest = replace(run, step=step, rank=self.rank)

        def stage() -> None:
            self._output.note(*(self._name(share / file) for share in (target, staged(target)) for file in FILES))
            stage_share(target, manifest, tensors)

        def attempt(work: Callable[[], None]) -> str:
            try:
                work()
                return ""
            except OSError as error:
                reason = error.strerror or str(error)
                return f"rank {self.rank} cannot write its share of step {step}, {target}: {reason}"

        for work in (stage, partial(commit_share, target)):
            if problems := [text for text in together(partial(attempt, work), group) if text]:
                if work is stage:
                    with contextlib.suppress(OSError):
                        remove_share(staged(target))
                        target.parent.rmdir()
                raise TransientError(f"{'; '.join(problems)}; older checkpoints are as they were")
        self._drop_older_than(step)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._output.path).as_posix()

    def _drop_older_than(self, newest: int) -> None:
        """Drop this run's steps that are older than the last `keep`, including shares of ranks that no longer exist."""
        made = self._output.made()  # a share that was copied here is its owner's
        steps = [path for step, path in steps_in(self.folder).items() if step <= newest]
        ours = [[share for share in shares_in(path).values() if self._name(share / FILES[0]) in made] for path in steps]
        for share in (share for shares in list(filter(None, ours))[: -self.keep] for share in shares):
            with contextlib.suppress(OSError):  # it holds something else, or another rank was faster
                remove_share(staged(share))
                remove_share(share)
                share.parent.rmdir()


def together(work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run `work` on every rank, and return all results, which must be JSON values; every rank must call it.

    `work` runs on a thread while ranks exchange signs of life, so it may take longer than the group's time limit.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threads.start(run, "checkpoint")
    while True:
        thread.join(_BEAT_SECONDS)
        done = not thread.is_alive()  # read once: an error may come at any moment
        if "error" in outcome:
            raise outcome["error"]
        outcomes = gather_json(outcome if done else {}, group)
        if all("value" in outcome for outcome in outcomes):
            return [outcome["value"] for outcome in outcomes]


def raise_everywhere(problem: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise the first rank's problem on every rank, if any rank has one; every rank must call it."""
    if problems := [text for text in gather_json(problem, group) if text]:
        raise CheckpointError(lines(problems[0]))


def stage_share(target: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write a share next to its final place and flush it to disk; `commit_share` moves it into place.

    One tensor at a time is copied to the CPU; contiguous CPU tensors are not copied.

    Args:
        target: the share's folder, which does not change yet.
        manifest: of these tensors, without `file` and `tensors`.

    Raises:
        OSError: for example, the disk is full. The files written so far are removed.
    """
    part = staged(target)
    remove_share(part)
    new = [path for path in (target.parent.parent, target.parent) if not path.exists()]
    part.mkdir(parents=True)
    try:
        manifest = _write_tensors(part / TENSORS, manifest, tensors)
        write_file(part / MANIFEST, [manifest.to_bytes()])
        for folder in (part, part.parent, *(path.parent for path in new)):
            _flush_folder(folder)
    except OSError:
        with contextlib.suppress(OSError):
            remove_share(part)
        raise


def commit_share(target: Path) -> None:
    """Move a staged share into place, removing an older share there. Raises OSError: for example, nothing is staged."""
    if staged(target).exists():
        remove_share(target)
    os.rename(staged(target), target)
    _flush_folder(target.parent)


def staged(target: Path) -> Path:
    """Return the folder that holds a share until all ranks have written theirs."""
    return target.with_name(f".{target.name}")


def remove_share(share: Path) -> None:
    """Remove a share: the files that lowbit writes, and the folder.

    Raises:
        OSError: the folder holds other files, which stay.
    """
    if share.is_dir():
        for name in FILES:  # the manifest first: without it, the folder does not count as a share
            (share / name).unlink(missing_ok=True)
        share.rmdir()


def verify_share(share: Path) -> Manifest:
    """Read every byte of a share, and return its manifest.

    Raises:
        DamagedShareError: a file was changed or added, or is missing.
    """
    from safetensors import SafetensorError, safe_open

    manifest = read_manifest(share)
    try:
        if foreign := sorted({path.name for path in share.iterdir()} - set(FILES)):
            raise DamagedShareError(f"holds {foreign[0]}, which its manifest does not list")
        path = share / TENSORS
        check_regular(path)
        if (size := path.stat().st_size) != manifest.file["bytes"]:
            raise DamagedShareError(f"has {size} bytes of {TENSORS}; {manifest.file['bytes']} were written")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedShareError(f"cannot be read: {error.strerror}") from error
    if digest != manifest.file["sha256"]:
        raise DamagedShareError(f"has a {TENSORS} that was changed")
    try:  # ranks make room for tensors as the manifest lists them
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            entries = {name: {"dtype": s.get_dtype(), "shape": list(s.get_shape())} for name, s in slices.items()}
    except SafetensorError as error:
        raise DamagedShareError(f"has a {TENSORS} that is not in safetensors' format: {error}") from error
    if entries != manifest.tensors:
        raise DamagedShareError(f"has other tensors in {TENSORS} than its manifest lists")
    if unknown := {entry["dtype"] for entry in entries.values()} - DTYPES.keys():
        raise DamagedShareError(f"has tensors of unknown dtypes: {', '.join(sorted(unknown))}")
    return manifest


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to the disk; the entry in its folder is not flushed."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    """Flush the entries of a folder, so that they survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_tensors(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
    """Write a file in safetensors' format; returns the manifest with its digest.

    safetensors' own writer would hold a copy of all tensors in memory.
    """
    entries: dict[str, Any] = {name: (_NAMES[x.dtype], tuple(x.shape)) for name, x in tensors.items()}
    header, offsets, size = header_of(entries)
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes | memoryview]:
        yield header
        for name in offsets:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                yield flat.view(torch.uint8).numpy().data

    write_file(path, (digest.update(chunk) or chunk for chunk in chunks()))
    described = {name: {"dtype": entries[name][0], "shape": list(entries[name][1])} for name in offsets}
    return replace(manifest, file={"bytes": size, "sha256": digest.hexdigest()}, tensors=described)


def header_of(
    entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """Return a file's first bytes in safetensors' format, where each tensor begins, in their order, and its size.

    Args:
        entries: dtype, by safetensors' name, and shape of each tensor.
    """
    # Large elements first, so that each tensor begins at a multiple of its element's size.
    names = sorted(entries, key=lambda name: (-DTYPES[entries[name][0]].itemsize, name))
    values: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name in names:
        dtype, shape = entries[name]
        starts[name], end = end, end + prod(shape) * DTYPES[dtype].itemsize
        values[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(values).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: first + start for name, start in starts.items()}, first + end
