"""Pages of docs/reference/ from the commands, the sections and the public names: `make reference` writes them.

`tests/test_reference.py` compares the committed pages with these.
"""

import argparse
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowbit_run.cli.app import COMMANDS, Group
from lowbit_run.cli.parser import in_usage
from lowbit_run.config import Setting, settings_of
from lowbit_run.config.section import choices_of, element_of, in_toml, kind_of, range_of, union_of
from lowbit_run.train import TrainConfig

FOLDER = Path(__file__).parents[1] / "reference"
PACKAGES = Path(__file__).parents[2] / "src"
_TOML = {int: "integer", float: "float", bool: "boolean", str: "string"}


def pages() -> dict[str, str]:
    """Every page by its path below docs/reference/."""
    made = {"cli.md": command_line(), "configuration.md": configuration()}
    return made | {f"api/{name.rpartition('.')[2]}.md": package(name) for name in packages()}


def main() -> None:
    """Write the pages, and remove those of packages that are gone."""
    made = pages()
    for name, text in made.items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")
    for path in FOLDER.glob("**/*.md"):
        if path.relative_to(FOLDER).as_posix() not in made:
            path.unlink()


def packages() -> list[str]:
    """Every package with public names."""
    files = sorted(PACKAGES.glob("lowbit*/*/__init__.py"))
    names = ["lowbit", *(f"{file.parts[-3]}.{file.parts[-2]}" for file in files)]
    return [name for name in names if importlib.import_module(name).__all__]


def package(name: str) -> str:
    """The page of a package: its docstring and public names, filled in by mkdocstrings."""
    module = importlib.import_module(name)
    parts = [f"# {name}", f"::: {name}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false"]
    for public in sorted(module.__all__):
        # A function with the name of its module, as `lowbit_run.plan.in_flight`, is the module for mkdocstrings.
        if inspect.isroutine(getattr(module, public)) and getattr(module, public).__module__ == f"{name}.{public}":
            parts.append(f"::: {name}.{public}.{public}")
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """The page of all commands."""
    parts = [
        "# Command line",
        "`lowbit COMMAND --help` shows the options of a command, `--help-all` also those of the configuration, and "
        "`lowbit --version` the installed version. With "
        "`--traceback`, an error keeps its Python traceback. `python -m lowbit` is the same as `lowbit`.",
        "A list is given with commas (`--link 100mbit,1gbit`) or by repeating its option. Dashes and underscores are "
        "the same. An exit code of 2 means a wrong option, file or installation, 1 a run that failed.",
        "\n".join(f"- [`lowbit {name}`](#{_anchor(name)}): {_cell(command.summary)}" for name, command in _leaves()),
    ]
    shown: dict[type, str] = {}
    for name, command in _leaves():
        parts += _command(name, command, shown)
    return "\n\n".join(parts) + "\n"


def _leaves(group: Group = COMMANDS, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands().items():
        if isinstance(command, Group):
            yield from _leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _command(name: str, command: Any, shown: dict[type, str]) -> Iterator[str]:
    parser = command.parser(f"lowbit {name}")
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "help_all")}
    arguments = [action for action in actions.values() if not action.option_strings]
    usage = " ".join(in_usage(_name(action), action.nargs) for action in arguments)
    yield f"## lowbit {name}"
    yield _cell(parser.description or command.summary)
    yield f"```text\n{' '.join(filter(None, ('lowbit', name, usage, '[options]')))}\n```"
    if examples := getattr(command, "examples", ()):
        yield "```console\n" + "\n".join(examples) + "\n```"
    known = dict(_settings(parser.settings))
    own = [action for action in actions.values() if action.dest not in known]
    if own:
        yield _table(
            ("option", "meaning"),
            [(" ".join((_options(action), _metavar(action))).strip(), _cell(action.help or "")) for action in own],
        )
    if (earlier := shown.setdefault(parser.settings, name)) != name:
        yield f"All other options are those of [`lowbit {earlier}`](#{_anchor(earlier)})."
        return
    sections: dict[str, list[tuple[str, ...]]] = {}
    for key, setting in known.items():
        off = [flag for flag, means in parser._flags.items() if means.partition("=")[0] in actions[key].option_strings]
        off = [flag for flag in off if parser._flags[flag].endswith("=false")]
        option = ", ".join((_options(actions[key]), *(f"`{flag}`" for flag in off)))
        row = option, _cell(setting.meaning), _allowed(setting), _default(setting, _shown)
        sections.setdefault(key.rpartition(".")[0], []).append(row)
    for section, rows in sections.items():
        if section:
            yield f"`--{section}.*`: {_cell(_section(parser.settings, section).meaning)}"
        yield _table(("option", "meaning", "allowed", "default"), rows)


def configuration() -> str:
    """The page of all keys of a training configuration."""
    parts = [
        "# Configuration",
        "The keys of the TOML file that [`lowbit train`](cli.md#lowbit-train) and `lowbit config` read. What a file "
        "leaves out keeps its default. Every key is also an option, `--pipeline.forward int4`, which overrides the "
        "file. `lowbit config` prints a whole file with these explanations.",
        '```toml\n[data]\ntext = "my_texts"\n\n[pipeline]\nranks = 2\nforward = "transform"\n'
        "\n[run]\nsteps = 2000\n```",
    ]
    for section in settings_of(TrainConfig).values():
        rows = [
            (f"`{key}`", _cell(setting.meaning), _toml_type(setting.hint), _limits(setting), _default(setting, in_toml))
            for key, setting in settings_of(section.hint, section.default).items()
        ]
        parts += [f"## {section.name}", _cell(section.meaning)]
        parts.append(_table(("key", "meaning", "type", "limits", "default"), rows))
    return "\n\n".join(parts) + "\n"


def _settings(cls: Any, default: Any = dataclasses.MISSING, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Every setting of a section and of the sections in it, by key."""
    sections = []
    for name, setting in settings_of(cls, default).items():
        if setting.is_section:
            sections.append(setting)
        else:
            yield prefix + name, setting
    for setting in sections:
        yield from _settings(setting.hint, setting.default, f"{prefix}{setting.name}.")


def _section(cls: Any, key: str) -> Setting:
    name, _, rest = key.partition(".")
    setting = settings_of(cls)[name]
    return _section(setting.hint, rest) if rest else setting


def _toml_type(hint: Any) -> str:
    if (element := element_of(hint)) is not None:
        return f"{_toml_type(element)}, or array of them"
    kinds = [kind for kind in union_of(hint) if kind is not type(None)]
    return " or ".join(dict.fromkeys("string" if choices_of(kind) else _TOML.get(kind, "string") for kind in kinds))


def _limits(setting: Setting) -> str:
    values = [value for kind in union_of(setting.hint) for value in choices_of(kind)] or choices_of(setting.hint)
    return ", ".join(f"`{value}`" for value in values) or range_of(setting.hint)


def _allowed(setting: Setting) -> str:
    if choices_of(setting.hint):
        return _limits(setting)
    return _cell(", ".join(filter(None, (kind_of(setting.hint), range_of(setting.hint)))))


def _default(setting: Setting, notation: Any) -> str:
    if setting.default is dataclasses.MISSING:
        return "required"
    absent = setting.default in (None, (), "")
    return "" if absent else f"`{notation(setting.default)}`"


def _shown(value: Any) -> str:
    """A value in the notation of a command line."""
    return ",".join(map(_shown, value)) if isinstance(value, tuple) else in_toml(value).strip('"')


def _options(action: argparse.Action) -> str:
    return ", ".join(f"`{option}`" for option in action.option_strings) or f"`{_name(action)}`"


def _name(action: argparse.Action) -> str:
    return str(action.metavar or action.dest).upper()


def _metavar(action: argparse.Action) -> str:
    return f"`{action.metavar}`" if action.option_strings and action.metavar else ""


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _anchor(name: str) -> str:
    return f"lowbit {name}".replace(" ", "-")


def _cell(text: str) -> str:
    """Text of a docstring as Markdown that fits into a cell."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.replace("%%", "%").split()))
    plain = [re.sub(r"([*<|\[\]])", r"\\\1", part) if index % 2 == 0 else part for index, part in enumerate(parts)]
    return "".join(plain)


if __name__ == "__main__":
    main()
