"""Hooks of the documentation site: pages made of files at the repository's root, links, pictures, addresses."""

import os
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.append(str(Path(__file__).parent))
from griffe_names import public_names

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ADDRESSES = SETTINGS["tool"]["lowbit"]
PUBLIC = public_names(ROOT / "src")
PAGES_AT_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

_FENCED = r"^(?P<indent> *)(?P<fence>```+).*?^(?P=indent)(?P=fence) *$"
_FENCE = re.compile(_FENCED, re.M | re.S)
_CODE = rf"(?P<code>{_FENCED}|(?P<ticks>`+)[^`].*?(?P=ticks))"
_TARGET = r"(?P<before>\]\(|^\[[^\]\n]+\]: +|\b(?:href|src)=\")(?P<target>[^)\"\s]+)"
_CODE_OR_TARGET = re.compile(f"{_CODE}|{_TARGET}", re.M | re.S)
_ITEM = re.compile(r"(?P<indent> *)(?P<marker>[-*+]|\d+\.)(?P<gap> +)(?=\S)")
_FENCE_WORDS = re.compile(r"^( *```+\w+) [^\n`]*$", re.M)
_PICTURE = re.compile(r"<picture>(?P<sources>.*?)<img(?P<light>[^>]*?)/?>\s*</picture>", re.S)
_BADGE = re.compile(r"\[!\[[^\]]*\]\(https?:[^)]*\)\]\([^)]*\)\n?|!\[[^\]]*\]\(https?:[^)]*\)\n?")
_IMAGE = re.compile(r"\bsrc=\"([^\"]+)\"")
_ENTRY = re.compile(r"^## (.+)\n\n(.+?\.)(?= |$)", re.M)
_NOT_TEXT = re.compile(r" \(\[[^\]]*\]\([^)]*\)\)|\]\([^)]*\)|[\[\]`*]")
# Also mean other things on these pages.
_EVERYDAY = {"agreement", "directions", "group", "link", "scale", "session", "spread", "step", "width"}
_DARK = re.compile(r"<source(?=[^>]*prefers-color-scheme: dark)[^>]*srcset=\"([^\"]+)\"")
_EXAMPLE = re.compile(r"\[(?P<name>[^\]\n]+)\]\((?:\.\./)*examples/[^)\n]*\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take names and addresses from pyproject.toml, and hover text from the glossary."""
    config.mdx_configs["abbr"] = {"glossary": hover_text()}
    config.site_url = os.environ.get("READTHEDOCS_CANONICAL_URL", ADDRESSES["documentation"])
    config.site_description = SETTINGS["project"]["description"]
    if source := ADDRESSES["repository"]:
        # Not `repo_url`: the theme would ask GitHub's servers for the number of stars while a page is read.
        config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": source, "name": "Source"}]
    return config


def hover_text() -> dict[str, str]:
    """Return the first sentence of each entry of the glossary by its term, as pages write it."""
    shown: dict[str, str] = {}
    for heading, sentence in _ENTRY.findall((ROOT / "docs/glossary.md").read_text(encoding="utf-8")):
        for term in heading.split(", ") if heading not in _EVERYDAY else ():
            many = re.sub("y$", "ie", re.sub("(ch|s)$", r"\1e", term)) + "s" if term.islower() else term
            forms = {form for word in (term, many) for form in (word, word[0].upper() + word[1:])}
            shown |= dict.fromkeys(forms, _NOT_TEXT.sub("", sentence))
    return shown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files at the root."""
    for name, uri in PAGES_AT_ROOT.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site; those to examples, which are not on it, become names."""
    markdown = "\n".join(_lists(markdown.splitlines())) + "\n"
    markdown = _EXAMPLE.sub(lambda found: f"`{found['name'].strip('`')}`", markdown)
    markdown = "".join(_pictures(markdown))
    at_root = {uri: name for name, uri in PAGES_AT_ROOT.items()}
    source = at_root.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def replaced(found: re.Match[str]) -> str:
        if found["code"] is not None:
            return _linked(found)
        target = _target(found["target"], source, page.file.src_uri)
        if "=" in found["before"]:  # MkDocs leaves links in HTML as they are
            target = re.sub(r"\.md(?=#|$)", ".html", target)
        return found["before"] + target

    return _CODE_OR_TARGET.sub(replaced, markdown)


def _lists(lines: list[str]) -> Iterator[str]:
    """Yield lists in the form that Python-Markdown needs: after an empty line, items indented by four spaces."""
    items: list[int] = []  # columns in which the text of the items begins that a line is part of
    fence, first, before = "", "", ""  # the open fence, the first line of the paragraph, the line before
    shift = 0
    for line in lines:
        first = line if not before.strip() else first
        indent = len(line) - len(line.lstrip())
        item = None if fence else _ITEM.match(line)
        if line.strip() and not fence and (item or not before.strip()):
            items = [column for column in items if column <= indent]
        if item and not items and not _ITEM.match(first):
            yield ""
            first = line
        if not fence:
            inside = bool(items) and indent >= items[-1]
            shift = 4 * len(items) - (items[-1] if item or indent - items[-1] > 3 else indent) if inside else 0
        yield " " * shift + line if shift > 0 else line[-shift:]
        if item:
            items.append(item.end())
        if mark := re.match(r" *(```+|~~~+)", line):
            fence = "" if fence else mark[1]
        before = line


def _linked(code: re.Match[str]) -> str:
    """A public name, such as `lowbit.codecs.parse`, as a link to the API reference; other code unchanged."""
    text, before = code[0], code.string[code.start() - 1 : code.start()]
    return f"[{text}][{text.strip('`')}]" if text.strip("`") in PUBLIC and before != "[" else text


def _target(target: str, source: str, uri: str) -> str:
    """Where a link of the file `source`, shown as the page `uri`, leads on the site."""
    path, hash_, anchor = target.partition("#")
    if not path or re.match(r"\w+:|//", path):
        return target
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    on_site = PAGES_AT_ROOT.get(file, file.removeprefix("docs/") if file.startswith("docs/") else "")
    if on_site and not (ROOT / file).is_dir():
        return posixpath.relpath(on_site, posixpath.dirname(uri) or ".") + hash_ + anchor
    return target


def _pictures(markdown: str) -> Iterator[str]:
    """A page without badges, for it loads nothing from elsewhere, and with two images for each picture."""
    end = 0
    for fence in _FENCE.finditer(markdown):
        yield _PICTURE.sub(_two_images, _BADGE.sub("", markdown[end : fence.start()]))
        yield _FENCE_WORDS.sub(r"\1", fence[0], count=1)
        end = fence.end()
    yield _PICTURE.sub(_two_images, _BADGE.sub("", markdown[end:]))


def _two_images(picture: re.Match[str]) -> str:
    """Two images that the theme shows by its own switch, of a picture that goes by the system's colors."""
    dark = _DARK.search(picture["sources"])
    if dark is None:
        return f"<img{picture['light']}>"
    light = _IMAGE.sub(r'src="\1#only-light"', picture["light"])
    return f"<img{light}>" + "<img" + _IMAGE.sub(f'src="{dark[1]}#only-dark"', picture["light"]) + ">"
