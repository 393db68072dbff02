"""What the package index makes of the README: nothing is dropped, and every address holds outside the repository."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.test_docs import ADDRESSES, ROOT

renderer = pytest.importorskip("readme_renderer.markdown", reason="no readme_renderer: the extra lowbit[docs]")
pytest.importorskip("hatchling", reason="no hatchling: the extra lowbit[docs]")
pytestmark = pytest.mark.docs

from docs.hooks.package import CustomMetadataHook, description  # noqa: E402


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


README = (ROOT / "README.md").read_text()
REPOSITORY = "https://example.org/owner/lowbit"


def test_nothing_is_dropped():
    text = description(README, REPOSITORY)
    html = renderer.render(text)
    assert html is not None
    assert len(Found(html).images) == len(re.findall(r"!\[|<img\b", README))
    assert html.count("<table") == len(re.findall(r"^\|[-| :]+\|$", README, re.M))
    assert html.count("<pre") == len(re.findall(r"^```", README, re.M)) // 2
    assert "<picture" not in text


def test_files_are_named_by_their_address_in_the_repository():
    page = Found(renderer.render(description(README, REPOSITORY)))
    addresses = [*page.links, *page.images]
    assert not [address for address in addresses if not re.match(r"https://|#", address)]
    named = re.findall(rf"{REPOSITORY}/(?:blob|raw)/main/([^#\s]+)", "\n".join(addresses))
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def test_without_a_repository_no_file_is_linked():
    page = Found(renderer.render(description(README, "")))
    addresses = [*page.links, *page.images]
    assert any(address.startswith("https://arxiv.org/") for address in addresses)
    assert not [address for address in addresses if not re.match(r"https://|#", address)]


def test_the_package_states_the_addresses_of_the_project():
    metadata: dict[str, Any] = {}
    CustomMetadataHook(str(ROOT), {}).update(metadata)
    assert metadata["urls"] == {name.capitalize(): address for name, address in ADDRESSES.items() if address}
    assert metadata["readme"]["text"] == description(README, ADDRESSES["repository"])
