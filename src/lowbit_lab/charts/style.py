"""Style of figures: two themes, sizes for a page 700 pixels wide, and a colour and a name for each format."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowbit_run.report import page
from lowbit_run.report.command import Row, Value, value_of

WIDTH = 7.2  # inches of every figure: 691 pixels of an SVG
TITLE, TEXT, SMALL = 12.5, 9.5, 8.5  # points; 9.5 points are 12.7 pixels
MARKERS = "osD^vPXp"


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of a figure.

    Args:
        surface: background; ink: titles and labels; muted: axes and remarks; grid: grid lines.
        formats: by family of formats or part of memory, see `family`. They also differ in brightness, to suit every
            kind of colour vision; the recommended formats are blue and violet, baselines are grey.
        others: for series that are not formats, in this order.
    """

    name: str
    surface: str
    ink: str
    muted: str
    grid: str
    formats: Mapping[str, str]
    others: tuple[str, ...]

    def settings(self) -> dict[Any, Any]:
        """Return Matplotlib's settings for this theme."""
        return {
            "figure.facecolor": self.surface, "savefig.facecolor": self.surface, "axes.facecolor": self.surface,
            "text.color": self.ink, "axes.labelcolor": self.muted, "axes.edgecolor": self.muted,
            "xtick.color": self.muted, "ytick.color": self.muted, "grid.color": self.grid, "grid.linewidth": 0.8,
            "font.family": "DejaVu Sans", "font.size": TEXT, "axes.labelsize": TEXT, "xtick.labelsize": SMALL,
            "ytick.labelsize": TEXT, "legend.fontsize": SMALL, "axes.titlesize": TEXT, "axes.titleweight": "bold",
            "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
            "axes.axisbelow": True, "axes.unicode_minus": True, "svg.hashsalt": "lowbit", "svg.fonttype": "none",
        }  # fmt: skip


_FORMATS = {
    "transform": ("#c0264e", "#ff7a9c"), "feature-int": ("#6a3fc4", "#ab8cff"),
    "feature-int-static": ("#3d2373", "#d9ccff"), "low-bit": ("#0b5fd6", "#5aa2ff"),
    "stock-fp32": ("#3a3f45", "#e0e3e7"), "stock-bf16": ("#6b7178", "#b7bcc3"), "fp32": ("#8b9198", "#949aa3"),
    "bf16": ("#b4b9be", "#727883"), "fp16": ("#cbd0d4", "#5a606b"), "tah-quant": ("#e08a00", "#f5ab35"),
    "tah-quant-published": ("#b0460c", "#e0703a"), "int4": ("#b5518f", "#e08cc0"), "int6": ("#d38cb7", "#a8628c"),
    "int8": ("#0f8a66", "#3fc49b"), "fp8": ("#35a0c4", "#6fd0ee"), "aq-sgd": ("#8a7a1a", "#c9b955"),
    "powersgd": ("#7d5a3c", "#b58f6c"), "saved": ("#0b5fd6", "#5aa2ff"), "weights": ("#3a3f45", "#e0e3e7"),
    "gradients": ("#e08a00", "#f5ab35"), "optimizer": ("#b0460c", "#e0703a"), "copies": ("#8b9198", "#949aa3"),
    "rest": ("#cbd0d4", "#5a606b"), "bound": ("#1f2328", "#e6e9ee"),
}  # fmt: skip
"""In light and in dark."""
LIGHT = Theme(
    name="light", **page.LIGHT, formats={name: light for name, (light, _) in _FORMATS.items()},
    others=("#0b5fd6", "#e08a00", "#0f8a66", "#b5518f", "#8a7a1a", "#35a0c4", "#7d5a3c", "#6a3fc4"),
)  # fmt: skip
DARK = Theme(
    name="dark", **page.DARK, formats={name: dark for name, (_, dark) in _FORMATS.items()},
    others=("#5aa2ff", "#f5ab35", "#3fc49b", "#e08cc0", "#c9b955", "#6fd0ee", "#b58f6c", "#ab8cff"),
)  # fmt: skip
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}

NAMES = {
    "stock-fp32": "PyTorch's stage, FP32", "stock-bf16": "PyTorch's stage, BF16", "engine-fp32": "PyTorch, FP32",
    "engine-bf16": "PyTorch, BF16", "hook-fp16": "DDP hook, FP16", "hook-bf16": "DDP hook, BF16",
    "powersgd": "PowerSGD", "fp32": "FP32", "bf16": "BF16", "fp16": "FP16", "fp8": "FP8", "int8": "INT8",
    "int6": "INT6", "int4": "INT4", "feature-int4": "FeatureInt, 4 bits", "feature-int8": "FeatureInt, 8 bits",
    "feature-int4-static": "static ranges, as published", "tah-quant": "TAH-Quant by range (ours)",
    "TAHQuant()": "TAH-Quant by range (ours)", "tah-quant-published": "TAH-Quant as published",
    "tah-quant-published-token": "TAH-Quant as published, by token", "aq-sgd": "AQ-SGD",
    "transform": "TransformQuant", "bound": "rate-distortion bound", "agoq": "AGoQ as published",
}  # fmt: skip
"""Short names of formats in figures."""
_FAMILIES = (  # the first match counts
    (r"(stock|engine|pytorch).*fp32|fp32.*(stock|pytorch)", "stock-fp32"),
    (r"(stock|engine|pytorch).*bf16|bf16.*(stock|pytorch)", "stock-bf16"),
    (r"transform", "transform"),
    (r"tah-?quant.*(published|token)|published", "tah-quant-published"),
    (r"tah-?quant", "tah-quant"),
    (r"aq-?sgd", "aq-sgd"),
    (r"power-?sgd", "powersgd"),
    (r"feature-?int.*static", "feature-int-static"),
    (r"feature-?int", "feature-int"),
    (r"low-bit", "low-bit"),
    (r"fp8|blockfloat8", "fp8"),
    (r"int4|bits=4", "int4"),
    (r"int6|bits=6", "int6"),
    (r"int8|bits=8", "int8"),
    (r"bf16", "bf16"),
    (r"fp16", "fp16"),
    (r"fp32|float32", "fp32"),
)
RECOMMENDED = ("transform", "feature-int", "low-bit")
BASELINES = ("stock-fp32", "stock-bf16", "fp32", "bf16", "fp16")


def family(name: Any) -> str | None:
    """Return the format that determines a series' colour: "transform" for "TransformQuant(bits=4)".

    For a pair of formats ("int4 / int8"), the activations' format counts. None: the name is not a format.
    """
    text = str(name).partition(" / ")[0].lower()
    if part := re.match(r"saved|copies|(weights|gradients|optimizer|rest|bound)$", text):
        return part[0]
    return next((family for pattern, family in _FAMILIES if re.search(pattern, text)), None)


def title_of(name: Any) -> str:
    """Name a series in a figure: "TAH-Quant by range (ours)" for "TAHQuant()"."""
    text = str(name)
    forward, both, backward = text.partition(" / ")
    rates = re.findall(r"TransformQuant\(bits=([\d.]+)/?([\d.]+)?", text)
    if both or (rates and rates[0][1]):
        if len(numbers := [number for pair in rates for number in pair if number]) == 2:
            return f"TransformQuant, {' / '.join(numbers)} bits"
        same = forward == backward
        return f"{title_of(forward)} both ways" if same else f"{title_of(forward)} / {title_of(backward)}"
    if text.startswith("anchor:"):
        return f"{title_of(text.removeprefix('anchor:'))} with token anchors"
    if text in NAMES:
        return NAMES[text]
    first, _, rest = text.partition(" ")
    return f"{NAMES[first.rstrip(',')]}, {rest}".replace("_", "-") if first.rstrip(",") in NAMES and rest else text


def row_name(name: Any) -> str:
    """Name a format in a table as it was typed, but mark our TAH-Quant, which differs from the paper's."""
    return re.sub(r"(?<![\w-])(tah-quant|TAHQuant\(\))(?![\w-])", r"\1 (ours, by range)", str(name))


def recommended(rows: Sequence[Row], series: Value) -> Row | None:
    """Return the first row with a recommended format; None without one."""
    return next((row for row in rows if family(value_of(row, series)) in RECOMMENDED), None)


class Palette:
    """Colours and markers of the series of a figure, by name.

    Formats have the colour of their family; further members of a family in a figure are paler. Other series take the
    theme's other colours.
    """

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self._taken: dict[Any, str] = {}
        self._members: dict[str, int] = {}

    def __getitem__(self, name: Any) -> str:
        if name not in self._taken:
            self._taken[name] = self._next(name)
        return self._taken[name]

    def stands_out(self, name: Any) -> bool:
        """Whether a series is the figure's first with a recommended format."""
        kind = family(name)
        return kind in RECOMMENDED and next(taken for taken in (*self._taken, name) if family(taken) == kind) == name

    def ink(self, name: Any) -> str:
        """Return the colour of a series' name, which is never paler than its family's."""
        kind = family(name)
        return self.theme.ink if kind in BASELINES else self.theme.formats[kind] if kind else self[name]

    def marker(self, name: Any) -> str:
        """Return the marker of a series; the recommended format has a disc."""
        if self.stands_out(name):
            return MARKERS[0]
        return MARKERS[1 + list(self._taken).index(name) % (len(MARKERS) - 1)]

    def _next(self, name: Any) -> str:
        kind = family(name)
        if kind is None:
            free = [colour for colour in self.theme.others if colour not in self._taken.values()]
            return (free or self.theme.others)[0]
        number = self._members.get(kind, 0)
        self._members[kind] = number + 1
        return mixed(self.theme.formats[kind], self.theme.surface, 1 - 0.68 ** min(number, 4))


def mixed(colour: str, other: str, share: float) -> str:
    """Mix a colour with this share of another."""
    pairs = zip(_numbers(colour), _numbers(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _numbers(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
