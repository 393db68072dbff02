"""What commands write: filtered text, tables, and lists as wide as the terminal.

- `filtered()` covers a whole command: everything that it, its libraries and its log write to standard output and
  standard error, including tracebacks, escaped as `lowbit.escape` does.
- `console()` is for tables, colors and progress. It filters their text, ignores markup in it, and adds its own colors
  after the filter.

This module imports nothing heavy, since every command begins with it.
"""

import contextlib
import logging
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from lowbit.escape import lines, one_line

if TYPE_CHECKING:
    from rich.console import Console


_UP = "\x1b[A"  # moves up a line, for progress bars of other packages (tqdm): dropped


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


def wrote(name: str, path: object, following: str) -> list[tuple[str, str]]:
    """Return pairs for the last lines of a command: what it has written, and the next command, with {} for the path."""
    return [(name, str(path)), ("next", following.format(shlex.quote(str(path))))]


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values as a table."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in pairs:
        table.add_row(name, value)
    console().print(table)
