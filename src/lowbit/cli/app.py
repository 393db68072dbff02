"""The commands, and which one a command line means."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Protocol

from lowbit import __version__
from lowbit.cli.reports import BENCHMARKS, CALIBRATE, EVALUATE, PLANS
from lowbit.cli.train import CONFIG, DEMO, TRAIN


class Command(Protocol):
    """What a word of the command line stands for."""

    @property
    def summary(self) -> str:
        """What it does, for help."""
        ...

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Do as the words behind its own say."""
        ...


class Group:
    """Commands under one word, such as `lowbit bench`."""

    def __init__(self, summary: str, commands: Mapping[str, Command]) -> None:
        self.summary, self.commands = summary, commands

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Hand the words to the command that the first names; show help if there is none.

        Raises:
            ValueError: there is no such command.
        """
        if not words or words[0] in ("--help", "-h"):
            print(self.help(program))
        elif words[0] not in self.commands:
            close = difflib.get_close_matches(words[0], self.commands, n=1)
            advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(self.commands)}"
            raise ValueError(f"{program} has no {words[0]!r}; {advice}")
        else:
            self.commands[words[0]](f"{program} {words[0]}", words[1:])

    def help(self, program: str) -> str:
        """The commands with their summaries."""
        wide = shutil.get_terminal_size().columns
        lines = [f"usage: {program} COMMAND [options]", "", *textwrap.wrap(self.summary, wide), "", "commands:"]
        for name, command in self.commands.items():
            lines += textwrap.wrap(command.summary, wide, initial_indent=f"  {name:<16} ", subsequent_indent=" " * 19)
        return "\n".join([*lines, "", f"Each has its own help: {program} COMMAND --help"])


COMMANDS = Group(
    "Train and run models on several ranks that send each other few bits.",
    {
        "train": TRAIN,
        "config": CONFIG,
        "calibrate": CALIBRATE,
        "evaluate": EVALUATE,
        "bench": Group(
            "Measure speed over slow links, the codecs themselves, what they cost in loss, and memory.", BENCHMARKS
        ),
        "plan": Group("Work out a run before it is started: the memory of its devices.", PLANS),
        "demo": DEMO,
    },
)


def run(program: str, words: Sequence[str]) -> None:
    """Do what a command line says."""
    if words and words[0] == "--version":
        print(f"lowbit {__version__}")
    else:
        COMMANDS(program, words)
