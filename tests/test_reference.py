"""The reference pages are those of the commands, the settings and the public names as they are now.

And docs/troubleshooting.md has no entry for a message that is gone. A fragment is a code span in the heading of an
entry, or behind "Also:" below it; "..." in it stands for anything.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest

from docs.hooks.reference import FOLDER, pages
from lowbit_run.cli.app import COMMANDS, Group
from lowbit_run.config import settings_of
from lowbit_run.train import TrainConfig
from tests.test_import import PUBLIC

ROOT = Path(__file__).parents[1]
SOURCES, TROUBLES = ROOT / "src", (ROOT / "docs" / "troubleshooting.md").read_text()
ENTRY = re.compile(r"^### (?P<heading>.+)\n(?:Also: (?P<also>(?:.+\n)+))?\n(?P<body>(?:(?!##).*\n?)*)", re.M)
SPAN = re.compile(r"`([^`]+)`")
MADE = pages()
HELP = ("-h", "--help", "--help-all")


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_as_its_source(name: str):
    assert (FOLDER / name).read_text() == MADE[name], "the source has changed: make reference"


def test_no_page_is_left_over_and_every_package_with_public_names_has_one():
    assert {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("**/*.md")} == set(MADE)
    named = {module.rpartition(".")[2] for module, names in PUBLIC.items() if names}
    assert {f"api/{name}.md" for name in named} == {name for name in MADE if name.startswith("api/")}


def test_every_option_and_every_key_is_explained():
    page = MADE["cli.md"]
    for name, command in commands(COMMANDS):
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section, name
        if "All other options are those of" in section:
            continue
        for action in command.parser(name)._actions:
            for option in action.option_strings or [action.dest]:
                assert option in HELP or f"`{option}`" in section or f"`{option.upper()}`" in section, option
    page = MADE["configuration.md"]
    for section in settings_of(TrainConfig).values():
        rows = page.partition(f"\n## {section.name}\n")[2].partition("\n## ")[0]
        for key, setting in settings_of(section.hint).items():
            assert f"| `{key}` |" in rows, key
            assert setting.meaning, f"{section.name}.{key} has no docstring"


def commands(group: Group, prefix: str = "lowbit") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, command in group.commands().items():
        whole = f"{prefix} {name}"
        found += commands(command, whole) if isinstance(command, Group) else [(whole, command)]
    return found


def texts() -> list[str]:
    """Texts in the source; a NUL for what a run puts in."""
    found: list[str] = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.replace("%s", "\0").replace("%d", "\0"))
    return found


def test_every_fragment_of_a_message_is_in_the_source():
    corpus = "\n".join(texts())
    named = [part for entry in ENTRY.finditer(TROUBLES) for part in entry.group("heading", "also") if part]
    fragments = [span for part in named for span in SPAN.findall(part)]
    parts = {part.strip() for fragment in fragments for part in re.split(r"\.\.\.|[(),;:]", fragment)}
    assert [part for part in parts if part.removeprefix("or ") not in corpus] == []


def test_every_entry_says_what_to_do_and_every_group_is_listed():
    for entry in ENTRY.finditer(TROUBLES):
        if SPAN.search(entry["heading"]):
            assert re.search(r"\*\*Means:\*\* .+\*\*Do:\*\* ", entry["body"], re.S), entry["heading"]
    assert re.findall(r"^- \[(.+)\]\(#", TROUBLES, re.M) == re.findall(r"^## (.+)$", TROUBLES, re.M)


def test_every_error_is_caught_by_a_row_of_the_table():
    rows = re.findall(r"^\| (`[\w.]+`.*) \| .* \|$", TROUBLES.partition("## Classes of errors")[2], re.M)
    caught = tuple(locate(SPAN.findall(row)[0]) for row in rows)
    assert all(inspect.isclass(error) for error in caught), rows
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and node.name[0] != "_":
                module = ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
                assert issubclass(getattr(importlib.import_module(module), node.name), caught), node.name
