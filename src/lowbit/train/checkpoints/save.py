"""Save checkpoints: every rank writes its share; once all have done so, each moves its own into place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lowbit.config import ConfigError
from lowbit.terminal import lines
from lowbit.train.checkpoints.manifest import FILES, FOLDER, Manifest, shares_in, step_name, steps_in
from lowbit.train.checkpoints.share import commit_share, remove_share, stage_share, staged
from lowbit.train.checkpoints.state import Snapshot
from lowbit.train.folder import RunFolder
from lowbit.wire.messages import gather_json

_BEAT_SECONDS = 1.0


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

    def save(self, step: int, snapshot: Snapshot, run: Manifest, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's share of a step, and drop steps older than the last `keep`.

        Shares move into place only once those of all ranks are on disk. So if any of them is in place after a crash,
        the step is complete, and `Search` moves the others.

        Args:
            step: steps done so far. run: the manifest without the fields of a step.

        Raises:
            TransientError: a rank could not write its share. Older steps stay; all shares of this one are removed.
        """
        target = self.folder / step_name(step) / f"rank-{self.rank}"
        manifest = replace(run, step=step, rank=self.rank, codecs=snapshot.codecs, aliases=snapshot.aliases)

        def stage() -> None:
            self._output.note(*(self._name(share / file) for share in (target, staged(target)) for file in FILES))
            stage_share(target, manifest, snapshot.tensors)

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
        own = [[share for share in shares_in(path).values() if self._name(share / FILES[0]) in made] for path in steps]
        for share in (share for shares in [each for each in own if each][: -self.keep] for share in shares):
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

    thread = threading.Thread(target=run, name="lowbit-checkpoint", daemon=True)
    thread.start()
    while True:
        thread.join(_BEAT_SECONDS)
        done = not thread.is_alive()  # read once: an error may come at any moment
        if "error" in outcome:
            raise outcome["error"]
        outcomes = gather_json(outcome if done else {}, group)
        if all("value" in each for each in outcomes):
            return [each["value"] for each in outcomes]


def raise_everywhere(
    problem: str, group: dist.ProcessGroup | None = None, kind: type[CheckpointError] = CheckpointError
) -> None:
    """Raise the first rank's problem on every rank, if any rank has one; every rank must call it.

    Raises:
        CheckpointError: with the printable part of that text; or another `kind`.
    """
    if problems := [text for text in gather_json(problem, group) if text]:
        raise kind(lines(problems[0]))
