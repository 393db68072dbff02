"""What the hooks of the site make of Markdown that is written for GitHub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="no mkdocs: the extra lowbit[docs]")
pytestmark = pytest.mark.docs


def shown(markdown: str, uri: str = "how-to/page.md") -> str:
    from docs.hooks.site import on_page_markdown

    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
    nothing: Any = None
    return on_page_markdown(markdown, page, nothing, nothing)


@pytest.mark.parametrize(
    ("link", "uri", "leads_to"),
    [
        ("[a](docs/how-to/train.md#x)", "index.md", "[a](how-to/train.md#x)"),
        ("[a](CONTRIBUTING.md)", "index.md", "[a](contributing.md)"),
        ("[a](../../README.md)", "how-to/page.md", "[a](../index.md)"),
        ("[a](../../examples/train.toml)", "how-to/page.md", "[a](../../examples/train.toml)"),  # the build fails
        ("[a](https://x.org/b.md)", "index.md", "[a](https://x.org/b.md)"),
        ("[a](#b)", "index.md", "[a](#b)"),
        ("`[a](docs/x.md)`", "index.md", "`[a](docs/x.md)`"),
        ('<a href="docs/security.md">a</a>', "index.md", '<a href="security.html">a</a>'),
        ('<img src="docs/a.png">', "index.md", '<img src="a.png">'),
    ],
)
def test_links_lead_to_pages_of_the_site(link: str, uri: str, leads_to: str):
    assert shown(link, uri).strip() == leads_to


def test_public_names_are_links_outside_of_links_and_blocks():
    assert shown("`lowbit.codecs.parse`").strip() == "[`lowbit.codecs.parse`][lowbit.codecs.parse]"
    assert shown("[`lowbit.codecs.parse`](x.md)").strip() == "[`lowbit.codecs.parse`](x.md)"
    assert shown("`lowbit.codecs.nothing`").strip() == "`lowbit.codecs.nothing`"
    assert shown("```python\n`lowbit.codecs.parse`\n```").splitlines()[1] == "`lowbit.codecs.parse`"


def test_a_picture_follows_the_switch_of_the_theme():
    picture = (
        '<picture>\n<source media="(prefers-color-scheme: dark)" srcset="a-dark.svg">\n'
        '<img alt="A" src="a-light.svg">\n</picture>'
    )
    light, dark = '<img alt="A" src="a-light.svg#only-light">', '<img alt="A" src="a-dark.svg#only-dark">'
    assert shown(picture).strip() == light + dark
    assert picture in shown(f"```text\n{picture}\n```")


def test_badges_are_left_out_and_words_behind_a_language_too():
    assert shown("[![A](https://x.org/a.svg)](b.md)\nText").strip() == "Text"
    assert shown("```python torchrun=2\nx\n```").strip() == "```python\nx\n```"


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("Text:\n- a\n- b\n", "Text:\n\n- a\n- b\n"),
        ("- a\n\n  more\n- b\n", "- a\n\n    more\n\n- b\n"),
        ("1. a\n   - b\n     c\n", "1. a\n    - b\n        c\n"),
        ("1. a\n\n    ```text\n      x\n    ```\n", "1. a\n\n    ```text\n      x\n    ```\n"),
        ("- a\n\n  ```text\n  - x\n  ```\n\nText\n", "- a\n\n    ```text\n    - x\n    ```\n\nText\n"),
        ("Text\n```text\n- x\n```\n", "Text\n```text\n- x\n```\n"),
    ],
)
def test_lists_are_those_of_github(written: str, wanted: str):
    assert [line.rstrip() for line in shown(written).splitlines()] == wanted.splitlines()


def test_terms_of_the_glossary_have_hover_text():
    from docs.hooks.site import hover_text

    terms = hover_text()
    assert terms["RTT"] == "Round-trip time: how long a small message takes to the other end and back."
    assert terms["boundary"] == terms["Boundaries"] == terms["boundaries"]
    assert terms["micro-batches"].startswith("A part of a batch; ")
    assert terms["one-shot"] == terms["two-shot"]
    assert "link" not in terms, "a word that pages use in other senses, too"
    assert [text for text in terms.values() if not text.strip() or set("[]`*") & set(text)] == []
