"""Command-line options from a section: `--model.dim 128` for each of its fields, with complete help."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from lowbit.config import ConfigError, Setting, resolve, settings_of
from lowbit.config.files import in_toml
from lowbit.config.section import is_section
from lowbit.config.types import element_of, union_of

_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """Reads a command line into the text of a section's keys.

    A field is an option, `--warmup-steps`, or an argument if it has no default; a field of a section within it is
    `--pipeline.warmup_steps`, as in a file. A list is one option with commas, named in the singular: `links` is
    `--link 100mbit,1gbit`. A boolean is `--fast` or `--no-fast`. Dashes and underscores are the same.

    Args:
        program: what the command is called in its help.
        summary: what it does.
        settings: the section.
    """

    def __init__(self, program: str, summary: str, settings: type) -> None:
        super().__init__(
            prog=program,
            description=summary,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
        )
        self.settings = settings
        self.words: dict[str, str] = {}
        self._fields: list[str] = []
        self._add_section(settings, "", self)
        arguments = "".join(f" {action.metavar}" for action in self._get_positional_actions())
        self.usage = f"%(prog)s{arguments} [options]"

    def add_flag(self, option: str, value: str, *, dest: str, help: str) -> None:
        """Add an option that takes no value, or one behind "=", and stands for `value` without.

        Args:
            option: such as "--resume". dest: under which `read` returns the value. help: its meaning.
        """
        self.words[option] = f"{option}={value}"
        self.add_argument(option, dest=dest, metavar="", help=help)

    def read(self, words: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, Any]]:
        """The text of the section's keys that are given, and the values of other options.

        Raises:
            ConfigError: an unknown option (the closest known one is named), or one without its value.
        """
        known, unknown = self.parse_known_args(self._normalized(words))
        if unknown:
            self._refuse(unknown[0])
        given = vars(known)
        pairs = [(key, given.pop(key)) for key in self._fields if key in given]
        return pairs, given

    def resolve(self, words: Sequence[str]) -> tuple[Any, dict[str, Any]]:
        """The section that a command line means, and the values of other options.

        Raises:
            ConfigError: as `read` and `lowbit.config.resolve` do.
        """
        pairs, options = self.read(words)
        return resolve(self.settings, None, pairs), options

    def error(self, message: str) -> NoReturn:
        """Refuse a command line in one line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}; see {self.prog} --help")

    @property
    def options(self) -> list[argparse.Action]:
        """All options and arguments, with their help."""
        return [*self._actions]

    def _add_section(self, cls: Any, prefix: str, group: Any) -> None:
        settings = settings_of(cls)
        for setting in settings:
            if not is_section(setting.hint):
                self._add_setting(setting, prefix, group)
        for setting in settings:
            if is_section(setting.hint):
                key = f"{prefix}{setting.name}"
                about = _escape(setting.meaning or (setting.hint.__doc__ or "").partition("\n")[0])
                self._add_section(setting.hint, f"{key}.", self.add_argument_group(key, about))

    def _add_setting(self, setting: Setting, prefix: str, group: Any) -> None:
        key, help = f"{prefix}{setting.name}", _escape(_help(setting))
        self._fields.append(key)
        if setting.default is dataclasses.MISSING:
            group.add_argument(key, metavar=setting.name.upper(), help=help)
            return
        option = f"--{key}" if prefix else f"--{_word(setting)}"
        kinds = union_of(setting.hint)
        if bool in kinds:
            self.words[option] = f"{option}=true"
            negative = f"--{prefix}no-{_word(setting)}" if not prefix else f"--{prefix}no_{setting.name}"
            self.words[negative] = f"{option}=false"
            help = f"{help} (off: {negative})" if setting.default else help
        group.add_argument(option, dest=key, metavar=_metavar(setting), help=help)

    def _normalized(self, words: Sequence[str]) -> list[str]:
        """Words with options spelled as they are declared, and with the values that flags stand for."""
        options = [*self._option_string_actions, *self.words]
        spelled = {option.replace("_", "-"): option for option in options}
        normalized: list[str] = []
        for word in words:
            if word in ("true", "false") and normalized and normalized[-1] in self.words:
                normalized[-1] = f"{normalized[-1]}={word}"
                continue
            option, equals, value = word.partition("=")
            if option.startswith("--"):
                option = spelled.get(option.replace("_", "-"), option)
            normalized.append(option + equals + value)
        return [self.words.get(word, word) for word in normalized]

    def _refuse(self, word: str) -> NoReturn:
        option = word.partition("=")[0]
        if option == "--set":
            raise ConfigError("--set has been replaced; allowed: the key as an option, such as --run.steps 3")
        if not option.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        close = difflib.get_close_matches(option, self._option_string_actions, n=1)
        self.error(f"unknown option {option}" + (f"; did you mean {close[0]}?" if close else ""))


def _word(setting: Setting) -> str:
    """A field of the outermost section as an option: `link` for links, `boundary` for boundaries."""
    name = setting.name.rstrip("_")
    if element_of(setting.hint) is not None:
        name = re.sub(r"(?<=[^s])s$", "", re.sub(r"ies$", "y", name))
    return name.replace("_", "-")


def _metavar(setting: Setting) -> str:
    element = element_of(setting.hint)
    kinds = union_of(setting.hint if element is None else element)
    return "" if bool in kinds else _METAVARS.get(getattr(kinds[0], "__origin__", kinds[0]), "TEXT")


def _help(setting: Setting) -> str:
    notes = setting.allowed
    if setting.default not in (None, (), "", dataclasses.MISSING):
        notes += f"; default: {shown(setting.default)}"
    return f"{setting.meaning} [{notes}]"


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def shown(value: Any) -> str:
    """A value as one would write it on a command line."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return value if isinstance(value, str) else in_toml(value).strip('"')
