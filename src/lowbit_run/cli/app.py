"""The commands of `lowbit`, and groups of commands under one word."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata
from importlib.util import find_spec
from typing import Any

from lowbit.escape import suggestion
from lowbit_run.cli.commands import Config, Doctor, Export, Generate, MakeReport, Measurement, Train, extension
from lowbit_run.terminal import columns, examples_in_help, listed, wrapped


class Group:
    """Commands under one word, such as `lowbit bench`.

    Args:
        summary: one line about the group.
        commands: returns the commands by name; called only when a command or help is requested.
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
        """Hand the words to the command that the first word names; without words, show help.

        Raises:
            ValueError: no command has this name.
        """
        commands = self.commands()
        if not words or words[0] in ("--help", "-h", "help"):
            print("\n".join(self._help(program, commands)))
        elif words[0] in commands:
            commands[words[0]](f"{program} {words[0]}", words[1:])
        else:
            raise ValueError(f"{program} has no {words[0]!r}; {suggestion(words[0], commands)}")

    def _help(self, program: str, commands: Mapping[str, Any]) -> Iterator[str]:
        yield from (f"usage: {program} COMMAND [options]", "")
        yield from wrapped(self.summary, columns())
        yield from ("", "commands:")
        yield from listed((name, command.summary) for name, command in commands.items())
        if self.examples:
            yield from ("", *examples_in_help(self.examples))
        yield from ("", *self._ending())
        yield f"{program} COMMAND --help explains a command and shows examples."


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
    return ["where to begin:", *listed(steps)]


class _Missing:
    """A command of the laboratory, which this installation lacks."""

    summary = 'Not installed: pip install "lowbit[lab]".'
    examples: tuple[str, ...] = ()

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Raise ValueError."""
        raise ValueError(f'{program} is not installed; install it with: pip install "lowbit[lab]"')


_ORDER = ("demo", "train", "config", "doctor", "plan", "generate", "export", "calibrate", "evaluate", "report", "bench")


def _commands() -> dict[str, Any]:
    added = extension("commands")
    commands: dict[str, Any] = dict.fromkeys(_ORDER, _Missing())
    commands |= {
        "train": Train(),
        "config": Config(),
        "doctor": Doctor(),
        "plan": Group(
            "Plan the speed and the memory of a training run.",
            lambda: {  # importing lowbit_run.plan would import PyTorch
                "pipeline": Measurement("lowbit_run.plan.pipeline"),
                "memory": Measurement("lowbit_run.plan.memory"),
            },
            examples=(
                "lowbit plan pipeline cluster.toml --output run.toml",
                "lowbit plan memory --budget 24gb --model.layers 16",
            ),
        ),
        "generate": Generate(),
        "export": Export(),
        "report": MakeReport(),
    } | (added() if added else {})
    return commands


COMMANDS = Group(
    "Low-bit communication for distributed PyTorch training and inference.", _commands, ending=_where_to_begin
)
