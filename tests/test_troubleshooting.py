"""docs/troubleshooting.md has an entry for every message of lowbit, and no entry for a message that is gone.

A fragment is a code span in a heading of an entry, or behind "Also:" below it; "..." in it stands for anything.
"""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.messages import HOLE, Message, messages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
ENTRY = re.compile(r"^### (?P<heading>.*)\n(?:Also: (?P<also>(?:.+\n)+))?", re.M)
SPAN = re.compile(r"`([^`]+)`")
LEAST_LETTERS = 6
"""Letters of a fragment: a shorter one would match anything."""

PASSED_ON = {}


def fragments(page: str) -> list[str]:
    return [span for entry in ENTRY.finditer(page) for part in entry.groups("") for span in SPAN.findall(part)]


def pattern(fragment: str) -> re.Pattern[str]:
    """What a template must hold: the words of a fragment in their order, from the beginning of a word on."""
    parts = re.split(r"\.\.\.(?!\.)", fragment.removeprefix("... ").removesuffix(" ..."))
    return re.compile(r"(?:^|(?<=[\s\0]))" + ".*?".join(map(re.escape, parts)), re.S)


def unmatched(found: list[Message], page: str) -> list[str]:
    patterns = [pattern(fragment) for fragment in fragments(page)]
    return [str(message) for message in found if not any(each.search(message.text) for each in patterns)]
