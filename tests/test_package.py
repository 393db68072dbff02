"""What the package index makes of the README: nothing is dropped, and every address holds outside the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.test_docs import PROJECT, ROOT

renderer = pytest.importorskip("readme_renderer.markdown", reason="no readme_renderer: the extra lowbit[docs]")
pytestmark = pytest.mark.docs


class Found(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            self.images.append(given.get("src") or "")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")


@pytest.fixture(scope="module")
def description() -> str:
    command = [sys.executable, "-m", "hatch_fancy_pypi_readme"]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, capture_output=True).stdout


def test_nothing_is_dropped(description: str):
    readme = (ROOT / "README.md").read_text()
    html = renderer.render(description)
    assert html is not None
    images = len(re.findall(r"!\[|<img\b", readme))
    assert len(Found(html).images) == images
    assert html.count("<table") == len(re.findall(r"^\|[-| :]+\|$", readme, re.M))
    assert html.count("<pre") == len(re.findall(r"^```", readme, re.M)) // 2
    assert "<picture" not in description


def test_addresses_hold_outside_the_repository(description: str):
    page = Found(renderer.render(description))
    relative = [link for link in (*page.links, *page.images) if not re.match(r"https://|#", link)]
    assert not relative


def test_what_the_addresses_name_is_in_the_repository(description: str):
    ours = re.escape(PROJECT["urls"]["Source"].removeprefix("https://github.com/"))
    paths = re.findall(
        rf"https://(?:github\.com/{ours}/blob|raw\.githubusercontent\.com/{ours})/main/([^)\s\"#]+)", description
    )
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
