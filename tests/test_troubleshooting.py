"""docs/troubleshooting.md has no entry for a message that is gone.

A fragment is a code span in the heading of an entry, or behind "Also:" below it; "..." in it stands for anything.
"""

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES, PAGE = ROOT / "src", ROOT / "docs" / "troubleshooting.md"
ENTRY = re.compile(r"^### (?P<heading>.+)\n(?:Also: (?P<also>(?:.+\n)+))?\n(?P<body>(?:(?!##).*\n?)*)", re.M)
SPAN = re.compile(r"`([^`]+)`")


@cache
def nodes() -> tuple[ast.AST, ...]:
    return tuple(node for path in SOURCES.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))


@cache
def texts() -> tuple[str, ...]:
    """Texts in the source; a NUL for what a run puts in."""
    filled = (node.values for node in nodes() if isinstance(node, ast.JoinedStr))
    joined = ["".join(v.value if isinstance(v, ast.Constant) else "\0" for v in values) for values in filled]  # pyright: ignore
    return (
        *joined,
        *(
            n.value.replace("%s", "\0").replace("%d", "\0")
            for n in nodes()
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ),
    )


def fragments() -> list[str]:
    found = (entry.group("heading", "also") for entry in ENTRY.finditer(PAGE.read_text()))
    return [span for parts in found for part in parts for span in SPAN.findall(part or "")]


def test_every_fragment_is_in_the_source():
    corpus = "\n".join(texts())
    parts = {part.strip() for fragment in fragments() for part in re.split(r"\.\.\.|[(),;:]", fragment)}
    assert [part for part in parts if part.removeprefix("or ") not in corpus] == []


def test_every_entry_says_what_it_means_and_what_to_do():
    for entry in ENTRY.finditer(PAGE.read_text()):
        if SPAN.search(entry["heading"]):
            assert re.search(r"\*\*Means:\*\* .+\*\*Do:\*\* ", entry["body"], re.S), entry["heading"]


def test_index_lists_the_groups():
    page = PAGE.read_text()
    groups = re.findall(r"^## (.+)$", page, re.M)
    assert re.findall(r"^- \[(.+)\]\(#", page, re.M) == groups


def test_table_names_every_class_of_error():
    rows = re.findall(r"^\| (`\w+`.*) \| (.*) \| .* \|$", PAGE.read_text(), re.M)
    named = {span for first, _ in rows for span in SPAN.findall(first)}
    public = {n.name for n in nodes() if isinstance(n, ast.ClassDef) and n.name.endswith("Error") and n.name[0] != "_"}
    assert public <= named
    for first, places in rows:
        for place in (p for p in SPAN.findall(places) if p.startswith("lowbit.")):
            package, _, name = place.rpartition(".") if place[-5:] == "Error" else (place, "", SPAN.findall(first)[0])
            assert inspect.isclass(getattr(importlib.import_module(package), name)), place
