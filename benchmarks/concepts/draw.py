"""Draw each picture on a figure in the colours of a theme."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch

from benchmarks.concepts.timeline import LANES, Interval, TwoStageStep, message_seconds
from lowbit.codecs import GroupInt, TAHQuant, backward_codec
from lowbit.report.command import Row
from lowbit_lab.charts.style import SMALL, TEXT, TITLE, WIDTH, Theme, family, mixed, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Row]
MESSAGE = (8, 128, 128)
MBIT = 25.0
COMPUTE = 0.45
"""Seconds of computing of each stage in a step: a third forward, two thirds backward."""
MICRO_BATCHES = 4
GROUP, BITS = 64, 4
OUTLIER, TIMES = 100, 8
"""A channel of the token, and the factor by which it is enlarged."""


def steps() -> dict[str, tuple[str, TwoStageStep]]:
    """Return the steps of the timeline by name, with the format whose colour their messages have."""
    few = TAHQuant()
    bits = (few.bits_per_element(MESSAGE), backward_codec(few).bits_per_element(MESSAGE))
    return {
        "PyTorch's stage, FP32": ("fp32", step(32, 32, ahead=False)),
        "LowBitStage, FP32": ("fp32", step(32, 32)),
        f"LowBitStage, TAHQuant: {bits[0]:.1f} bits forward, {bits[1]:.1f} back": ("tah-quant", step(*bits)),
    }


def step(forward: float, back: float, *, ahead: bool = True, mbit: float = MBIT, rtt: float = 0.0) -> TwoStageStep:
    """Make a step with messages of `forward` and `back` bits per element over a link."""
    tokens, channels = MESSAGE[0] * MESSAGE[1], MESSAGE[2]
    there, home = (message_seconds(tokens, channels, bits, mbit) for bits in (forward, back))
    each = COMPUTE / MICRO_BATCHES
    return TwoStageStep(
        forward=each / 3, backward=each * 2 / 3, activations=there, gradients=home, micro_batches=MICRO_BATCHES,
        ahead=ahead, one_way=rtt / 2,
    )  # fmt: skip


def timeline(figure: Figure, theme: Theme, data: Mapping[str, Rows]) -> None:
    """Draw two stages and the link between them, during one step each."""
    shown = steps()
    panels = figure.subplots(len(shown), 1, sharex=True)
    longest = max(each.seconds() for _, each in shown.values())
    _title(figure, "With few bits the stages compute; in FP32 they wait")
    for axes, (name, (format_, each)) in zip(panels, shown.items(), strict=True):
        spans = each.spans()
        for span in spans:
            _bar(axes, theme, span, theme.formats[format_])
        seconds = each.seconds()
        axes.set_title(f"{name}: {seconds:.2f} s", fontsize=TEXT, color=theme.ink, loc="left", fontweight="bold")
        axes.plot([seconds] * 2, [-0.55, len(LANES) - 0.45], color=theme.ink, linewidth=1.2, clip_on=False)
        axes.set_yticks(range(len(LANES)), ["stage 0", "link →", "link ←", "stage 1"], fontsize=SMALL)
        axes.set_ylim(len(LANES) - 0.45, -0.55)
        axes.set_xlim(0, longest * 1.01)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=True, axis="x")
    panels[-1].set_xlabel("seconds of one step: 4 micro-batches of 1024 tokens, C = 128, 25 Mbit/s (computed)")
    _key(figure, theme)


def _bar(axes: Axes, theme: Theme, span: Interval, message: str) -> None:
    computes = span.lane.startswith("stage")
    forward, backward = theme.others[2], mixed(theme.others[2], theme.surface, 0.5)
    colour = (forward if span.pass_ == "forward" else backward) if computes else message
    axes.barh(
        LANES.index(span.lane), span.end - span.start, left=span.start, height=0.78, color=colour,
        edgecolor=theme.surface, linewidth=0.8,
    )  # fmt: skip
    if span.end - span.start > 0.035:
        ink = theme.surface if colour != backward else theme.ink
        middle = (span.start + span.end) / 2
        axes.text(
            middle, LANES.index(span.lane) + 0.03, str(span.micro_batch), color=ink, fontsize=SMALL - 1,
            ha="center", va="center",
        )  # fmt: skip


def _key(figure: Figure, theme: Theme) -> None:
    from matplotlib.patches import Patch

    forward = theme.others[2]
    parts = {
        "forward": forward,
        "backward": mixed(forward, theme.surface, 0.5),
        "message, FP32": theme.formats["fp32"],
        "message, TAHQuant": theme.formats["tah-quant"],
    }
    _legend(figure, [Patch(color=colour) for colour in parts.values()], list(parts), columns=4)


def groups(figure: Figure, theme: Theme, data: Mapping[str, Rows]) -> None:
    """Draw two groups of a token's channels and their levels; below, the same with one channel enlarged."""
    token = torch.tensor(next(row["token"] for row in data["boundaries"] if "token" in row))[: 2 * GROUP]
    changed = token.clone()
    changed[OUTLIER] *= TIMES
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    _title(figure, "One outlier makes the step of its whole group coarse")
    for axes, shown, name in zip(
        panels, (token, changed), ("as it is", f"channel {OUTLIER} made {TIMES} times as large"), strict=True
    ):
        _levels(axes, theme, shown)
        axes.set_title(name, color=theme.ink, pad=16)
        axes.set_ylabel("value")
    panels[1].set_xlabel(f"channel of one token; groups of {GROUP}, {BITS} bits")
    _legend(figure, *panels[0].get_legend_handles_labels())


def _levels(axes: Axes, theme: Theme, token: torch.Tensor) -> None:
    decoded = GroupInt(bits=BITS, group=GROUP).round_trip(token)
    for start in range(0, len(token), GROUP):
        part, back = token[start : start + GROUP], decoded[start : start + GROUP]
        low, high = float(part.min()), float(part.max())
        size = (high - low) / (2**BITS - 1)
        levels = [low + i * size for i in range(2**BITS)]
        label = "_again" if start else "levels"
        axes.hlines(levels, start - 0.4, start + len(part) - 0.6, color=theme.muted, linewidth=0.5, label=label)
        others = part.abs() < part.abs().max()
        error = float((back - part)[others].norm() / part[others].norm())
        axes.text(
            start + GROUP / 2, 1.02, f"step {size:.1f}: the other channels err by {error:.0%}".replace("%", " %"),
            transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=SMALL, color=theme.ink,
        )  # fmt: skip
    axes.plot(range(len(token)), token, ".", color=theme.formats["int4"], markersize=4, zorder=4, label="channels")
    axes.set_xlim(-1, len(token))


def spectrum(figure: Figure, theme: Theme, data: Mapping[str, Rows]) -> None:
    """Draw the energy that the best directions leave out, by their number."""
    panels = figure.subplots(1, 2, sharey=True)
    _title(figure, "A few directions hold nearly all of a boundary's activations")
    for axes, direction in zip(panels, ("forward", "backward"), strict=True):
        rows = [row for row in data["boundaries"] if row["direction"] == direction]
        for row in rows:
            colour = theme.others[row["boundary"]]
            curve = row["outside"][1:]
            axes.plot(range(1, len(curve) + 1), curve, color=colour, label=f"boundary {row['boundary']}")
        for directions in (16, 32):
            axes.axvline(directions, color=theme.muted, linewidth=0.8, linestyle=":")
            shares = [row["outside"][directions] for row in rows]
            axes.annotate(
                f"{directions}: {_range(shares)}", (directions, max(shares)), (6, 6), textcoords="offset points",
                fontsize=SMALL, color=theme.ink, va="bottom", bbox=_behind(theme),
            )  # fmt: skip
        axes.set_yscale("log")
        axes.set_xlim(1, 128)
        axes.set_ylim(1e-5, 1.3)
        axes.set_yticks([1, 0.1, 0.01, 0.001, 0.0001], ["100 %", "10 %", "1 %", "0.1 %", "0.01 %"])
        axes.minorticks_off()
        axes.grid(visible=True, axis="y")
        axes.set_title("activations" if direction == "forward" else "gradients", color=theme.ink)
        axes.set_xlabel("directions, of 256 channels")
    panels[0].set_ylabel("energy outside")
    _legend(figure, *panels[0].get_legend_handles_labels())


def _range(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.2g} to {100 * max(shares):.2g} %"


def noise(figure: Figure, theme: Theme, data: Mapping[str, Rows]) -> None:
    """Draw signal over noise of formats by their bits, averaged over the boundaries."""
    panels = figure.subplots(1, 2, sharey=True)
    _title(figure, "Signal over noise of formats by their bits")
    series: dict[str, tuple[str, str, Callable[[Row], bool]]] = {
        "GroupInt, groups of 64": ("int4", "s-", lambda row: row["format"].startswith("int")),
        "TAH-Quant by range (ours)": ("tah-quant", "D", lambda row: row["format"] == "tah-quant"),
        "TAH-Quant as published": ("tah-quant-published", "^", lambda row: row["format"] == "tah-quant-published"),
        "FP8": ("fp8", "P", lambda row: row["format"] == "fp8"),
    }
    for axes, direction in zip(panels, ("forward", "backward"), strict=True):
        for name, (format_, marks, belongs) in series.items():
            rows = [row for row in data["spectrum"] if row["direction"] == direction and belongs(row)]
            bits = sorted({row["bits_per_element"] for row in rows})
            means = [statistics.fmean(r["decibels"] for r in rows if r["bits_per_element"] == b) for b in bits]
            axes.plot(bits, means, marks, color=theme.formats[format_], label=name, markersize=4.5)
        axes.set_xlim(1.8, 9)
        axes.grid(visible=True)
        axes.set_title("activations" if direction == "forward" else "gradients", color=theme.ink)
        axes.set_xlabel("bits per element, C = 256")
    panels[0].set_ylabel("signal over noise, dB")
    _legend(figure, *panels[0].get_legend_handles_labels())


def warm_up(figure: Figure, theme: Theme, data: Mapping[str, Rows]) -> None:
    """Draw held-out loss minus FP32's, without and with a warm-up."""
    rows = data["warm-up"]
    texts = list(dict.fromkeys(row["text"] for row in rows))
    panels = figure.subplots(len(texts), 1, sharex=True)
    _title(figure, "A hundred steps of warm-up remove most of what few bits cost")
    for axes, text in zip(panels, texts, strict=True):
        names = list(dict.fromkeys(row["boundary"] for row in rows if row["text"] == text))
        for place, name in enumerate(names):
            pair = {r["regime"]: r for r in rows if (r["text"], r["boundary"]) == (text, name)}
            without, after = pair["scratch"], pair["scratch-warmup"]
            colour = theme.formats[family(name) or "fp32"]
            axes.plot([without["over_fp32"], after["over_fp32"]], [place] * 2, color=theme.grid, linewidth=4, zorder=1)
            for row, filled in ((without, False), (after, True)):
                axes.errorbar(
                    row["over_fp32"], place, xerr=row["over_fp32_spread"], fmt="o", color=colour, capsize=2.5,
                    markersize=7, markerfacecolor=colour if filled else theme.surface,
                )  # fmt: skip
                axes.annotate(
                    f"{row['over_fp32']:+.3f}", (row["over_fp32"], place), (0, 9), textcoords="offset points",
                    ha="center", fontsize=SMALL, color=theme.ink, bbox=_behind(theme),
                )  # fmt: skip
        axes.set_yticks(range(len(names)), [title_of(name) for name in names], fontsize=SMALL)
        axes.set_ylim(len(names) - 0.5, -0.7)
        axes.axvline(0, color=theme.muted, linewidth=0.8)
        axes.grid(visible=True, axis="x")
        axes.set_title(text, color=theme.ink)
    panels[-1].set_xlabel("held-out loss minus FP32's, nats: mean and deviation of three seeds")
    hollow, filled = (
        panels[0].plot([], [], "o", color=theme.muted, markerfacecolor=face)[0] for face in (theme.surface, theme.muted)
    )
    _legend(figure, [hollow, filled], ["no warm-up", "first 100 of 400 steps at full precision"], columns=2)


def _behind(theme: Theme) -> dict[str, Any]:
    """Return properties of a box that hides lines behind a label."""
    return {"facecolor": theme.surface, "edgecolor": "none", "pad": 0.5}


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[Any], columns: int = 3) -> None:
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=SMALL)


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, fontsize=TITLE, fontweight="bold", x=0.01, ha="left")


PICTURES: dict[str, tuple[Callable[[Figure, Theme, Mapping[str, Rows]], None], float]] = {
    "timeline": (timeline, 6.2),
    "groups": (groups, 5.0),
    "spectrum": (spectrum, 3.8),
    "noise": (noise, 3.9),
    "warm-up": (warm_up, 4.6),
}
"""Each picture's function and height in inches."""


def figure_of(name: str, theme: Theme, data: Mapping[str, Rows]) -> Figure:
    """Draw one of `PICTURES` in a theme, from recorded rows by the name of their file."""
    from matplotlib.figure import Figure

    draw, height = PICTURES[name]
    with themed(theme):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure, theme, data)
    return figure


def themed(theme: Theme) -> AbstractContextManager[None]:
    """Return a context with Matplotlib's settings of a theme."""
    from matplotlib import rc_context

    return rc_context(cast(Any, theme.settings()))
