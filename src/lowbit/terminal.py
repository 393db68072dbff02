r"""The one filter for text on the terminal.

Foreign text, such as file names, peers' errors and fields of files, can hold characters that a terminal acts upon: they
move the cursor, hide lines, set titles or type for the user. The filter escapes (as in "\x1b") control characters (C0,
C1), overrides of the direction of text and other invisible characters, and halves of surrogate pairs, which cannot be
encoded. It keeps all other Unicode.

- `filtered()` covers a whole command: everything that it, its libraries and its log write to standard output and
  standard error, including tracebacks.
- `console()` is for tables, colors and progress. It filters their text, ignores markup in it, and adds its own colors
  after the filter.
- `one_line()` and `printable()` are for foreign text in errors; an error class with `Printable` escapes its own.
  `shown()` is for values, which can be whole models.
- `logger()` is for modules that log foreign text. It counts outside of commands, too, in a program of the user.

This module imports nothing heavy, since every command begins with it.
"""

import contextlib
import difflib
import logging
import re
import shutil
import sys
import textwrap
import traceback
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console


MOST_CHARACTERS = 8000
"""Longest error or warning; the rest is left out."""

_ACTED_UPON = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode's categories
_JOINERS = "\u200c\u200d"  # Persian, Indian scripts and emoji need these
_UP = "\x1b[A"  # moves up a line, for progress bars of other packages (tqdm): dropped


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


@contextlib.contextmanager
def filtered() -> Iterator[None]:
    """Filter what this block writes to standard output and standard error, and warnings without another handler.

    The traceback of an error that ends the process after this block is filtered too.
    """
    hook, formatter = sys.excepthook, getattr(logging.lastResort, "formatter", None)
    sys.excepthook = lambda *error: sys.stderr.write(lines("".join(traceback.format_exception(*error))))
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_OneLine())
    try:
        with _filtered_streams():
            yield
    except Exception:
        raise  # keeps the hook, which prints this traceback
    except BaseException:
        sys.excepthook = hook
        raise
    else:
        sys.excepthook = hook
    finally:
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(formatter)


@contextlib.contextmanager
def filtered_again() -> Iterator[None]:
    """Filter, within `filtered()`, what is written during a live display of rich, which replaces the streams.

    Outside of `filtered()` nothing changes: a program that uses lowbit as a library may color what it prints.
    """
    streams = sys.stdout, sys.stderr
    within = any(isinstance(getattr(stream, "rich_proxied_file", None), Filter) for stream in streams)
    with _filtered_streams() if within else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _filtered_streams() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", Filter(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class Filter:
    """A text stream that escapes what a terminal would act upon, and otherwise behaves like the given stream."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text, filtered; keep carriage returns at the start of a line, for other packages' progress."""
        start = "\r" if text.startswith("\r") else ""
        self.stream.write(start + lines(text.removeprefix("\r").replace(_UP, "")))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @property
    def rich_proxied_file(self) -> Any:
        """The stream that rich's consoles write to: they add colors, and ours have filtered the text."""
        return getattr(self.stream, "rich_proxied_file", self.stream)


def console(*, stderr: bool = False) -> "Console":
    """Make a rich console for foreign text: without markup, emoji names and control characters."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Filtered(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(lines(segment.text), segment.style)

    return Filtered(stderr=stderr, markup=False, emoji=False)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = one_line(record.getMessage())
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


_ELEMENTS = re.compile("[^,]+,?|,")


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Wrap to lines of at most `width` characters, all but the first indented; split words after commas only."""
    options: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    return _Wrapper(width, subsequent_indent=" " * indent, **options).wrap(text)


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
