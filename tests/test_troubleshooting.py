"""docs/troubleshooting.md has no entry for a message that is gone, and mistakes get the lines that are meant for them.

A fragment is a code span in the heading of an entry, or behind "Also:" below it; "..." in it stands for anything.
"""

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from tests.command_line import invoke

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


def holds(text: str, fragment: str) -> bool:
    """Whether a text has the words of a fragment in their order."""
    parts = re.split(r"\.\.\.(?!\.)", fragment.removeprefix("... ").removesuffix(" ..."))
    return re.search(".*?".join(map(re.escape, parts)), text, re.S) is not None


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


@pytest.mark.parametrize(
    ("command", "fragment"),
    [
        ("trian", "... has no ...; did you mean ..."),
        ("train --pipelin.ranks 4", "unknown option ...; did you mean ..."),
        ("train a.toml b.toml", "unexpected argument ..."),
        ("train missing.toml", "configuration file ...: ..."),
        ("train broken.toml", "configuration file ... is not TOML: ..."),
        ("train --data.batch 7", "data.batch is ...; allowed: a multiple of pipeline.microbatches ..."),
        (
            "train --pipeline.ranks 99 --pipeline.microbatches 100 --data.batch 100",
            "the pipeline has ... stages (...), the model ... layers",
        ),
        ("train --pipeline.layers 5,2", "pipeline.layers is ..., ... layers on ... stages"),
        ("train --pipeline.schedule ZBVZeroBubble", "pipeline.stages_per_rank is ...; allowed with ..."),
        ("train --pipeline.forward int9", "codec is ...; allowed: ..."),
        ("train --data.text missing.txt", "... no such file, folder or pattern with a match"),
        ("train --data.text empty.txt", "... is empty; allowed: text ..."),
        ("train --data.text short.txt", "data.sequence is ...; ... has ... tokens to train on"),
        ("train --run.output empty.txt", "run.output ... cannot be written to: ..."),
        ("train --run.output foreign", "..., which lowbit has no record of making"),
        ("train --run.resume --run.overwrite", "run.... and run.overwrite are both true"),
        ("train --model.pretrained foreign", "... is ...; ...; allowed: a folder with a saved model"),
        ("evaluate foreign", "... is ..., and there is no ...; allowed: a local folder"),
        ("plan memory --budget lots", "... is ...; allowed: bytes, such as 24gb, 1.5gib or 800mb"),
        ("plan pipeline empty.txt", "the cluster has machines ...; allowed: at least one, each with its own name"),
        ("bench pipeline --link 5parsec", "link is ...; allowed: such as ..."),
        ("bench codecs --json foreign", "... cannot be written: ..."),
    ],
)
def test_a_mistake_gets_its_line(command: str, fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("foreign").mkdir()
    for name, text in {
        "broken.toml": "a = [",
        "empty.txt": "",
        "short.txt": "abc",
        "foreign/summary.json": "{}",
    }.items():
        Path(name).write_text(text)
    result = invoke(*command.split())
    assert holds(result.stderr, fragment), result.output
