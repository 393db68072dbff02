"""`python -m lowbit.generate.worker` is one rank, which reads its settings from standard input."""

from typing import Any

from lowbit.job.launch import work
from lowbit.job.output import FAILED, USAGE


def _answer(order: dict[str, Any]) -> None:
    from lowbit.generate.launch import from_order
    from lowbit.generate.prepare import prepare
    from lowbit.generate.rank import answer
    from lowbit.job.process_group import world

    rank, ranks = world()
    answer(prepare(from_order(order), rank=rank, ranks=ranks))


def _exit_code(error: Exception) -> int:
    from lowbit.config import ConfigError

    return USAGE if isinstance(error, ConfigError) else FAILED


if __name__ == "__main__":
    work(_answer, _exit_code)
