"""Start a run: as a rank of torchrun, alone in this process, as several local processes, or supervised.

A supervisor does not train. It starts the ranks of this machine (or the one that the environment names) as processes
of their own and, when they fail, restarts them with `run.resume = "auto"`. Several machines need no common
supervisor: the ranks of each attempt meet as at the first start, and early ones wait for the others.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from lowbit import escape
from lowbit_run.config import ConfigError
from lowbit_run.job.exit_codes import ALONE, DIVERGED, USAGE
from lowbit_run.job.launch import LaunchError, RankProgram, start_all, start_one
from lowbit_run.job.stop import StoppedError
from lowbit_run.train.checkpoints.manifest import FOLDER, NO_CHECKPOINT, newest_step, shares_newest_first
from lowbit_run.train.config import TrainConfig
from lowbit_run.train.folder import check_output
from lowbit_run.train.metrics import Summary, read_summary

log = escape.logger(__name__)

_LONGEST_PAUSE = 30.0


def run(config: TrainConfig) -> Summary | None:
    """Train according to the configuration and the environment.

    Under torchrun (RANK etc. are set) this process is one rank of the run. Otherwise it starts `config.ranks` processes
    on this machine, or trains by itself if there is only one rank. With `run.supervise` it starts processes that train,
    and restarts them when they fail (`supervise`).

    Returns:
        The summary; None from the supervisor of a rank other than 0, whose machine has no summary.

    Raises:
        ConfigError: (before ranks meet) the configuration cannot work.
        TorchVersionError: this version of PyTorch is not supported.
        LaunchError: a local rank failed or a signal asked for the end; all ranks have ended.
        StoppedError, AgreementError, PeerError, DivergedError: as `lowbit_run.train.train`, if this process is a rank.
    """
    from lowbit.wire.pytorch import check_torch
    from lowbit_run.job.process_group import is_launched

    launched = is_launched()
    if not launched:  # under torchrun, ranks meet before the check, so that all report the problem of one
        check_torch()
    check_early(config)
    one_rank = launched or config.ranks == 1
    summary = Path(config.run.output) / "summary.json"
    if config.run.supervise:
        supervise(config, partial(start_ranks, one=True) if one_rank else start_ranks)
        return read_summary(summary) if summary.exists() else None
    try:
        if one_rank:
            from lowbit_run.train.loop import train

            return train(config)
        start_ranks(config)
    except (LaunchError, StoppedError) as error:
        if error.code != USAGE:  # otherwise resuming cannot help
            error.args = (f"{error}{_goes_on(config, '; --resume continues from step {}')}",)
        raise
    return read_summary(summary)


def on_several_machines() -> bool:
    """Whether the environment has ranks on other machines."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks


def _goes_on(config: TrainConfig, how: str) -> str:
    """Say how to continue, and how to make a model of what is there; empty without a checkpoint."""
    step = newest_step(Path(config.run.output) / FOLDER)
    if step is None:
        return ""
    elsewhere = ", once the checkpoints folders of all machines are copied into it," if on_several_machines() else ""
    return f"{how.format(step)}, and lowbit export {escape.printable(config.run.output)}{elsewhere} makes a model of it"


def check_early(config: TrainConfig) -> None:
    """Check what `prepare` checks without the modules that take seconds to import; ranks of a launcher check the rest.

    So a slip on the command line is refused within seconds.

    Raises:
        ConfigError: something would keep the run from starting. ModuleNotFoundError: an optional package is missing.
    """
    from lowbit_run.train.boundaries import make_codecs
    from lowbit_run.train.data import files_named
    from lowbit_run.train.device import choose_device
    from lowbit_run.train.layout import make_layout
    from lowbit_run.train.model import count_layers

    for name in ("transformers", "safetensors"):
        if find_spec(name) is None:  # or else each rank would end with a traceback
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    run, data, layers = config.run, config.data, count_layers(config.model)
    if "RANK" not in os.environ:
        make_layout(config.pipeline, ranks=config.pipeline.ranks, layers=layers)
        choose_device(run.device, config.ranks)
    make_codecs(config.pipeline, len(config.pipeline.forward))
    if not run.supervise:  # which resumes by itself
        check_output(config)
    if run.resume is True and not shares_newest_first(Path(run.output) / FOLDER) and "RANK" not in os.environ:
        raise ConfigError(NO_CHECKPOINT.format(Path(run.output) / FOLDER))
    files_named(data.text, "data.text")
    files_named(data.held_out, "data.held_out")


def start_ranks(config: TrainConfig, *, one: bool = False) -> None:
    """Run all ranks of the run as processes on this machine until they are done; `LaunchError` if one fails.

    Args:
        one: run only the rank that the environment names, or the only one.
    """
    from lowbit.wire.checksum import SECRET
    from lowbit_run.train.device import threads_per_rank

    program = RankProgram(
        module="lowbit_run.train.worker", order=json.dumps(json.loads(config.to_json())),
        timeout=config.run.timeout_seconds, threads=config.run.threads or threads_per_rank(config.ranks),
        grace=config.run.grace_seconds,
    )  # fmt: skip
    if one:
        return start_one(program)
    # Replicas authenticate each other's messages with a secret that the user gives to all of them.
    start_all(program, config.ranks, secret=os.environ.get(SECRET, "") if config.elastic.lighthouse else None)


def supervise(config: TrainConfig, start: Callable[[TrainConfig], None]) -> None:
    """Train until the last step, in as many attempts as it takes.

    It gives up if another attempt cannot help: the configuration cannot work, the loss is NaN or infinite twice after
    the same checkpoint, ranks do not come within `run.rejoin_seconds`, or `run.restarts` consecutive attempts brought
    no new checkpoint.

    `start` runs the ranks of one attempt until they are done, or raises `LaunchError`.

    Raises:
        ConfigError: (before ranks meet) the configuration cannot work.
        LaunchError: from the last attempt, with how to continue.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "run.supervise is true under torchrun, which restarts ranks itself; "
            "allowed: torchrun --max-restarts with run.resume=auto"
        )
    resuming = replace(config, run=replace(config.run, resume="auto"))
    config = config if config.run.resume else resuming
    checkpoints = Path(config.run.output) / FOLDER
    attempts = Attempts(config.run.restarts, newest_step(checkpoints))
    while True:
        try:
            start(config)
            return
        except LaunchError as error:
            step = newest_step(checkpoints)
            place = "the start" if step is None else f"step {step}"
            goes_on = _goes_on(config, ". The same command continues from step {}") or (
                ". The same command continues from the start"
            )
            if error.interrupted:
                error.args = (f"{error}{goes_on}",)
                raise
            if error.code == ALONE and step == config.run.steps:
                log.warning("%s. All %d steps are done: the other ranks must have finished", error, step)
                return
            if reason := attempts.give_up(error.code, step):
                raise LaunchError(f"{error}; {reason}{'' if error.code == USAGE else goes_on}", error.code) from error
            log.warning(
                "%s. Starting again from %s (attempt %d without a new checkpoint, at most %d)",
                error, place, attempts.in_vain, config.run.restarts,
            )  # fmt: skip
            time.sleep(attempts.pause)
            config = resuming


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
