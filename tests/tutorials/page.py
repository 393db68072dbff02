"""The commands and outputs of a tutorial, by section, and the machine that each belongs to."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
_HEADING = re.compile(r"^## (?P<title>.+)$", re.M)
_BLOCK = re.compile(
    r"^\*\*(?P<machines>Machine A|Machine B|Both machines)\*\*[^\n]*\n\n```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.M | re.S,
)
_MACHINES = {"Machine A": "A", "Machine B": "B", "Both machines": "AB"}


@dataclass(frozen=True)
class Shown:
    """A block that says where it is typed or shown: language, machines ("A", "B" or "AB"), text."""

    language: str
    machines: str
    body: str


def sections(page: str) -> dict[str, list[Shown]]:
    """The blocks that say where they are typed or shown, by the heading above them, in the order of the page."""
    text = (TUTORIALS / page).read_text(encoding="utf-8")
    return dict(_sections(text))


def _sections(text: str) -> Iterator[tuple[str, list[Shown]]]:
    starts = [*_HEADING.finditer(text)]
    ends = [heading.start() for heading in starts[1:]] + [len(text)]
    for heading, end in zip(starts, ends, strict=True):
        blocks = _BLOCK.finditer(text, heading.end(), end)
        yield heading["title"], [Shown(b["language"], _MACHINES[b["machines"]], b["body"]) for b in blocks]
