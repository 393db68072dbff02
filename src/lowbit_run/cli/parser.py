"""Make command-line options from a section: one for each field, such as `--model.dim 128`, with complete help."""

import argparse
import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from lowbit_run.config import ConfigError, Setting, resolve, settings_of
from lowbit_run.config.section import choices_of, element_of, in_toml, union_of
from lowbit_run.terminal import examples_in_help, listed, wrapped

_METAVARS = {int: "INTEGER", float: "NUMBER"}


class Parser(argparse.ArgumentParser):
    """Reads a section from a command line.

    A field is an option such as `--warmup-steps`, or an argument if it has no default; a field of a nested section is
    `--pipeline.warmup_steps`, as in a file. A list option has a singular name, and takes commas or is repeated: `links`
    is `--link 100mbit,1gbit`. A boolean is `--fast` or `--no-fast`. Dashes and underscores are interchangeable.

    Args:
        program: name of the command in its help. summary: what it does. settings: the section.
        short: short options, such as "--ranks", by key, such as "pipeline.ranks"; help shows them first.
        common: other keys that help shows first.
        arguments: keys that become optional arguments instead of options.
        examples: whole command lines for the help.
    """

    def __init__(
        self,
        program: str,
        summary: str,
        settings: type,
        *,
        short: Mapping[str, str] = MappingProxyType({}),
        common: Sequence[str] = (),
        arguments: Sequence[str] = (),
        examples: Sequence[str] = (),
    ) -> None:
        super().__init__(
            prog=program,
            description=summary,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_Formatter,
            add_help=False,
        )
        self._positionals.title = "arguments"
        self.settings, self.examples = settings, tuple(examples)
        self._short, self._common, self._arguments = short, {*short, *common}, arguments
        self._keys: list[str] = []
        self._flags: dict[str, str] = {}  # the option and value that a flag stands for
        self._sections: dict[str, Any] = {}  # groups of options by section
        self._add_settings(settings_of(settings), "", self)
        self.add_argument("-h", "--help", action=_ShowHelp, full=False, help="Show this help.")
        if self._sections:
            self.add_argument("--help-all", action=_ShowHelp, full=True, help="Show all options, with their meanings.")

    def format_help(self, *, full: bool = True) -> str:
        """Return help with all options, or with only the names of those of sections within the section."""
        groups = [group for group in self._action_groups if full or group not in self._sections.values()]
        sections = [] if full else [
            (f"--{section}.", ", ".join(action.dest.removeprefix(f"{section}.") for action in group._group_actions))
            for section, group in self._sections.items()
        ]  # fmt: skip
        formatter = self._get_formatter()
        arguments = (in_usage(str(action.metavar), action.nargs) for action in self._get_positional_actions())
        usage = " ".join(["%(prog)s", *arguments, "[options]"])
        formatter.add_usage(usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.add_text("\n".join(examples_in_help(self.examples)))
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        if sections:
            some = next(group._group_actions[0].dest for group in self._sections.values() if group._group_actions)
            heading = f"more options, such as --{some}; --help-all explains them:"
            formatter.add_text("\n".join([heading, *listed(sections)]))
        return formatter.format_help()

    def read(self, words: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, Any]]:
        """Return the section's keys in the words with their text, and the values of other options.

        Raises:
            ConfigError: an unknown option (the closest valid one is named), or one without its value.
        """
        known, unknown = self.parse_known_args(self._with_values(words))
        if unknown:
            option = unknown[0].partition("=")[0]
            if not option.startswith("-"):
                self.error(f"unexpected argument {unknown[0]!r}")
            names = {name.lstrip("-"): name for name in self._option_string_actions}  # dashes make all names alike
            close = difflib.get_close_matches(option.lstrip("-"), names, n=1)
            self.error(f"unknown option {option}" + (f"; did you mean {names[close[0]]}?" if close else ""))
        options = vars(known)
        stated = [(key, options.pop(key)) for key in self._keys if key in options]
        return [(key, ",".join(text) if isinstance(text, list) else text) for key, text in stated], options

    def resolve(self, words: Sequence[str], file: str | None = None) -> tuple[Any, dict[str, Any]]:
        """Build the section from a command line; also return the values of other options.

        Args:
            file: option or argument that names a TOML file, whose values the command line overrides.

        Raises:
            ConfigError: as `read` and `lowbit_run.config.resolve` do.
        """
        stated, options = self.read(words)
        return resolve(self.settings, options.get(file) if file else None, stated), options

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError: a command line is refused in one line."""
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _add_settings(self, settings: Mapping[str, Setting], prefix: str, group: Any) -> None:
        for setting in settings.values():
            if not setting.is_section:
                self._add_setting(setting, prefix, group)
        for setting in settings.values():
            if setting.is_section:
                key = f"{prefix}{setting.name}"
                within = settings_of(setting.hint, setting.default)
                self._sections[key] = self.add_argument_group(key, setting.meaning)
                self._add_settings(within, f"{key}.", self._sections[key])

    def _add_setting(self, setting: Setting, prefix: str, group: Any) -> None:
        key, notes = f"{prefix}{setting.name}", []
        self._keys.append(key)
        if setting.default is dataclasses.MISSING:
            group.add_argument(key, metavar=setting.name.upper(), help=_help(setting))
            return
        if key in self._arguments:
            group.add_argument(key, metavar=setting.name.upper(), nargs="?", help=_help(setting))
            return
        names = [setting.name if prefix else _word(setting)]
        options = [f"--{prefix}{names[0]}"]
        if key in self._short:
            options.insert(0, self._short[key])
        if key in self._common:
            group = self
        if bool in union_of(setting.hint):
            self._flags |= dict.fromkeys(options, f"{options[0]}=true")
            no = f"--{prefix}no_{setting.name}" if prefix else f"--no-{names[0]}"
            self._flags[no] = f"{options[0]}=false"
            notes = [] if setting.default is False else [f"off: {no}"]
        action = "store" if element_of(setting.hint) is None else "append"
        group.add_argument(*options, dest=key, metavar=_metavar(setting), action=action, help=_help(setting, *notes))

    def _with_values(self, words: Sequence[str]) -> list[str]:
        """Spell options as declared, and replace flags by options with values."""
        options = {name.replace("_", "-"): name for name in (*self._option_string_actions, *self._flags)}
        spelled: list[str] = []
        for word in words:
            if word in ("true", "false") and spelled and spelled[-1] in self._flags:
                spelled[-1] += f"={word}"
                continue
            if re.match(r"-\.?\d", word) and spelled and spelled[-1] in self._option_string_actions:
                spelled[-1] += f"={word}"  # a negative value, such as -25mbit, which argparse would take for an option
                continue
            option, equals, value = word.partition("=")
            spelled.append(options.get(option.replace("_", "-"), option) + equals + value)
        return [self._flags.get(word, word) for word in spelled]


class _ShowHelp(argparse.Action):
    """Print help, short or full, and exit."""

    def __init__(self, *args: Any, full: bool, **kwargs: Any) -> None:
        super().__init__(*args, nargs=0, **kwargs)
        self._full = full

    def __call__(self, parser: Any, *unused: Any) -> None:
        print(parser.format_help(full=self._full), end="")
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """Breaks lines between words only, and keeps indented lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = [[line] if line.startswith(" ") else wrapped(line, width - len(indent)) for line in text.splitlines()]
        return "\n".join(indent + part for line in lines for part in line)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Format `--ranks, --pipeline.ranks INTEGER`, with the value only once."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = str(action.metavar or "")
        return ", ".join(action.option_strings) + (value if value.startswith("[") else f" {value}".rstrip())


def in_usage(name: str, count: int | str | None) -> str:
    """Format a positional argument for the usage line; `count`: argparse's `nargs`."""
    return {"?": f"[{name}]", "+": f"{name} [{name} ...]"}.get(str(count), name)


def _word(setting: Setting) -> str:
    """Name a field of the outermost section as an option: `link` for links, `boundary` for boundaries."""
    name = setting.name.rstrip("_")
    if element_of(setting.hint) is not None:
        name = re.sub(r"(?<=[^s])s$", "", re.sub(r"ies$", "y", name))
    return name.replace("_", "-")


def _metavar(setting: Setting) -> str:
    element = element_of(setting.hint)
    kinds = union_of(setting.hint if element is None else element)
    if bool in kinds:
        return "".join(f"[={choice}]" for kind in kinds for choice in choices_of(kind))
    kind = type(typing.get_args(kinds[0])[0]) if typing.get_origin(kinds[0]) is Literal else kinds[0]
    word = kind.__name__.upper() if hasattr(kind, "parse") else _METAVARS.get(kind, "TEXT")
    return word if element is None else f"{word},..."


def _help(setting: Setting, *more: str) -> str:
    has_default = setting.default not in (None, (), "", dataclasses.MISSING)
    text = setting.explained(f"default: {shown(setting.default)}" if has_default else "", *more)
    return text.replace("%", "%%")  # argparse formats it


def shown(value: Any) -> str:
    """Format a value as on a command line."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return value if isinstance(value, str) else in_toml(value).strip('"')
