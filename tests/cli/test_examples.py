"""The examples in the help of every command are command lines that it understands."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS
from lowbit.cli.app import COMMANDS, Group


def every(command: Any, program: str) -> Iterator[tuple[str, Any]]:
    yield program, command
    if isinstance(command, Group):
        for name, each in command.commands().items():
            yield from every(each, f"{program} {name}")


EVERY = [*every(COMMANDS, "lowbit"), *every(BENCHMARKS, "python -m benchmarks")]


@pytest.mark.parametrize(("program", "command"), EVERY, ids=[program for program, _ in EVERY])
def test_every_example_is_understood(program: str, command: Any):
    assert isinstance(command.examples, tuple)
    assert command.examples or program == "lowbit", "which says where to begin instead"
    for example in command.examples:
        assert len(example) <= 76, "it fits a line of the help"
        words = shlex.split(example.removeprefix("torchrun --nproc-per-node 2 -m ").partition(" > ")[0])
        named = len(program.split())
        assert words[:named] == program.split()
        chosen, words = command, words[named:]
        while isinstance(chosen, Group):
            chosen, words = chosen.commands()[words[0]], words[1:]
        parser = chosen.parser(program)
        _, options = parser.read(words)
        if "config" not in options and "my_model" not in example:  # files of the reader's
            parser.resolve(words)
