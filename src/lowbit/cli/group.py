"""Group commands under one word, and choose one by the words of a command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lowbit.cli.text import columns, examples_in_help, listed, wrapped
from lowbit.terminal import suggestion


class CliCommand(Protocol):
    """A command of the command line."""

    @property
    def summary(self) -> str: ...  # one line for lists of commands

    @property
    def examples(self) -> tuple[str, ...]: ...  # whole command lines for its help

    def __call__(self, program: str, words: Sequence[str]) -> None:
        """Run the command; `words`: the command line after its name."""
        ...


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

    def _help(self, program: str, commands: Mapping[str, CliCommand]) -> Iterator[str]:
        yield from (f"usage: {program} COMMAND [options]", "")
        yield from wrapped(self.summary, columns())
        yield from ("", "commands:")
        yield from listed((name, command.summary) for name, command in commands.items())
        if self.examples:
            yield from ("", *examples_in_help(self.examples))
        yield from ("", *self._ending())
        yield f"{program} COMMAND --help explains a command and shows examples."
