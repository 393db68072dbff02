"""CITATION.cff and CHANGELOG.md agree with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_names_this_version_licence_and_repository():
    assert CITATION["title"].startswith(PROJECT["name"])
    assert str(CITATION["version"]) == PROJECT["version"]
    assert CITATION["license"] == PROJECT["license"]
    assert CITATION.get("repository-code", "") == SETTINGS["tool"]["lowbit"]["repository"]


def test_the_page_cites_what_the_file_cites():
    page = (ROOT / "docs" / "citation.md").read_text().replace("{", "").replace("}", "")
    assert PROJECT["version"] in page
    for reference in CITATION["references"]:
        assert reference["title"] in page
        assert all(identifier["value"] in page for identifier in reference["identifiers"])


def test_the_changelog_begins_with_what_is_not_released():
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == "Unreleased"
    assert len(set(versions)) == len(versions)
