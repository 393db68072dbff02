"""docs/troubleshooting.md has no entry for a message that is gone.

A fragment is a code span in the heading of an entry, or behind "Also:" below it; "..." in it stands for anything.
"""

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from pydoc import locate

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


def test_every_error_is_caught_by_a_row_of_the_table():
    rows = re.findall(r"^\| (`[\w.]+`.*) \| .* \|$", PAGE.read_text().partition("## Classes of errors")[2], re.M)
    caught = tuple(locate(SPAN.findall(row)[0]) for row in rows)
    assert all(inspect.isclass(error) for error in caught), rows
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and node.name[0] != "_":
                module = ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
                assert issubclass(getattr(importlib.import_module(module), node.name), caught), node.name
