"""The commands, and the choice of one by the words of a command line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata
from importlib.util import find_spec
from typing import Any, Protocol

from lowbit.cli.doctor import Doctor
from lowbit.cli.errors import TRAIN
from lowbit.cli.report import MakeReport
from lowbit.cli.reports import Measurement, measurements
from lowbit.cli.text import columns, examples_in_help, listed, wrapped
from lowbit.cli.train import Config, Demo, Train


class Command(Protocol):
    """A command of the command line."""

    @property
    def summary(self) -> str:
        """One line for lists of commands."""
        ...

    @property
    def examples(self) -> tuple[str, ...]:
        """Whole command lines for its help."""
        ...

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Run it; `words`: the command line after its name."""
        ...


class Group:
    """Commands under one word, such as `lowbit bench`.

    Args:
        summary: one line about them.
        commands: returns them by name; called when one of them, or help, is asked for.
        examples: whole command lines for the help. ending: more lines for the end of the help.
    """

    def __init__(
        self,
        summary: str,
        commands: Callable[[], Mapping[str, Any]],
        *,
        examples: tuple[str, ...] = (),
        ending: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.summary, self.commands, self.examples, self._ending = summary, commands, examples, ending

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Hand the words to the command that the first names; show help if there is none.

        Raises:
            ValueError: there is no such command.
        """
        commands = self.commands()
        if not words or words[0] in ("--help", "-h", "help"):
            print("\n".join(self._help(program, commands)))
        elif words[0] in commands:
            commands[words[0]](f"{program} {words[0]}", words[1:])
        else:
            close = difflib.get_close_matches(words[0], commands, n=1)
            advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(commands)}"
            raise ValueError(f"{program} has no {words[0]!r}; {advice}")

    def _help(self, program: str, commands: Mapping[str, Command]) -> Iterator[str]:
        yield from (f"usage: {program} COMMAND [options]", "")
        yield from wrapped(self.summary, columns())
        yield from ("", "commands:")
        yield from listed((name, command.summary) for name, command in commands.items())
        if self.examples:
            yield from ("", *examples_in_help(self.examples))
        yield from ("", *self._ending())
        yield f"{program} COMMAND --help explains a command and shows examples."


def documentation() -> str:
    """Address of the documentation, as the installed package states it; empty if it states none."""
    try:
        addresses = metadata("lowbit").get_all("Project-URL") or ()
    except PackageNotFoundError:  # a plain checkout on PYTHONPATH
        return ""
    return dict(address.split(", ", 1) for address in addresses).get("Documentation", "")


def _where_to_begin() -> list[str]:
    steps = [
        ("lowbit demo", "see what low-bit messages gain over a slow link"),
        ("lowbit train --dry-run", "check a training run and print it"),
    ]
    if address := documentation():
        steps.append((address, "add lowbit to a training script of your own"))
    if find_spec("pydantic") is None:
        steps.insert(0, (f'pip install "lowbit[{TRAIN}]"', "install what the commands need"))
    return ["where to begin:", *listed(steps), "", "lowbit --version prints the version."]


COMMANDS = Group(
    "Low-bit communication for distributed PyTorch training and inference.",
    lambda: {
        "demo": Demo(),
        "train": Train(),
        "config": Config(),
        "doctor": Doctor(),
        "plan": Group(
            "Plan the speed and the memory of a training run.",
            lambda: {  # the package imports PyTorch
                "pipeline": Measurement("lowbit.plan.pipeline"),
                "memory": Measurement("lowbit.plan.memory"),
            },
            examples=(
                "lowbit plan pipeline cluster.toml --output run.toml",
                "lowbit plan memory --budget 24gb --model.layers 16",
            ),
        ),
        "calibrate": Measurement(
            "lowbit.evaluate.commands:CALIBRATE",
            "Calibrate a model for low-bit tensor-parallel inference.",
        ),
        "evaluate": Measurement(
            "lowbit.evaluate.commands:EVALUATE",
            "Measure perplexity and task scores of low-bit inference.",
        ),
        "report": MakeReport(),
        "bench": Group(
            "Measure speed, traffic, loss and memory.",
            partial(measurements, "lowbit.bench"),
            examples=("lowbit bench codecs", "lowbit bench pipeline --link 100mbit --png speed.png"),
        ),
    },
    ending=_where_to_begin,
)
