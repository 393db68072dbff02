"""`python -m lowbit_run.generate.worker` is one rank, which reads its settings from standard input."""

from typing import Any

from lowbit_run.job.exit_codes import FAILED, USAGE
from lowbit_run.job.launch import work


def _answer(order: dict[str, Any]) -> None:
    from lowbit_run.generate.launch import from_order
    from lowbit_run.generate.prepare import prepare
    from lowbit_run.generate.rank import answer
    from lowbit_run.job.process_group import world

    rank, ranks = world()
    answer(prepare(from_order(order), rank=rank, ranks=ranks))


def _exit_code(error: Exception) -> int:
    from lowbit_run.config import ConfigError

    return USAGE if isinstance(error, ConfigError) else FAILED


if __name__ == "__main__":
    work(_answer, _exit_code)
