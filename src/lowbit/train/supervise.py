"""Supervised runs restart from the newest checkpoint whenever a rank, machine or link fails.

A supervisor does not train. It starts the ranks of this machine (or the one that the environment names) as processes
of their own and, when they fail, restarts them with `run.resume = "auto"`. Several machines need no common
supervisor: the ranks of each attempt meet as at the first start, and early ones wait for the others.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from lowbit.config import ConfigError
from lowbit.job.launch import LaunchError
from lowbit.job.output import ALONE, DIVERGED, USAGE
from lowbit.train.checkpoints.manifest import newest_step
from lowbit.train.config import TrainConfig

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0


def supervise(config: TrainConfig, start: Callable[[TrainConfig], None]) -> None:
    """Train until the last step, in as many attempts as it takes.

    It gives up if another attempt cannot help: the configuration cannot work, the loss is NaN or infinite twice after
    the same checkpoint, ranks do not come within `run.rejoin_seconds`, or `run.restarts` consecutive attempts brought
    no new checkpoint.

    `start` runs the ranks of one attempt until they are done, or raises `LaunchError`.

    Raises:
        ConfigError: (before any process starts) the configuration cannot work.
        LaunchError: from the last attempt, with how to continue.
    """
    from lowbit.job.process_group import world
    from lowbit.train.prepare import prepare

    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "run.supervise is true under torchrun, which restarts ranks itself; "
            "allowed: torchrun --max-restarts with run.resume=auto"
        )
    if not config.run.resume:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))
    one_rank = "RANK" in os.environ or config.ranks == 1
    ranks = world()[1] if one_rank else config.ranks
    prepare(config, ranks=ranks)
    checkpoints = Path(config.run.output) / "checkpoints"
    attempts = Attempts(config.run.restarts, newest_step(checkpoints))
    while True:
        try:
            start(config)
            return
        except LaunchError as error:
            if error.interrupted:
                raise
            step = newest_step(checkpoints)
            place = "the start" if step is None else f"step {step}"
            if error.code == ALONE and step == config.run.steps:
                log.warning("%s. All %d steps are done: the other ranks must have finished", error, step)
                return
            if reason := attempts.give_up(error.code, step):
                how = "" if error.code == USAGE else f". The same command continues from {place}"
                raise LaunchError(f"{error}; {reason}{how}", error.code) from error
            log.warning(
                "%s. Starting again from %s (attempt %d without a new checkpoint, at most %d)",
                error, place, attempts.in_vain, config.run.restarts,
            )  # fmt: skip
            time.sleep(attempts.pause)
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))


class Attempts:
    """Counts consecutive attempts that brought no new checkpoint; `step`: of the newest one, None without any."""

    def __init__(self, most: int, step: int | None) -> None:
        self._most, self._step, self._diverged = most, step, False
        self.in_vain = 0

    @property
    def pause(self) -> float:
        """Seconds before the next attempt: a machine that is gone may need time to come back."""
        return min(_LONGEST_PAUSE, 2.0 ** (self.in_vain - 1))

    def give_up(self, code: int, step: int | None) -> str:
        """Count an attempt that ended with this exit code and newest checkpoint; return why to stop, or ""."""
        if step != self._step:
            self._step, self._diverged, self.in_vain = step, False, 0
        self.in_vain += 1
        again, self._diverged = self._diverged, self._diverged or code == DIVERGED
        if code == USAGE:
            return "another attempt would end in the same way"
        if code == ALONE:
            return "not all machines came back in time"
        if code == DIVERGED and again:
            return "the attempt before ended likewise, after the same checkpoint"
        return f"gave up after {self.in_vain} attempts" if self.in_vain > self._most else ""
