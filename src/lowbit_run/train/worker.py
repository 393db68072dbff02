"""`python -m lowbit_run.train.worker` is one rank of a run, which reads its configuration from standard input."""

from typing import Any

from lowbit_run.job.exit_codes import ALONE, DIVERGED, FAILED, USAGE
from lowbit_run.job.launch import work
from lowbit_run.job.stop import StoppedError


def _train(config: dict[str, Any]) -> None:
    from lowbit_run.train.config import from_mapping
    from lowbit_run.train.loop import train

    train(from_mapping(config))


def exit_code(error: Exception) -> int:
    """Return the exit code of an error, by which a supervisor decides whether another attempt can help."""
    from lowbit.wire.pytorch import TorchVersionError
    from lowbit_run.config import ConfigError
    from lowbit_run.job.peers import AbsentError
    from lowbit_run.job.process_group import AloneError
    from lowbit_run.train.checkpoints.save import TransientError
    from lowbit_run.train.trainer import DivergedError

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
