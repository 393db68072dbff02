"""Help: where to begin, and for every option of every command what it means, what is allowed and its default."""

import dataclasses
import email.message
import importlib.metadata
import shlex
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import lowbit.cli.app
from benchmarks.__main__ import BENCHMARKS
from lowbit.cli.app import COMMANDS, Group
from lowbit.cli.parser import shown
from lowbit.config import Setting, settings_of
from tests.command_line import invoke


def every(command: Any, program: str) -> Iterator[tuple[str, Any]]:
    yield program, command
    if isinstance(command, Group):
        for name, each in command.commands().items():
            yield from every(each, f"{program} {name}")


COMMANDS_BY_NAME = {**dict(every(COMMANDS, "lowbit")), **dict(every(BENCHMARKS, "python -m benchmarks"))}
LEAVES = [name for name, command in COMMANDS_BY_NAME.items() if not isinstance(command, Group)]
ADDRESS = "https://lowbit.example/en/latest/"


def _settings(cls: Any, base: Any = dataclasses.MISSING) -> Iterator[Setting]:
    for setting in settings_of(cls, base).values():
        yield setting
        if setting.is_section:
            yield from _settings(setting.hint, setting.default)


def _in_one_line(text: str) -> str:
    """A text without its line breaks, which may come between words and after the commas of a list."""
    return " ".join(text.split()).replace(", ", ",")


def test_help_fits_a_screen_and_says_where_to_begin(monkeypatch: pytest.MonkeyPatch):
    installed = email.message.Message()
    installed["Project-URL"] = "Repository, https://lowbit.example/source"
    installed["Project-URL"] = f"Documentation, {ADDRESS}"
    monkeypatch.setattr(lowbit.cli.app, "metadata", {"lowbit": installed}.__getitem__)

    shown = invoke("--help", columns=80).stdout
    assert shown == invoke(columns=80).stdout == invoke("-h", columns=80).stdout == invoke("help", columns=80).stdout
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    beginning = shown.partition("where to begin:")[2]
    assert "lowbit demo " in beginning
    assert "lowbit train " in beginning
    assert ADDRESS in beginning


def test_a_plain_checkout_needs_no_installation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lowbit.cli.app, "metadata", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError))
    monkeypatch.setattr(lowbit.cli.app, "extension", lambda name: None)
    shown = invoke("--help").stdout
    assert "where to begin:" in shown
    assert "bench      Not installed" in shown
    outcome = invoke("bench", "codecs")
    assert outcome.exit_code == 2
    assert outcome.stderr == 'error: lowbit bench is not installed; install it with: pip install "lowbit[lab]"\n'


def test_help_says_all_of_every_option(monkeypatch: pytest.MonkeyPatch):
    """In words of its own, and the short help names at least its key."""
    monkeypatch.setenv("COLUMNS", "80")
    wrong: list[str] = []
    for name in LEAVES:
        parser = COMMANDS_BY_NAME[name].parser(name)
        full, brief = parser.format_help(), parser.format_help(full=False)
        words, short = _in_one_line(full), set(brief.replace(",", " ").split())
        for text in (full, brief):
            if max(map(len, text.splitlines())) > 80 or not all(f"  {e}\n" in text for e in parser.examples):
                wrong.append(name)
        for setting in _settings(parser.settings):
            told = _in_one_line(setting.meaning) in words
            sentence = setting.meaning.endswith((".", ").")) and not setting.meaning.startswith(("Of ", "As "))
            if not setting.is_section:
                given = setting.default not in (None, (), "", dataclasses.MISSING)
                expected = setting.explained(f"default: {shown(setting.default)}" if given else "")
                told = told and _in_one_line(expected).removesuffix("]") in words
            if not (told and (sentence or setting.name == "codecs")):
                wrong.append(f"{name} {setting.name}")
        for action in parser._actions:
            names = [*action.option_strings, action.dest.rpartition(".")[2], str(action.metavar)]
            if not action.help or not short & {each for n in names for each in (n, f"{n}[=auto]")}:
                wrong.append(f"{name} {action.dest}")
    assert wrong == []


def test_help_of_train_is_short():
    short = invoke("train", "--help", columns=80).stdout
    assert short.count("\n") <= 73
    assert "--help-all" in short
    assert "--optimizer.beta2 NUMBER" in invoke("train", "--help-all", columns=80).stdout


@pytest.mark.parametrize("program", COMMANDS_BY_NAME)
def test_every_example_is_shown_and_understood(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    command = COMMANDS_BY_NAME[program]
    assert command.examples or program == "lowbit", "which says where to begin instead"
    if isinstance(command, Group):
        monkeypatch.setenv("COLUMNS", "80")
        command(program, ["--help"])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert {f"  {example}" for example in command.examples} <= {*lines}
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
