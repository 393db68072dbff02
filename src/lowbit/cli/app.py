"""The commands, and the choice of one by the words of a command line."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from lowbit.cli.reports import Measurement, measurements
from lowbit.cli.train import Config, Demo, Train


class Command(Protocol):
    """A command of the command line."""

    @property
    def summary(self) -> str:
        """One line for lists of commands."""
        ...

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Run it; `words`: the command line after its name."""
        ...


class Group:
    """Commands under one word, such as `lowbit bench`.

    Args:
        summary: one line about them.
        commands: returns them by name; called when one of them, or help, is asked for.
    """

    def __init__(self, summary: str, commands: Callable[[], Mapping[str, Any]]) -> None:
        self.summary, self.commands = summary, commands

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Hand the words to the command that the first names; show help if there is none.

        Raises:
            ValueError: there is no such command.
        """
        commands = self.commands()
        if not words or words[0] in ("--help", "-h"):
            print(self._help(program, commands))
        elif words[0] in commands:
            commands[words[0]](f"{program} {words[0]}", words[1:])
        else:
            close = difflib.get_close_matches(words[0], commands, n=1)
            advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(commands)}"
            raise ValueError(f"{program} has no {words[0]!r}; {advice}")

    def _help(self, program: str, commands: Mapping[str, Command]) -> str:
        width = shutil.get_terminal_size().columns
        lines = [f"usage: {program} COMMAND [options]", "", *textwrap.wrap(self.summary, width), "", "commands:"]
        for name, command in commands.items():
            first, rest = f"  {name:<16} ", " " * 19
            lines += textwrap.wrap(command.summary, width, initial_indent=first, subsequent_indent=rest)
        return "\n".join([*lines, "", f"Each has its own help: {program} COMMAND --help"])


COMMANDS = Group(
    "Train and run models on several ranks that send each other few bits.",
    lambda: {
        "train": Train(),
        "config": Config(),
        "calibrate": Measurement(
            "lowbit.evaluate.commands:CALIBRATE",
            "Measure the ranges of a model's tensor-parallel sums once, so that they can be sent in 4.2 bits.",
        ),
        "evaluate": Measurement(
            "lowbit.evaluate.commands:EVALUATE",
            "Perplexity and zero-shot scores of a model whose tensor-parallel sums travel in few bits.",
        ),
        "bench": Group(
            "Measure speed over slow links, the codecs themselves, what they cost in loss, and memory.",
            partial(measurements, "lowbit.bench"),
        ),
        "plan": Group(
            "Work out a run before it is started: the memory of its devices.",
            lambda: {"memory": Measurement("lowbit.plan.memory")},  # its package imports PyTorch
        ),
        "demo": Demo(),
    },
)
