"""The commands of `lowbit`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata
from importlib.util import find_spec
from typing import Any

from lowbit.cli.doctor import Doctor
from lowbit.cli.extensions import extension
from lowbit.cli.group import Group
from lowbit.cli.report import MakeReport
from lowbit.cli.reports import Measurement
from lowbit.cli.text import listed
from lowbit.cli.train import Config, Train


def _where_to_begin() -> list[str]:
    steps = [
        ("lowbit demo", "see what low-bit messages gain over a slow link"),
        ("lowbit train --dry-run", "check a training run and print it"),
    ]
    with contextlib.suppress(PackageNotFoundError, KeyError):  # of a plain checkout on PYTHONPATH
        addresses = dict(each.split(", ", 1) for each in metadata("lowbit").get_all("Project-URL") or ())
        steps.append((addresses["Documentation"], "add lowbit to a training script of your own"))
    if find_spec("pydantic") is None:
        steps.insert(0, ('pip install "lowbit[lab]"', "install what the commands need"))
    return ["where to begin:", *listed(steps), "", "lowbit --version prints the version."]


class _Missing:
    """A command of the laboratory, which this installation lacks."""

    summary = 'Not installed: pip install "lowbit[lab]".'
    examples: tuple[str, ...] = ()

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Raise ValueError."""
        raise ValueError(f'{program} is not installed; install it with: pip install "lowbit[lab]"')


_ORDER = ("demo", "train", "config", "doctor", "plan", "calibrate", "evaluate", "report", "bench")


def _commands() -> dict[str, Any]:
    """Return the library's commands and those of the laboratory, by name."""
    added = extension("commands")
    commands: dict[str, Any] = dict.fromkeys(_ORDER, _Missing())
    commands |= {
        "train": Train(),
        "config": Config(),
        "doctor": Doctor(),
        "plan": Group(
            "Plan the speed and the memory of a training run.",
            lambda: {  # importing lowbit.plan would import PyTorch
                "pipeline": Measurement("lowbit.plan.pipeline"),
                "memory": Measurement("lowbit.plan.memory"),
            },
            examples=(
                "lowbit plan pipeline cluster.toml --output run.toml",
                "lowbit plan memory --budget 24gb --model.layers 16",
            ),
        ),
        "report": MakeReport(),
    } | (added() if added else {})
    return commands


COMMANDS = Group(
    "Low-bit communication for distributed PyTorch training and inference.", _commands, ending=_where_to_begin
)
