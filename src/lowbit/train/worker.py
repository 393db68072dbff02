"""`python -m lowbit.train.worker` is one rank of a run, which reads its configuration from standard input."""

from typing import Any

from lowbit.job.launch import work
from lowbit.job.output import ALONE, DIVERGED, FAILED, USAGE
from lowbit.job.stop import StoppedError


def _train(config: dict[str, Any]) -> None:
    from lowbit.train.config import from_mapping
    from lowbit.train.loop import train

    train(from_mapping(config))


def exit_code(error: Exception) -> int:
    """Return the exit code of an error, by which a supervisor decides whether another attempt can help."""
    from lowbit.config import ConfigError
    from lowbit.job.peers import AbsentError
    from lowbit.job.process_group import AloneError
    from lowbit.train.checkpoints.save import TransientError
    from lowbit.train.trainer import DivergedError
    from lowbit.wire.pytorch import TorchVersionError

    if isinstance(error, StoppedError):
        return error.code
    kinds = {
        DivergedError: DIVERGED, AloneError: ALONE, AbsentError: ALONE,
        TransientError: FAILED,  # a full disk may have room again
        ConfigError: USAGE, TorchVersionError: USAGE,
    }  # fmt: skip
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), FAILED)


if __name__ == "__main__":
    work(_train, exit_code)
