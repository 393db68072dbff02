"""Wrap text for the terminal, breaking lines between words only."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from lowbit.terminal import console

_ELEMENTS = re.compile("[^,]+,?|,")


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Wrap to lines of at most `width` characters, all but the first indented; split words after commas only."""
    return _Wrapper(
        width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    ).wrap(text)  # fmt: skip


class _Wrapper(textwrap.TextWrapper):
    def _split(self, text: str) -> list[str]:
        """Split a text into words; the elements of a list that is longer than a line count as words."""
        room = self.width - len(self.subsequent_indent)
        words = textwrap.TextWrapper._split(self, text)  # pyright: ignore[reportAttributeAccessIssue]
        return [part for word in words for part in (_ELEMENTS.findall(word) if len(word) > room else [word])]


def listed(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """List names with a text next to each, as wide as the terminal."""
    pairs = list(pairs)
    column = 4 + max(len(name) for name, _ in pairs)
    return [line for name, text in pairs for line in wrapped(f"  {name:<{column - 2}}{text}", columns(), column)]


def examples_in_help(examples: Sequence[str]) -> list[str]:
    """Return command lines under a heading; empty without examples."""
    return ["examples:", *(f"  {example}" for example in examples)] if examples else []


def columns() -> int:
    """Return the usable width of the terminal: like argparse, two characters less than its own."""
    return shutil.get_terminal_size().columns - 2


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values as a table."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in pairs:
        table.add_row(name, value)
    console().print(table)
