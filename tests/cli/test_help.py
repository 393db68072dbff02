"""Help: where to begin, and for every option of every command what it means, what is allowed and its default."""

from __future__ import annotations

import dataclasses
import email.message
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest

import lowbit.cli.app
from benchmarks.__main__ import BENCHMARKS
from lowbit.cli.app import COMMANDS
from lowbit.cli.group import Group
from lowbit.cli.parser import Parser, shown
from lowbit.config import Setting, settings_of
from tests.cli.test_examples import every
from tests.command_line import Outcome, invoke

COMMANDS_BY_NAME = {**dict(every(COMMANDS, "lowbit")), **dict(every(BENCHMARKS, "python -m benchmarks"))}
GROUPS = [name for name, command in COMMANDS_BY_NAME.items() if isinstance(command, Group)]
LEAVES = [name for name in COMMANDS_BY_NAME if name not in GROUPS]
ADDRESS = "https://lowbit.example/en/latest/"


def _settings(cls: Any, base: Any = dataclasses.MISSING) -> Iterator[Setting]:
    for setting in settings_of(cls, base).values():
        yield setting
        if setting.is_section:
            yield from _settings(setting.hint, setting.default)


def _in_one_line(text: str) -> str:
    """A text without its line breaks, which may come between words and after the commas of a list."""
    return " ".join(text.split()).replace(", ", ",")


def _parser(name: str) -> Parser:
    return COMMANDS_BY_NAME[name].parser(name)


@pytest.fixture
def _address(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = email.message.Message()
    installed["Project-URL"] = "Repository, https://lowbit.example/source"
    installed["Project-URL"] = f"Documentation, {ADDRESS}"
    monkeypatch.setattr(lowbit.cli.app, "metadata", {"lowbit": installed}.__getitem__)


@pytest.mark.usefixtures("_address")
def test_help_fits_a_screen_and_says_where_to_begin():
    shown = invoke("--help", columns=80).stdout
    assert shown == invoke(columns=80).stdout == invoke("-h", columns=80).stdout == invoke("help", columns=80).stdout
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    beginning = shown.partition("where to begin:")[2]
    assert "lowbit demo " in beginning
    assert "lowbit train " in beginning
    assert ADDRESS in beginning


def test_help_needs_no_installation(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(lowbit.cli.app, "metadata", missing)
    assert "where to begin:" in invoke("--help").stdout


@pytest.mark.parametrize("name", GROUPS)
def test_help_of_a_group_fits_a_terminal(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    monkeypatch.setenv("COLUMNS", "80")
    COMMANDS_BY_NAME[name](name, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert name == "lowbit" or "examples:" in lines


@pytest.mark.parametrize("name", LEAVES)
def test_help_says_all_of_every_option(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = _parser(name)
    full = parser.format_help()
    for text in (full, parser.format_short_help()):
        assert max(map(len, text.splitlines())) <= 80
        assert all(f"  {example}\n" in text for example in parser.examples)
    words = _in_one_line(full)
    for setting in _settings(parser.settings):
        assert _in_one_line(setting.meaning) in words, setting.name
        if not setting.is_section:
            given = setting.default not in (None, (), "", dataclasses.MISSING)
            expected = setting.explained(f"default: {shown(setting.default)}" if given else "")
            assert _in_one_line(expected).removesuffix("]") in words, setting.name
    assert all(action.help for action in parser._actions)


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_is_shown_or_named_in_short_help(name: str):
    parser = _parser(name)
    short = set(parser.format_short_help().replace(",", " ").split())
    for action in parser._actions:
        names = [*action.option_strings, action.dest.rpartition(".")[2], str(action.metavar)]
        assert short & {each for option in names for each in (option, f"{option}[=auto]")}, action.dest


@pytest.mark.parametrize("name", LEAVES)
def test_every_setting_has_a_meaning(name: str):
    for setting in _settings(_parser(name).settings):
        assert setting.meaning.endswith((".", ").")), setting.name
        assert not setting.meaning.startswith(("Of ", "As ")) or setting.name == "codecs", "a sentence of its own"


def test_help_of_train_is_short():
    def lines(outcome: Outcome) -> int:
        return outcome.stdout.count("\n")

    assert lines(invoke("train", "--help", columns=80)) <= 70
    assert "--help-all" in invoke("train", "--help", columns=80).stdout
    assert "--optimizer.beta2 NUMBER" in invoke("train", "--help-all", columns=80).stdout
