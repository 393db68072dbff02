"""Text for the terminal: lines that break between words only."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

_ELEMENTS = re.compile("[^,]+,?|,")


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of at most `width` characters; all but the first are indented. Words are split after commas only."""
    return _Wrapper(
        width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    ).wrap(text)  # fmt: skip


class _Wrapper(textwrap.TextWrapper):
    def _split(self, text: str) -> list[str]:
        """The words of a text; a list that no line can hold is as many words as it has elements."""
        room = self.width - len(self.subsequent_indent)
        words = textwrap.TextWrapper._split(self, text)  # pyright: ignore[reportAttributeAccessIssue]
        return [part for word in words for part in (_ELEMENTS.findall(word) if len(word) > room else [word])]


def listed(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Names with a text beside each, as wide as the terminal."""
    pairs = list(pairs)
    column = 4 + max(len(name) for name, _ in pairs)
    return [line for name, text in pairs for line in wrapped(f"  {name:<{column - 2}}{text}", columns(), column)]


def examples_in_help(examples: Sequence[str]) -> list[str]:
    """Whole command lines under a heading; nothing without any."""
    return ["examples:", *(f"  {example}" for example in examples)] if examples else []


def columns() -> int:
    """Characters of a line of the terminal, but for the two that argparse leaves free, too."""
    return shutil.get_terminal_size().columns - 2
