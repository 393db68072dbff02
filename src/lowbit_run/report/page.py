"""Make a page of parts: tables, figures of Plotly and pictures. All text is escaped, without control characters.

The page contains Plotly's library, compressed; the browser unpacks it. A content security policy keeps the page from
using the network, and from running any script but its own.
"""

import base64
import bisect
import functools
import gzip
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from lowbit import escape
from lowbit.escape import printable
from lowbit.files import write
from lowbit_run.report.command import to_json

Figure = dict[str, Any]
MOST_POINTS = 2000  # of a curve; more are averaged
LEAST_SHARE = 1e-3  # share of the time below which a kind of span is left out
COLORS = {
    "compute": ("#8b9198", "#949aa3"), "coding": ("#0b5fd6", "#5aa2ff"), "waiting": ("#e08a00", "#f5ab35"),
    "sending": ("#0f8a66", "#3fc49b"), "all-reduce": ("#6a3fc4", "#ab8cff"), "rest": ("#cbd0d4", "#5a606b"),
}  # fmt: skip
"""Light and dark color of each kind of time."""
SERIES = (
    ("#0b5fd6", "#5aa2ff"), ("#e08a00", "#f5ab35"), ("#0f8a66", "#3fc49b"), ("#b5518f", "#e08cc0"),
    ("#8a7a1a", "#c9b955"), ("#35a0c4", "#6fd0ee"), ("#7d5a3c", "#b58f6c"), ("#6a3fc4", "#ab8cff"),
)  # fmt: skip
"""Light and dark colors of all other series, in their order."""
GENERATOR = "lowbit report"
LIGHT = {"surface": "#ffffff", "ink": "#1f2328", "muted": "#59636e", "grid": "#e4e7ea"}
DARK = {"surface": "#1e2129", "ink": "#e6e9ee", "muted": "#a6aeb9", "grid": "#363b46"}
_MOST_SPANS = 6000  # in a figure
_STEP = "step"
Event = Mapping[str, Any]
_READ_BYTES = 400  # of a file, in which a page of ours names its generator
log = escape.logger(__name__)
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

    files = resources.files("lowbit_run.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files.joinpath(name).read_text("utf-8")), autoescape=True,
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value, kept="\n\t") if type(value) is str else value,
    )  # fmt: skip
    # JSON has no NaN and no infinity.
    parts = [replace(part, figure=to_json(part.figure)) for part in page.parts]
    page = replace(page, parts=parts)
    # The nonce is a digest of the page, so no text inside the page can contain it.
    nonce = hashlib.sha256(repr(page).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    library = _library() if any(part.figure for part in parts) else ""
    return environment.get_template("page.html.j2").render(
        page=page, nonce=nonce, library=library, generator=GENERATOR, light=LIGHT, dark=DARK
    )


def write_page(page: Page, path: Path) -> None:
    """Write a page; a reader never sees half a file.

    Raises:
        ValueError: a file that lowbit did not write exists at the path, or the path cannot be written.
        ModuleNotFoundError: from `render`.
    """
    text = render(page)
    if (path.exists() or path.is_symlink()) and not is_ours(path):
        raise ValueError(f"{path} exists and was not written by lowbit; choose another name or move it away")
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
            'no %s, because %s is missing: pip install "lowbit[report]", then lowbit report', path.name, error.name
        )
    except Exception as error:
        log.warning("no %s: %s", path.name, error)


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


def lines(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    points: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    log_x: bool = False,
    markers: bool = False,
    colors: Mapping[str, tuple[str, str]] = COLORS,
) -> Figure:
    """Curves by name; `points`: markers of the same color without a line, by name of the curve."""
    data, drawn = [], list[Sequence[tuple[float, float]]]()
    for i, (name, curve) in enumerate(curves.items()):
        light, dark = colors.get(name, SERIES[i % len(SERIES)])
        meta = {"light": light, "dark": dark}
        curve = thinned(curve)
        mode = "lines+markers" if markers or len(curve) == 1 else "lines"
        hides = any(coincide(curve, other) for other in drawn)  # dashes let the other be seen
        data.append(_trace(name, curve, mode, meta) | ({"line": {"dash": "dash"}} if hides else {}))
        drawn.append(curve)
        if held_out := (points or {}).get(name):
            data.append(_trace(f"{name}, held-out", held_out, "markers", meta) | {"marker": {"size": 9}})
    layout: Figure = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, "hovermode": "x unified"}
    if log_x:
        layout["xaxis"]["type"] = "log"
    return {"data": data, "layout": layout | {"showlegend": True}}


def stacks(bars: Sequence[str], parts: Mapping[str, Sequence[float]], *, label: str) -> Figure:
    """A horizontal bar for each name, made of parts."""
    data = []
    for i, (name, lengths) in enumerate(parts.items()):
        colors = COLORS.get(name, SERIES[i % len(SERIES)])
        data.append({
            "type": "bar", "orientation": "h", "name": escaped(name), "y": [escaped(bar) for bar in bars],
            "x": list(lengths), "meta": {"light": colors[0], "dark": colors[1]},
            "hovertemplate": "%{y}: %{x:,.4~r}<extra>%{fullData.name}</extra>",
        })  # fmt: skip
    layout = {
        "barmode": "stack", "xaxis": {"title": {"text": label}}, "height": 160 + 34 * len(bars),
        "yaxis": {"autorange": "reversed", "type": "category"}, "legend": {"traceorder": "normal"},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def timeline(spans: Sequence[tuple[str, str, float, float, str]]) -> Figure:
    """Draw spans on tracks; each has a kind, a track, begin and length in milliseconds, and a text.

    Spans within others must come later in `spans`, so that they are drawn on top.
    """
    tracks = list(dict.fromkeys(track for _, track, *_ in spans))
    data, length = [], max((begin + duration for _, _, begin, duration, _ in spans), default=0.0)
    for kind, colors in COLORS.items():
        of_kind = [span for span in spans if span[0] == kind]
        if kind != "rest" and sum(span[3] for span in of_kind) > LEAST_SHARE * length:
            data.append({
                "type": "bar", "orientation": "h", "name": kind, "y": [span[1] for span in of_kind],
                "base": [round(span[2], 4) for span in of_kind], "x": [round(span[3], 4) for span in of_kind],
                "text": [span[4] for span in of_kind], "textposition": "none", "width": 0.8,
                "meta": {"light": colors[0], "dark": colors[1]},
                "hovertemplate": "%{text}<br>%{x:.3f} ms from %{base:.3f} ms<extra>%{y}</extra>",
            })  # fmt: skip
    layout = {
        "barmode": "overlay", "xaxis": {"title": {"text": "milliseconds of the step"}}, "dragmode": "zoom",
        "yaxis": {"categoryorder": "array", "categoryarray": tracks[::-1], "fixedrange": True, "type": "category"},
        "height": 170 + 38 * len(tracks), "bargap": 0.1, "hovermode": "closest",
    }  # fmt: skip
    return {"data": data, "layout": layout}


def thinned(curve: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Reduce a curve to at most `most` points: means of equal stretches, each at its last x."""
    width = -(-len(curve) // most)
    if width <= 1:
        return list(curve)
    parts = [curve[i : i + width] for i in range(0, len(curve), width)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def coincide(curve: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> bool:
    """Whether a curve lies on another one: at half of its places within 1.5 % of the height of both."""
    if len(curve) < 2 or len(other) < 2:
        return False
    heights = [y for _, y in (*curve, *other)]
    near = 0.015 * (max(heights) - min(heights))
    other = sorted(other)
    xs = [x for x, _ in other]
    distances = []
    for x, y in curve:
        right = bisect.bisect_left(xs, x)
        if right < len(xs) and (right or x == xs[0]):
            (x0, y0), (x1, y1) = other[max(0, right - 1)], other[right]
            distances.append(abs(y - y0 - (y1 - y0) * ((x - x0) / (x1 - x0) if x1 > x0 else 1.0)))
    return len(distances) >= 2 and statistics.median(distances) <= near


def escaped(text: str) -> str:
    """Escape a text for Plotly, which interprets some HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _trace(name: str, curve: Sequence[tuple[float, float]], mode: str, meta: Mapping[str, str]) -> Figure:
    return {
        "type": "scatter", "mode": mode, "name": escaped(name), "x": [x for x, _ in curve], "y": [y for _, y in curve],
        "meta": dict(meta), "hovertemplate": "%{y:,.5~r}",
    }  # fmt: skip


def timeline_part(events: Sequence[Event]) -> Part:
    """Show the traced step of median length, on all ranks."""
    steps = sorted({number for event in events if (number := _step(event)) is not None})
    lengths = {number: max(e["dur"] for e in events if _step(e) == number) for number in steps}
    if not lengths:
        return Part(title="")
    middle = statistics.median_low(lengths.values())
    chosen = next(number for number, length in lengths.items() if length == middle)
    begin = min(e["ts"] for e in events if _step(e) == chosen)
    end = max(e["ts"] + e["dur"] for e in events if _step(e) == chosen)
    shown = [e for e in events if e["ts"] < end and e["ts"] + e["dur"] > begin and e["name"] not in (_STEP, "pipeline")]
    left_out = len(shown) - _MOST_SPANS
    if left_out > 0:
        shown = sorted(shown, key=lambda e: -e["dur"])[:_MOST_SPANS]
    shown.sort(key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"]))
    tracks = [f"{e['pid']:.0f} → {e['tid'] - 1:.0f}" if e["tid"] else f"rank {e['pid']:.0f}" for e in shown]
    spans = [
        (e["cat"], track, (e["ts"] - begin) / 1e3, e["dur"] / 1e3, _about(e))
        for e, track in zip(shown, tracks, strict=True)
    ]
    text = (
        f"Step {chosen} on the clock of rank 0. Drag to zoom, double-click to return. A message is being sent until "
        "the operating system has taken its last byte."
    )
    more = f" The {left_out:,} shortest spans are left out." if left_out > 0 else ""
    return Part(title="Timeline of a step", text=text + more, figure=timeline(spans))


def shares_part(events: Sequence[Event]) -> Part:
    """Show milliseconds per traced step by kind, for each rank; an inner span does not count for its outer one."""
    ranks = sorted({event["pid"] for event in events})
    kinds = [kind for kind in COLORS if kind != "sending"]
    totals = {rank: own_times([e for e in events if e["pid"] == rank and e["tid"] == 0]) for rank in ranks}
    counts = {rank: max(1, sum(_step(e) is not None for e in events if e["pid"] == rank)) for rank in ranks}
    parts = {kind: [totals[rank].get(kind, 0.0) / 1e3 / counts[rank] for rank in ranks] for kind in kinds}
    least = LEAST_SHARE * sum(map(sum, parts.values()))
    parts = {kind: values for kind, values in parts.items() if sum(values) > least}
    rows = [(str(rank), *(f"{values[i]:,.2f}" for values in parts.values())) for i, rank in enumerate(ranks)]
    return Part(
        title="Where the time of a step goes", head=("rank", *(f"{kind}, ms" for kind in parts)), rows=rows,
        text="Mean of the traced steps; rest: the schedule's own code, and time that the trace does not cover.",
        figure=stacks([f"rank {rank}" for rank in ranks], parts, label="milliseconds"),
    )  # fmt: skip


def own_times(events: Sequence[Event]) -> dict[str, float]:
    """Sum microseconds by kind over one thread's spans, each without the spans within it."""
    totals: dict[str, float] = {}
    open_spans: list[Event] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_spans and event["ts"] >= open_spans[-1]["ts"] + open_spans[-1]["dur"]:
            open_spans.pop()
        if open_spans:
            totals[open_spans[-1]["cat"]] -= event["dur"]
        totals[event["cat"]] = totals.get(event["cat"], 0.0) + event["dur"]
        open_spans.append(event)
    return totals


def _step(event: Event) -> int | None:
    step = event["args"].get(_STEP)
    return step if event["name"] == _STEP and isinstance(step, int) else None


def _about(event: Event) -> str:
    about = ", ".join(f"{key} {value}" for key, value in event["args"].items() if value is not None)
    text = f"{event['name']}: {about}" if about else str(event["name"])
    return escaped(text[:200])
