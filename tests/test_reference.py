"""The reference pages are those of the commands, the settings and the public names as they are now."""

from typing import Any

import pytest

from docs.hooks.reference import FOLDER, pages
from lowbit.cli.app import COMMANDS, Group
from lowbit.config import settings_of
from lowbit.train import TrainConfig
from tests.test_import import PUBLIC

MADE = pages()
HELP = ("-h", "--help", "--help-all")


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_as_its_source(name: str):
    assert (FOLDER / name).read_text() == MADE[name], "the source has changed: make reference"


def test_no_page_is_left_over():
    assert {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("**/*.md")} == set(MADE)


def test_every_package_with_public_names_has_a_page():
    named = {module.rpartition(".")[2] for module, names in PUBLIC.items() if names}
    assert {f"api/{name}.md" for name in named} == {name for name in MADE if name.startswith("api/")}


def test_every_command_has_a_section_with_its_options():
    page = MADE["cli.md"]
    for name, command in commands(COMMANDS):
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert section, name
        if "All other options are those of" in section:
            continue
        for action in command.parser(name)._actions:
            for option in action.option_strings or [action.dest]:
                assert option in HELP or f"`{option}`" in section or f"`{option.upper()}`" in section, option


def test_every_key_of_a_configuration_is_explained():
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
