"""Start a run: as a rank of torchrun, alone in this process, or as several local processes."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from lowbit.job.launch import LaunchError, RankProgram, start_all, start_one
from lowbit.job.output import USAGE
from lowbit.train.checkpoints.manifest import newest_step
from lowbit.train.config import TrainConfig
from lowbit.train.early import check_early
from lowbit.train.summary import Summary, read_summary


def run(config: TrainConfig) -> Summary | None:
    """Train according to the configuration and the environment.

    Under torchrun (RANK etc. are set) this process is one rank of the run. Otherwise it starts `config.ranks` processes
    on this machine, or trains by itself if there is only one rank. With `run.supervise` it starts processes that train,
    and restarts them when they fail (`lowbit.train.supervise`).

    Returns:
        The summary; None from the supervisor of a rank other than 0, whose machine has no summary.

    Raises:
        ConfigError: (before any process starts) the configuration cannot work.
        TorchVersionError: this version of PyTorch is not supported.
        LaunchError: a local rank failed; all others have been ended.
        AgreementError, PeerError, DivergedError: as `lowbit.train.train`, if this process is a rank.
    """
    from lowbit.wire.pytorch import check_torch

    if "RANK" not in os.environ:  # under torchrun, ranks meet before the check, so that all report the problem of one
        check_torch()
    check_early(config)
    one_rank = "RANK" in os.environ or config.ranks == 1
    summary = Path(config.run.output) / "summary.json"
    if config.run.supervise:
        from lowbit.train.supervise import supervise

        supervise(config, partial(start_ranks, one=True) if one_rank else start_ranks)
        return read_summary(summary) if summary.exists() else None
    if one_rank:
        from lowbit.train.loop import train

        return train(config)
    from lowbit.train.prepare import prepare

    prepare(config, ranks=config.ranks)
    try:
        start_ranks(config)
    except LaunchError as error:
        step = newest_step(Path(config.run.output) / "checkpoints")
        if step is None or error.code == USAGE:  # resuming cannot help
            raise
        advice = f"{error}; --resume continues from step {step}"
        raise LaunchError(advice, error.code, interrupted=error.interrupted) from None
    return read_summary(summary)


def start_ranks(config: TrainConfig, *, one: bool = False) -> None:
    """Run all ranks of the run as processes on this machine until they are done; `LaunchError` if one fails.

    Args:
        one: run only the rank that the environment names, or the only one.
    """
    from lowbit.train.device import threads_per_rank
    from lowbit.wire.checksum import SECRET

    program = RankProgram(
        module="lowbit.train.worker", order=json.dumps(json.loads(config.to_json())),
        timeout=config.run.timeout_seconds, threads=config.run.threads or threads_per_rank(config.ranks),
    )  # fmt: skip
    if one:
        return start_one(program)
    # Replicas authenticate each other's messages with a secret that the user gives to all of them.
    start_all(program, config.ranks, secret=os.environ.get(SECRET, "") if config.elastic.lighthouse else None)
