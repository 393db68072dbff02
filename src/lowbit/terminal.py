r"""The one filter for text on the terminal.

Texts of others, such as file names, peers' errors and fields of files, can hold bytes that a terminal acts upon: they
move the cursor, hide lines, set titles or type for the user. Escaped ("\x1b") are control characters (C0, C1),
overrides of the direction of text and other invisible characters, and halves of surrogate pairs, which no terminal can
be sent. All other Unicode is kept.

- `filtered()` holds for a whole command: whatever it, its libraries and its log write to standard output and standard
  error is filtered, tracebacks included.
- `console()` is for tables, colors and progress. It filters their text, takes no markup from it, and adds its own
  colors behind the filter.
- `one_line()` and `printable()` are for texts of others that become part of an error.

Imports nothing heavy: every command begins with it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

MOST_CHARACTERS = 8000
"""Of an error or a warning; the rest of a longer one is left out."""

_ACTED_UPON = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode's categories
_JOINERS = "\u200c\u200d"  # Persian, scripts of India and emoji need these
_UP = "\x1b[A"  # progress bars of other packages (tqdm) move between their lines by it: left out


def printable(text: str) -> str:
    r"""The text with everything that a terminal would act upon escaped ("\x1b"), newlines and tabs included."""
    if text.isprintable():
        return text
    return "".join(c if _is_harmless(c) else ascii(c)[1:-1] for c in text)


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text on one line, as `printable` makes it, of at most `most` characters before that."""
    text = " ".join(text[: 2 * most].split())
    return printable(text if len(text) <= most else f"{text[:most]} ...")


def lines(text: str) -> str:
    """The text as `printable` makes it, but for newlines and tabs, which stay."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or _is_harmless(c) else ascii(c)[1:-1] for c in text)


@contextlib.contextmanager
def filtered() -> Iterator[None]:
    """Filter what this block writes to standard output and standard error, and warnings that nobody else formats.

    The traceback of an error that ends the process behind this block is filtered, too.
    """
    before, hook, formatter = (sys.stdout, sys.stderr), sys.excepthook, getattr(logging.lastResort, "formatter", None)
    sys.stdout, sys.stderr = (cast("TextIO", Filter(stream)) for stream in before)
    sys.excepthook = _print_traceback
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_OneLine())
    try:
        yield
    except Exception:
        raise  # the hook stays for it
    except BaseException:
        sys.excepthook = hook
        raise
    else:
        sys.excepthook = hook
    finally:
        sys.stdout, sys.stderr = before
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(formatter)


@contextlib.contextmanager
def filtered_again() -> Iterator[None]:
    """Within `filtered()`: filter what is written next to a live display of rich, which puts itself before the streams.

    Outside of it nothing changes: a program that uses lowbit as a library may color what it prints.
    """
    before = sys.stdout, sys.stderr
    if not any(isinstance(getattr(stream, "rich_proxied_file", None), Filter) for stream in before):
        yield
        return
    sys.stdout, sys.stderr = (cast("TextIO", Filter(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class Filter:
    """A text stream that escapes what a terminal would act upon; all else is the stream's own."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text, filtered; lines that begin with a carriage return are progress of other packages."""
        start = "\r" if text.startswith("\r") else ""
        self.stream.write(start + lines(text.removeprefix("\r").replace(_UP, "")))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """Write all texts."""
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @property
    def rich_proxied_file(self) -> Any:
        """Where consoles of rich write: they color text, and ours have filtered it."""
        return getattr(self.stream, "rich_proxied_file", self.stream)


def console(*, stderr: bool = False) -> Console:
    """A console of rich for text of anybody: no markup, no names of emoji, no control characters."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Filtered(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(lines(segment.text), segment.style)

    return Filtered(stderr=stderr, markup=False, emoji=False)


def _is_harmless(character: str) -> bool:
    return unicodedata.category(character) not in _ACTED_UPON or character in _JOINERS


class _OneLine(logging.Formatter):
    """A warning as one line, and the traceback that goes with it."""

    def format(self, record: logging.LogRecord) -> str:
        text = one_line(record.getMessage())
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own, filtered."""
    sys.stderr.write(lines("".join(traceback.format_exception(kind, error, trace))))
