"""Show the timeline of a traced step, and the parts of each rank's time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.report.page.figures import COLORS, LEAST_SHARE, escaped, stacks, timeline
from lowbit.report.page.page import Part

_MOST_SPANS = 6000  # in a figure
_STEP = "step"
Event = Mapping[str, Any]


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
    rows = [
        (str(rank), *(f"{values[i]:,.2f}" for values in parts.values())) for i, rank in enumerate(ranks)
    ]  # fmt: skip
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
    """Describe a span."""
    about = ", ".join(f"{key} {value}" for key, value in event["args"].items() if value is not None)
    text = f"{event['name']}: {about}" if about else str(event["name"])
    return escaped(text[:200])
