"""Make a page of parts: tables, Plotly figures and pictures. All text is escaped, without control characters.

The page contains Plotly's library, compressed; the browser unpacks it. A content security policy keeps the page from
using the network, and from running any script but its own.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from lowbit.config.atomic import write
from lowbit.report.command import plain
from lowbit.terminal import lines

GENERATOR = "lowbit report"
LIGHT = {"surface": "#ffffff", "ink": "#1f2328", "muted": "#59636e", "grid": "#e4e7ea"}
DARK = {"surface": "#1e2129", "ink": "#e6e9ee", "muted": "#a6aeb9", "grid": "#363b46"}
_READ_BYTES = 400  # of a file, in which a page of ours names its generator
log = logging.getLogger(__name__)
_NUMBER = set("0123456789.,-+–x%∞ ")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of a page; all fields but the title are optional.

    Args:
        text: below the title.
        head, rows: a table, as text. folded: show it on demand.
        figure: {"data": ..., "layout": ...} for Plotly; `meta` of a trace holds its colors by theme.
        picture: URLs of an image, {"light": ..., "dark": ...}.
    """

    title: str
    text: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    folded: bool = False
    figure: Mapping[str, Any] | None = None
    picture: Mapping[str, str] | None = None

    @property
    def numeric(self) -> set[int]:
        """Indices of columns that hold numbers."""
        columns = range(len(self.head))
        return {i for i in columns if all(set(row[i]) <= _NUMBER or row[i][:1].isdigit() for row in self.rows)}


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page. problems: what could not be read, one line each."""

    title: str
    subtitle: str = ""
    problems: Sequence[str] = ()
    parts: Sequence[Part] = field(default_factory=list)


def render(page: Page) -> str:
    """Render the page as HTML. Raises ModuleNotFoundError: the extra "report" is not installed."""
    import jinja2

    files = resources.files("lowbit.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files.joinpath(name).read_text("utf-8")), autoescape=True,
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        finalize=lambda value: lines(value) if type(value) is str else value,
    )  # fmt: skip
    # JSON has no NaN and no infinity.
    parts = [replace(part, figure=plain(part.figure)) for part in page.parts]
    page = replace(page, parts=parts)
    # Nobody can put a script into the page that knows a digest of the page.
    nonce = hashlib.sha256(repr(page).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    library = _library() if any(part.figure for part in parts) else ""
    return environment.get_template("page.html.j2").render(
        page=page, nonce=nonce, library=library, generator=GENERATOR, light=LIGHT, dark=DARK
    )


def write_page(page: Page, path: Path) -> None:
    """Write a page; a reader never sees half a file.

    Raises:
        ValueError: a file that lowbit did not write is in the way, or the path cannot be written.
        ModuleNotFoundError: from `render`.
    """
    text = render(page)
    if (path.exists() or path.is_symlink()) and not is_ours(path):
        raise ValueError(f"{path} is in the way: it is not a page of lowbit; allowed: another name, or to move it away")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, text.encode(errors="replace"))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def try_to_write(make: Callable[[], Page], path: Path) -> None:
    """Make a page and write it. What goes wrong is a warning: a run or a measurement does not fail by its page."""
    try:
        write_page(make(), path)
    except ModuleNotFoundError as error:
        log.warning(
            'no report.html, because %s is missing: pip install "lowbit[report]", then lowbit report', error.name
        )
    except Exception as error:
        log.warning("no report.html: %s", error)


def is_ours(path: Path) -> bool:
    """Whether a file is a page that `write_page` wrote."""
    try:
        with path.open("rb") as file:
            return f'name="generator" content="{GENERATOR}"'.encode() in file.read(_READ_BYTES)
    except OSError:
        return False


@functools.cache
def _library() -> str:
    """Return Plotly's library, compressed, as base64."""
    source = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, mtime=0)).decode()
