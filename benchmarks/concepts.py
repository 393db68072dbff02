"""`python -m benchmarks.concepts`: draw the pictures of docs/concepts, light and dark.

Their data is recorded in docs/concepts/data/. To record it again, with a model of `examples/tensor-parallel.toml` and a
text that it was not trained on:

    python -m benchmarks.concepts record CHECKPOINT TEXT
    lowbit bench spectrum CHECKPOINT TEXT --codec int2,int3,int4,int6,int8,fp8,tah-quant,tah-quant-published \
        --json docs/concepts/data/spectrum.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from lowbit.codecs import GroupInt, TAHQuant, backward_codec
from lowbit_lab.bench.spectrum import outside
from lowbit_lab.bench.training import capture, spread_evenly
from lowbit_lab.charts.style import SMALL, TEXT, THEMES, TITLE, WIDTH, Theme, family, mixed, title_of
from lowbit_run.report.command import Report, Row, machine
from lowbit_run.train.config import DataConfig, ModelConfig
from lowbit_run.train.data import load_data
from lowbit_run.train.model import build_model, vocabulary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGES = Path(__file__).parents[1] / "docs" / "concepts"
DATA, FIGURES = PAGES / "data", PAGES / "figures"
STAGES, SEQUENCE, BATCH = 4, 256, 4
TOKEN = 100
"""The token of the first window whose channels are shown."""
KEPT = 128
"""Most directions for which the energy outside is recorded."""
Rows = Sequence[Row]
MESSAGE = (8, 128, 128)
MBIT = 25.0
COMPUTE = 0.45
"""Seconds of computing of each stage in a step: a third forward, two thirds backward."""
MICRO_BATCHES = 4
GROUP, BITS = 64, 4
OUTLIER, TIMES = 100, 8
"""A channel of the token, and the factor by which it is enlarged."""
Lane = Literal["stage 0", "activations", "gradients", "stage 1"]
LANES: tuple[Lane, ...] = ("stage 0", "activations", "gradients", "stage 1")
TCP_SHARE = 0.956
"""Share of a link's bits that TCP carries as payload; the rest are headers (docs/how-to/links.md)."""


@dataclass(frozen=True)
class Interval:
    """A time in which a stage computes or a link carries a message.

    Args:
        lane: a stage, which computes, or a direction of the link, which carries a message.
        pass_: forward or backward.
        micro_batch: its number.
        start, end: seconds from the beginning of the step.
    """

    lane: Lane
    pass_: Literal["forward", "backward"]
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class TwoStageStep:
    """A GPipe step of two stages, with its times in seconds: the rules of docs/concepts/pipelines-and-links.md.

    A stage computes one micro-batch after the other, first all forward, then all backward. A link carries one message
    at a time in each direction. A message leaves as soon as it is ready, its receiver has posted the receive, and the
    link is free; posting it takes half a round trip to reach the sender, the message as long to reach the receiver.
    PyTorch's stage posts a receive when it needs the message, `LowBitStage` posts all of them ahead.

    Args:
        forward, backward: computing one micro-batch on one stage.
        activations, gradients: one message on the link.
        micro_batches: in the step.
        ahead: receives are posted ahead.
        one_way: half a round trip.
    """

    forward: float
    backward: float
    activations: float
    gradients: float
    micro_batches: int = 4
    ahead: bool = True
    one_way: float = 0.0

    def spans(self) -> list[Interval]:
        """Return all intervals, in the order of the rules."""
        n, spans = self.micro_batches, list[Interval]()
        spans += [Interval("stage 0", "forward", i, i * self.forward, (i + 1) * self.forward) for i in range(n)]
        ready = [span.end for span in spans]
        there = self._cross(spans, "activations", "forward", ready, after=0.0)
        last = there[-1].end
        ready = []
        for i in range(n):
            start = max(last, ready[-1]) if ready else last
            ready.append(start + self.backward)
            spans.append(Interval("stage 1", "backward", i, start, ready[-1]))
        # PyTorch's first stage waits for its sends before it asks for gradients.
        sent = max(span.end for span in spans if span.lane == "activations")
        self._cross(spans, "gradients", "backward", ready, after=sent)
        return spans

    def seconds(self) -> float:
        """Return the seconds from the first forward pass to the end of the last backward pass."""
        return max(span.end for span in self.spans())

    def _cross(
        self, spans: list[Interval], lane: Lane, pass_: Literal["forward", "backward"], ready: list[float], after: float
    ) -> list[Interval]:
        """Send a message for each micro-batch that becomes ready, and compute with it; return the computing."""
        message, compute = (self.activations, self.forward) if pass_ == "forward" else (self.gradients, self.backward)
        receiver: Lane = "stage 1" if pass_ == "forward" else "stage 0"
        free, idle, computed = 0.0, after, list[Interval]()
        for i, moment in enumerate(ready):
            posted = 0.0 if self.ahead else idle + self.one_way
            start = max(moment, free, posted)
            free = start + message
            spans.append(Interval(lane, pass_, i, start, free))
            begin = max(free + self.one_way, idle)
            idle = begin + compute
            computed.append(Interval(receiver, pass_, i, begin, idle))
        spans += computed
        return computed


def message_seconds(tokens: int, channels: int, bits: float, mbit: float) -> float:
    """Return the seconds of one message of `tokens` tokens in `bits` bits per element, on a link of `mbit` Mbit/s."""
    return tokens * channels * bits / (mbit * 1e6 * TCP_SHARE)


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
    from matplotlib.patches import Patch

    forward = theme.others[2]
    parts = {
        "forward": forward,
        "backward": mixed(forward, theme.surface, 0.5),
        "message, FP32": theme.formats["fp32"],
        "message, TAHQuant": theme.formats["tah-quant"],
    }
    _legend(figure, [Patch(color=colour) for colour in parts.values()], list(parts), columns=4)


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
            text = f"{directions}: {100 * min(shares):.2g} to {100 * max(shares):.2g} %"
            axes.annotate(
                text, (directions, max(shares)), (6, 6), textcoords="offset points",
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


def recorded() -> Mapping[str, Sequence[Row]]:
    """Return the rows that the pictures show, by the name of their file."""
    return {path.stem: Report.read_json(path).rows for path in sorted(DATA.glob("*.json"))}


def draw(folder: Path = FIGURES) -> None:
    """Write every picture, NAME-light.svg and NAME-dark.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    data = recorded()
    for name in PICTURES:
        for theme in THEMES.values():
            figure = figure_of(name, theme, data)
            with themed(theme):
                figure.savefig(folder / f"{name}-{theme.name}.svg", metadata={"Date": None})


def record(checkpoint: str, text: Sequence[str], path: Path) -> None:
    """Run a model on one message of a text, and record the tensors at its boundaries.

    Args:
        checkpoint: local folder with a Hugging Face checkpoint.
        text: files that it was not trained on.
        path: of the JSON file. Rows have `boundary`, `direction` and `outside`: the share of energy that the best k
            directions leave out, for k from 0 to `KEPT`. The forward row of the middle boundary also has `token`: the
            channels of one token.
    """
    config = ModelConfig(pretrained=checkpoint)
    data = load_data(DataConfig(text=tuple(text), tokenizer="bytes", sequence=SEQUENCE, batch=BATCH, held_out_share=0))
    model = build_model(config, vocab=vocabulary(config, data.tokenizer.size), sequence=SEQUENCE, seed=0)
    batch = data.train.batch(spread_evenly(BATCH, len(data.train)))
    rows: list[dict[str, Any]] = []
    for direction, tensors in zip(("forward", "backward"), capture(model, *batch, stages=STAGES), strict=True):
        for boundary, x in enumerate(tensors):
            shares = [round(share, 7) for share in outside(x)[: KEPT + 1].tolist()]
            rows.append({"boundary": boundary, "direction": direction, "shape": list(x.shape), "outside": shares})
            if direction == "forward" and boundary == STAGES // 2 - 1:
                rows[-1]["token"] = [round(value, 4) for value in x[0, TOKEN].tolist()]
    settings = {"stages": STAGES, "sequence": SEQUENCE, "batch": BATCH}
    Report(command="concepts record", settings=settings, machine=machine(), rows=rows).write_json(path)


def main() -> None:
    """Draw, or record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concepts", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    recording = commands.add_parser("record", help="run a model on a text and record what its boundaries carry")
    recording.add_argument("checkpoint", help="local folder with a Hugging Face checkpoint")
    recording.add_argument("text", nargs="+", help="files that it was not trained on")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.checkpoint, arguments.text, DATA / "boundaries.json")
    else:
        draw()


if __name__ == "__main__":
    main()
