"""The built site: every page is in the navigation, every link leads somewhere, every public name has its place.

And what the package index makes of the README: nothing is dropped, and every address holds outside the repository.
`make test-docs` builds the site first; `make test` leaves these tests out.
"""

import re
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.test_docs import ADDRESSES, ROOT
from tests.test_import import PUBLIC

renderer = pytest.importorskip("readme_renderer.markdown", reason="no readme_renderer: the extra lowbit[docs]")
pytest.importorskip("hatchling", reason="no hatchling: the extra lowbit[docs]")

from docs.hooks.package import CustomMetadataHook, description  # noqa: E402

SITE = ROOT / "site"
FILES = sorted(SITE.glob("**/*.html"))
README = (ROOT / "README.md").read_text()
REPOSITORY = "https://example.org/owner/lowbit"
pytestmark = [pytest.mark.docs, pytest.mark.skipif(not FILES, reason="there is no site/: make docs")]


@dataclass
class Found(HTMLParser):
    """What a page refers to and what can be referred to in it."""

    links: list[str] = field(default_factory=list)
    assets: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    paragraphs: list[str] = field(default_factory=list)
    navigation: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._text: list[str] | None = None
        self._code = self._article = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            if "md-nav__link" in given.get("class", ""):
                self.navigation.append(given["href"])
        elif tag != "a":
            self.assets += [
                given[name] for name in ("src", "href") if given.get(name) and given.get("rel") != "canonical"
            ]
            self.assets += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        self._article += tag == "article"
        if tag in ("p", "td", "li") and self._article:
            self._text = []
        self._code += tag in ("code", "pre", "script", "style", "math")

    def handle_endtag(self, tag: str) -> None:
        self._article -= tag == "article"
        self._code -= tag in ("code", "pre", "script", "style", "math")
        if tag in ("p", "td", "li") and self._text is not None:
            self.paragraphs.append("".join(self._text))
            self._text = None

    def handle_data(self, data: str) -> None:
        if self._text is not None and not self._code:
            self._text.append(data)


def parsed(text: str) -> Found:
    page = Found()
    page.feed(text)
    return page


PAGES = {file.relative_to(SITE).as_posix(): parsed(file.read_text(encoding="utf-8")) for file in FILES}


def test_links_and_their_anchors_exist_and_nothing_is_loaded_from_elsewhere():
    for name, page in PAGES.items():
        assert [link for link in (*page.links, *page.assets) if not leads_somewhere(link, name)] == [], name
        assert [asset for asset in page.assets if urlsplit(asset).netloc] == [], name


def test_markdown_has_become_html():
    """Lists without an empty line before them, tables that are none, marks of references that lead nowhere."""
    left = re.compile(r"\n\s*([-*+]|\d+\.) |\n\s*\||```|\]\[|\]\(|^::: |\*\*|\[!")
    assert [(name, text) for name, page in PAGES.items() for text in page.paragraphs if left.search(text)] == []


def test_every_page_is_on_the_site_and_in_the_navigation():
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")}
    at_root = {name for name in ("contributing", "changelog") if (ROOT / f"{name.upper()}.md").exists()}
    assert pages | {"index.html", *(f"{name}.html" for name in at_root)} == set(PAGES) - {"404.html"}
    listed = {link.partition("#")[0] for link in PAGES["index.html"].navigation}
    assert set(PAGES) - {"404.html"} <= {link if link != "." else "index.html" for link in listed}


def test_every_public_name_has_a_place_in_the_reference_and_the_search():
    inventory = zlib.decompress((SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    places = {line.split()[0]: line.split()[3] for line in inventory.splitlines()}
    for package, names in PUBLIC.items():
        for name in names.split():
            page, anchor = places[f"{package}.{name}"].replace("$", f"{package}.{name}").split("#")
            assert anchor in PAGES[page].anchors
            assert page.startswith("reference/api/")
    index = (SITE / "search/search_index.json").read_text(encoding="utf-8")
    assert all(name in index for name in ("LowBitStage", "warmup_steps"))


def test_a_wrong_address_leads_home():
    missing = (SITE / "404.html").read_text(encoding="utf-8")
    assert re.search(r'This page does not exist</h1>\s*<p>.+<a href="[^"]*index\.html">', missing)


def leads_somewhere(link: str, name: str) -> bool:
    """Whether a link of a page leads to a file of the site and an anchor in it, or has the form of an address."""
    parts = urlsplit(link)
    if parts.scheme:
        return parts.scheme in ("https", "mailto", "data", "http") and (bool(parts.netloc) or parts.scheme != "https")
    if name == "404.html":  # its links are absolute, below the address of the site
        return True
    file = (SITE / name).parent / unquote(parts.path) if parts.path else SITE / name
    if file.is_dir():
        file = file / "index.html"
    if not file.resolve().is_file():
        return False
    page = PAGES.get(file.resolve().relative_to(SITE).as_posix())
    return not parts.fragment or page is None or unquote(parts.fragment) in page.anchors


def test_addresses_of_the_project_are_those_of_pyproject():
    ours = [
        link
        for page in PAGES.values()
        for link in page.links
        if "lowbit" in urlsplit(link).path + urlsplit(link).netloc
    ]
    allowed = tuple(filter(None, ADDRESSES.values()))
    assert [link for link in ours if urlsplit(link).netloc and not link.startswith(allowed)] == []
    metadata: dict[str, Any] = {}
    CustomMetadataHook(str(ROOT), {}).update(metadata)
    assert metadata["urls"] == {name.capitalize(): address for name, address in ADDRESSES.items() if address}
    assert metadata["readme"]["text"] == description(README, ADDRESSES["repository"])


def test_the_package_index_drops_nothing_of_the_readme():
    text = description(README, REPOSITORY)
    html = renderer.render(text)
    page = parsed(html)
    assert len(page.assets) == len(re.findall(r"!\[|<img\b", README))
    assert html.count("<table") == len(re.findall(r"^\|[-| :]+\|$", README, re.M))
    assert html.count("<pre") == len(re.findall(r"^```", README, re.M)) // 2
    assert "<picture" not in text


@pytest.mark.parametrize("repository", [REPOSITORY, ""])
def test_the_package_index_names_files_by_their_address_in_the_repository(repository: str):
    page = parsed(renderer.render(description(README, repository)))
    addresses = [*page.links, *page.assets]
    assert any(address.startswith("https://arxiv.org/") for address in addresses)
    assert [address for address in addresses if not re.match(r"https://|#", address)] == []
    named = re.findall(rf"{REPOSITORY}/(?:blob|raw)/main/([^#\s]+)", "\n".join(addresses))
    assert bool(named) == bool(repository)
    assert [path for path in named if not (ROOT / path).exists()] == []
