"""Start the ranks that answer: this process as one of a launched environment, or several on this machine."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowbit_run.config import ConfigError, build
from lowbit_run.generate.settings import GenerateSettings

_GRACE_SECONDS = 5.0


def run(settings: GenerateSettings) -> None:
    """Answer, or score, according to the settings and the environment; rank 0 prints.

    Raises:
        ConfigError: (before ranks meet) the settings cannot work.
        LaunchError: a local rank failed or a signal asked for the end; all ranks have ended.
        AgreementError, PeerError: if this process is a rank, as `lowbit_run.train.train`.
    """
    from lowbit.wire.pytorch import check_torch
    from lowbit_run.job.process_group import is_launched, open_store, world

    launched = is_launched()
    rank, ranks = world() if launched else (0, settings.ranks)
    if rank == 0:
        settings = _with_prompt(settings)
    if not launched:
        check_torch()
    if launched or ranks == 1:
        from lowbit_run.generate.prepare import prepare
        from lowbit_run.generate.rank import answer

        open_store()
        return answer(prepare(settings, rank=rank, ranks=ranks))
    from lowbit_run.job.launch import RankProgram, start_all
    from lowbit_run.train.device import threads_per_rank

    program = RankProgram(
        module="lowbit_run.generate.worker", order=json.dumps(dataclasses.asdict(settings)),
        timeout=settings.timeout_seconds, threads=settings.threads or threads_per_rank(ranks), grace=_GRACE_SECONDS,
    )  # fmt: skip
    start_all(program, ranks)


def from_order(order: Mapping[str, Any]) -> GenerateSettings:
    """Read what the launcher sends to a rank."""
    return build(GenerateSettings, order)


def _with_prompt(settings: GenerateSettings) -> GenerateSettings:
    if settings.prompt or settings.prompts or settings.score:
        return settings
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("prompt, prompts and score are empty; allowed: one of them, or a prompt on standard input")
    text = sys.stdin.read().rstrip("\n")
    if not text.strip():
        raise ConfigError("prompt is empty on standard input; allowed: text that is not empty")
    return replace(settings, prompt=text)
