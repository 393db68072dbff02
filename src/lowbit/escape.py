r"""Escape foreign text in errors and logs.

Foreign text, such as file names, peers' errors and fields of files, can hold characters that a terminal acts upon: they
move the cursor, hide lines, set titles or type for the user. What is here escapes (as in "\x1b") control characters
(C0, C1), overrides of the direction of text and other invisible characters, and halves of surrogate pairs, which cannot
be encoded. It keeps all other Unicode.

- `one_line()` and `printable()` are for foreign text in errors; an error class with `Printable` escapes its own.
  `shown()` is for values, which can be whole models.
- `logger()` is for modules that log foreign text.
"""

import difflib
import logging
import unicodedata
from collections.abc import Iterable

MOST_CHARACTERS = 8000
"""Longest error or warning; the rest is left out."""

_ACTED_UPON = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode's categories
_JOINERS = "\u200c\u200d"  # Persian, Indian scripts and emoji need these


def printable(text: str, kept: str = "") -> str:
    r"""Escape all characters that a terminal would act upon (as "\x1b"), including newlines and tabs, but `kept`."""
    if text.isprintable():
        return text
    harmless = kept + _JOINERS
    return "".join(c if c in harmless or unicodedata.category(c) not in _ACTED_UPON else ascii(c)[1:-1] for c in text)


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """Put at most `most` characters of the text on one line, escaped as by `printable`."""
    text = " ".join(text[: 2 * most].split())
    return printable(text if len(text) <= most else f"{text[:most]} ...")


def shown(value: object, most: int = 300) -> str:
    """Show a value in an error: its `repr` on one line of at most `most` characters, such as of a whole model."""
    return one_line(repr(value), most)


def suggestion(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "did you mean X?" for a word that is not known, or else the known words."""
    words = list(known)
    close = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(words)}"


def lines(text: str) -> str:
    """Escape the text as `printable` does, but keep newlines and tabs."""
    return printable(text, kept="\n\t")


class Printable:
    """First base of errors that may quote a peer or a file: escapes their text as `lines` does."""

    def __init__(self, message: str = "") -> None:
        super().__init__(lines(message))  # pyright: ignore[reportCallIssue]  # an exception is the next base


def logger(name: str) -> logging.Logger:
    """Return the logger of a module, which escapes its messages as `lines` does."""
    log = logging.getLogger(name)
    log.addFilter(_escape)
    return log


def _escape(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if (escaped := lines(text)) != text:
        record.msg, record.args = escaped, ()
    return True
