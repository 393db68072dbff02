"""Checkpoints that are whole or absent, that notice a change to any of their bits, and that any layout can go on from.

    checkpoints/step-00000100/rank-0/   what rank 0 has: tensors.safetensors and manifest.json
                              rank-1/   ... on the disk of rank 1's machine, which may be another

Each rank writes its own share, since several machines need not have a disk in common, into a hidden folder that is
flushed to disk and then renamed. A crash at any moment leaves older steps as they were. A step counts as soon as all
shares of it are there, which whoever wants to go on from it finds out by reading them to the last byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from lowbit.ranks.objects import gather_json
from lowbit.train.folder import RunFolder
from lowbit.train.manifest import FILES, Manifest, printable, shares_in, step_name, steps_in
from lowbit.train.section import ConfigError
from lowbit.train.share import commit_share, drop_share, remove_share, stage_share, staged
from lowbit.train.state import Snapshot

FOLDER = "checkpoints"
NO_CHECKPOINT = (
    "run.resume is true; {} has no checkpoint; allowed: run.resume=auto (--resume=auto) to begin where there is none"
)
_BEAT_SECONDS = 1.0


class CheckpointError(ConfigError):
    """A run cannot begin with what is in its folder; another attempt would end alike. The same text on every rank."""

    on_all_ranks = True


class TransientError(CheckpointError):
    """A checkpoint could not be written or sent, as with a full disk; another attempt may. The same on every rank."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What all shares that a run writes have in common, as `Manifest` has it."""

    ranks: int
    attempt: str
    layout: dict[str, Any]
    identity: dict[str, Any]
    versions: dict[str, str]
    changes: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one rank.

    Args:
        output: folder of the run. rank: whose shares. keep: how many steps stay.
    """

    def __init__(self, output: Path, *, rank: int, keep: int) -> None:
        self.folder, self.rank, self.keep = output / FOLDER, rank, keep
        self._output = RunFolder(output)

    def save(self, step: int, snapshot: Snapshot, about: About, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's share of a step, and drop what is older than the last `keep`.

        A share takes its place only when those of all ranks are on their disks. So if any of them is seen in its place
        after a crash, the step is complete, and `Search` puts the others there.

        Args:
            step: steps done so far. snapshot: everything to be found again.

        Raises:
            TransientError: a rank could not write its share. Nobody's share of this step stays, older steps do.
        """
        target = self.folder / step_name(step) / f"rank-{self.rank}"
        manifest = Manifest(
            step=step, rank=self.rank, codecs=snapshot.codecs, aliases=snapshot.aliases, files={}, tensors={},
            **vars(about),
        )  # fmt: skip

        def stage() -> None:
            self._clear_the_way(target)
            self._note(target)
            stage_share(target, manifest, snapshot.tensors)

        def attempt(work: Callable[[], None]) -> str:
            try:
                work()
            except OSError as error:
                reason = error.strerror or str(error)
                return f"rank {self.rank} cannot write its share of step {step}, {target}: {reason}"
            return ""

        for work in (stage, partial(commit_share, target)):
            if failed := [text for text in together(partial(attempt, work), group) if text]:
                if work is stage:
                    with contextlib.suppress(OSError):
                        remove_share(staged(target))
                        target.parent.rmdir()
                raise TransientError(f"{'; '.join(failed)}; older checkpoints are as they were")
        self._drop_all_but(step)

    def _clear_the_way(self, target: Path) -> None:
        """Move aside what stands where a share is to go and was not made by this run, such as a copied checkpoint."""
        names = {path.name for path in target.iterdir()} if target.is_dir() else set()
        if names and (names - set(FILES) or self._foreign(target)):
            aside = (target.with_name(f"{target.name}.kept-{i}") for i in range(1, 1000))
            target.rename(next(path for path in aside if not path.exists()))

    def _note(self, target: Path) -> None:
        step = f"{FOLDER}/{target.parent.name}"
        folders = (target.name, f".{target.name}", f".{target.name}.old")
        self._output.note(*(f"{step}/{name}/{file}" for name in folders for file in FILES))

    def _foreign(self, share: Path) -> bool:
        return bool(self._output.foreign(f"{FOLDER}/{share.parent.name}/{share.name}/{f}" for f in FILES))

    def _drop_all_but(self, newest: int) -> None:
        """Drop steps of this run that are older than the last `keep`: all shares that are here, of ranks gone, too."""
        made = self._output.made()
        own = {
            step: [s for s in shares_in(path).values() if f"{FOLDER}/{path.name}/{s.name}/{FILES[0]}" in made]
            for step, path in steps_in(self.folder).items()
            if step <= newest
        }
        steps = sorted(step for step, shares in own.items() if shares)
        for step in steps[: -self.keep]:
            for share in own[step]:
                for hidden in (f".{share.name}", f".{share.name}.old"):
                    with contextlib.suppress(OSError):
                        remove_share(share.with_name(hidden))
                drop_share(share)


def together(work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """What `work` returns on each rank, which JSON must be able to hold; to be called by each of them.

    It runs beside an exchange of signs of life, so that it may take longer than the group's time limit.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="lowbit-checkpoint", daemon=True)
    thread.start()
    while True:
        thread.join(_BEAT_SECONDS)
        done = not thread.is_alive()  # asked once, or an error in between would be sent
        if "error" in outcome:
            raise outcome["error"]
        told = gather_json(outcome if done else {}, group)
        if all("value" in each for each in told):
            return [each["value"] for each in told]


def same_everywhere(
    problem: str,
    group: dist.ProcessGroup | None = None,
    kind: type[CheckpointError] = CheckpointError,
) -> None:
    """Raise the first problem that any rank has, on each of them; to be called by each of them.

    Raises:
        CheckpointError: with that text, as far as it can be printed; or another `kind`.
    """
    if problems := [text for text in gather_json(problem, group) if text]:
        raise kind("\n".join(map(printable, problems[0].split("\n"))))


def fail_together(text: str, group: dist.ProcessGroup | None = None) -> NoReturn:
    """Raise on every rank, each of which calls this, what the first has to say: paths may differ between machines.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(gather_json(text, group)[0])


def as_values(manifest: Manifest) -> dict[str, Any]:
    """A manifest as JSON holds it, for other ranks."""
    return dataclasses.asdict(manifest)
