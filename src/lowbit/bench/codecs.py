"""`lowbit bench codecs`: what formats cost in time, in bits and in accuracy, beside a copy and eager PyTorch.

Speeds are gigabytes of input a second, from cold caches; a copy of the same tensor takes its turn in every round. A
copy moves every byte twice, coding less than that: so the share of the copy's rate counts bytes read and written.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit import ops
from lowbit.bench import charts, samples, timing
from lowbit.bench.published import PublishedProcedure
from lowbit.bench.report import Column, Report, Row, machine, table
from lowbit.codecs import Codec, FeatureInt4, TAHQuant, parse

if TYPE_CHECKING:
    from rich.console import Group

DATA = ("gaussian", "student-t", "outliers", "real")
DTYPES = ("float32", "bfloat16", "float16")
REFERENCE_ROUNDS = 3
FEW_BITS = 6  # formats below it are compared in the picture
FITTED = "feature-int4"
EXTRA_NAMES = {
    "tah-quant-token": dataclasses.replace(TAHQuant.published(), allocation="token"),
    "published-procedure": PublishedProcedure(allocation="tile"),
    "published-procedure-token": PublishedProcedure(allocation="token"),
}
"""Besides what `lowbit.codecs.parse` takes, and `FITTED`: allocation by token, and the procedure of the
paper's research code."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Args:
        codecs: formats by name or in full; also feature-int4 (FeatureInt4 with ranges, and channels / 64 outliers, from
            the very tensors that it then codes), tah-quant-token (allocation by token), and published-procedure and
            published-procedure-token (what the paper's research code does: its errors and bits, not its speed).
        dtypes: of the tensors: float32, bfloat16, float16.
        device: cpu or cuda.
        threads: numbers of threads to measure with on the CPU; 0: all cores.
        data: what the tensors hold: gaussian, student-t (heavy tails anywhere), outliers (few large channels), real
            (activations between the layers of a language model).
        shape: sequences, tokens and channels of a tensor; real activations keep their channels, and their tokens are
            repeated to as many elements.
        rounds: turns of each operation.
        reference: measure eager PyTorch too, on the first kind of data.
        activations: where the real ones come from: a .pt or .safetensors file, or a local Hugging Face folder; absent:
            a small Llama that is first trained on Python's standard library.
        train_steps: of that Llama.
    """

    codecs: tuple[str, ...] = (
        "bf16", "fp8", "int8", "GroupInt(bits=6, group=32, symmetric=True)", "int4", "tah-quant", "tah-quant-published",
        "tah-quant-token", "published-procedure", "published-procedure-token", FITTED,
    )  # fmt: skip
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    device: str = "cpu"
    threads: tuple[int, ...] = (1, 0)
    data: tuple[str, ...] = DATA
    shape: tuple[int, int, int] = (1, 1024, 4096)
    rounds: int = 15
    reference: bool = True
    activations: str = ""
    train_steps: int = 60

    def __post_init__(self) -> None:
        for name in set(self.codecs) - {FITTED}:
            _codec(name)
        for field, allowed in (("dtypes", DTYPES), ("data", DATA)):
            values = getattr(self, field)
            if not values or set(values) - set(allowed):
                raise ValueError(f"{field} is {values}; allowed: {', '.join(allowed)}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}; allowed: 'cpu', 'cuda'")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but PyTorch finds no GPU here")
        cores = _cores()
        if not self.threads or not all(0 <= count <= cores for count in self.threads):
            raise ValueError(f"threads is {self.threads}; allowed: 0 (all cores) to {cores}")
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(f"shape is {self.shape}; allowed: three sizes of at least 1")
        for field in ("rounds", "train_steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: at least 1")


def run(settings: Settings) -> Report:
    """Measure every codec on every kind of data, in every dtype and with every number of threads.

    Returns:
        A report whose rows have `codec`, `device`, `dtype`, `threads`, `data`, `shape`; `encode_gb_s`, `decode_gb_s`,
        `copy_gb_s` (medians), `encode_best_gb_s` (the fastest round), `encode_spread` (interquartile range over median)
        and the same of the others; `encode_share_of_copy`, `decode_share_of_copy` (medians of what the rounds gave);
        `encode_share_of_rate`, `decode_share_of_rate` (the same, of bytes read and written); `reference_encode_gb_s`,
        `reference_decode_gb_s` (eager PyTorch); `bits_per_element` (every byte counted) and
        `relative_error` (root mean square of the error over that of the tensor).

    Raises:
        ValueError, OSError: activations that can not be had.
    """
    from rich.console import Console
    from rich.progress import track

    plan = (row for data in settings.data for row in _rows(settings, data))
    total = math.prod(
        map(len, (settings.data, settings.dtypes, settings.codecs, _counts(settings)))
    )
    console = Console(stderr=True)
    rows = list(track(plan, "measuring codecs", total=total, console=console, transient=True))
    return Report(command="bench codecs", settings=settings, machine=machine(), rows=rows)


def _rows(settings: Settings, data: str) -> Iterator[Row]:
    if data == "real":
        tensors = samples.real(settings.activations, steps=settings.train_steps)
    else:
        tensors = [samples.drawn(data, settings.shape)]
    timed = samples.filled(tensors, math.prod(settings.shape))
    reference = settings.reference and data == settings.data[0]
    for dtype in (getattr(torch, name) for name in settings.dtypes):
        inputs = _Inputs(timed.to(settings.device, dtype))
        for name in settings.codecs:
            codec = _fitted(tensors) if name == FITTED else _codec(name)
            about = {
                "codec": name, "device": settings.device, "dtype": str(dtype).removeprefix("torch."), "data": data,
                "shape": list(timed.shape), **_accuracy(codec, [t.to(settings.device, dtype) for t in tensors]),
            }  # fmt: skip
            for count in _counts(settings):
                speed = {}
                if isinstance(codec, Codec):
                    with timing.threads(count):
                        speed = _speed(codec, inputs, settings.rounds, reference=reference)
                yield about | {"threads": count} | speed


class _Inputs:
    """Equal tensors, more than the caches hold, with room for what is made of them."""

    def __init__(self, x: Tensor) -> None:
        self.count = timing.buffers_for(x.numel() * x.element_size(), x.device)
        self.tensors = [x.clone() for _ in range(self.count)]
        self.outs = [torch.zeros_like(x) for _ in range(self.count)]
        self.nbytes = x.numel() * x.element_size()


def _speed(codec: Codec, inputs: _Inputs, rounds: int, *, reference: bool) -> dict[str, float]:
    """Speeds and their spreads."""
    xs, outs = inputs.tensors, inputs.outs
    payloads = [codec.encode(xs[0])]
    payloads += [payloads[0].clone() for _ in xs[1:]]

    def copy(i: int) -> None:
        outs[i].copy_(xs[i])

    def encode(i: int) -> None:
        codec.encode(xs[i], out=payloads[i])

    def decode(i: int) -> None:
        codec.decode(payloads[i], shape=xs[i].shape, out=outs[i])

    operations = {"copy": copy, "encode": encode, "decode": decode}
    if reference:
        operations |= {
            "reference_encode": _eagerly(encode),
            "reference_decode": _eagerly(decode),
        }
    fewer = {name: REFERENCE_ROUNDS for name in operations if name.startswith("reference")}
    seconds = timing.in_turn(
        operations, rounds=rounds, buffers=inputs.count, fewer=fewer, device=xs[0].device
    )
    found = {
        f"{name}_gb_s": inputs.nbytes / statistics.median(s) / 1e9 for name, s in seconds.items()
    }
    for name in ("copy", "encode", "decode"):
        found[f"{name}_best_gb_s"] = inputs.nbytes / min(seconds[name]) / 1e9
        found[f"{name}_spread"] = timing.spread(seconds[name])
    for name in ("encode", "decode"):
        shares = [c / s for c, s in zip(seconds["copy"], seconds[name], strict=True)]
        found[f"{name}_share_of_copy"] = share = statistics.median(shares)
        found[f"{name}_share_of_rate"] = share * (1 + len(payloads[0]) / inputs.nbytes) / 2
    return found


def _eagerly(operation: timing.Operation) -> timing.Operation:
    def run(i: int) -> None:
        with ops.backend("reference"):
            operation(i)

    return run


def _accuracy(codec: Codec | PublishedProcedure, tensors: Sequence[Tensor]) -> dict[str, float]:
    """Bits of an element and relative error, means over tensors that count alike."""
    errors = [relative_error(t, codec.round_trip(t)) for t in tensors]
    bits = [codec.bits_per_element(t.shape) for t in tensors]
    return {
        "bits_per_element": statistics.fmean(bits),
        "relative_error": statistics.fmean(errors),
    }


def relative_error(x: Tensor, y: Tensor) -> float:
    """|x - y| / |x|, Euclidean norms in float64 (0 for two zero tensors)."""
    x, y = x.double(), y.double()
    size = x.norm().item()
    return (x - y).norm().item() / size if size else y.norm().item()


def _codec(name: str) -> Codec | PublishedProcedure:
    """A codec by name.

    Raises:
        ValueError: unknown, or one that works on sessions only and has nothing to measure here.
    """
    found = EXTRA_NAMES.get(name) or parse(name)
    if isinstance(found, Codec) and found.stateful:
        raise ValueError(
            f"codec is {name!r}, which works on sessions only; allowed: codecs without state"
        )
    return found


def _fitted(tensors: Sequence[Tensor]) -> FeatureInt4:
    return FeatureInt4.fit([torch.cat([t.float().flatten(0, -2) for t in tensors])])


def _counts(settings: Settings) -> list[int]:
    """Numbers of threads to measure with, each once; a GPU's rows say 1, the one that feeds it."""
    if settings.device == "cuda":
        return [1]
    return list(dict.fromkeys(count or _cores() for count in settings.threads))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


SPEED_COLUMNS = (
    Column(title="codec", field="codec", show=lambda codec: _label(codec)),
    Column(title="encode", field="encode_gb_s", show="{:.2f}".format),
    Column(title="of\ncopy", field="encode_share_of_copy", show="{:.0%}".format),
    Column(title="of its\nrate", field="encode_share_of_rate", show="{:.0%}".format),
    Column(title="decode", field="decode_gb_s", show="{:.2f}".format),
    Column(title="of\ncopy", field="decode_share_of_copy", show="{:.0%}".format),
    Column(title="of its\nrate", field="decode_share_of_rate", show="{:.0%}".format),
    Column(title="copy", field="copy_gb_s", show="{:.1f}".format),
    Column(title="eager\nenc.", field="reference_encode_gb_s", show="{:.2f}".format),
    Column(title="eager\ndec.", field="reference_decode_gb_s", show="{:.2f}".format),
)


def show(report: Report) -> Group:
    """Speed on the first kind of data, then bits and errors on all kinds in the first dtype."""
    from rich.console import Group

    first = report.rows[0]
    kinds = dict.fromkeys(row["data"] for row in report.rows)
    speeds: dict[tuple[str, int], list[Row]] = {}
    for row in report.rows:
        if row["data"] == first["data"] and "copy_gb_s" in row:
            speeds.setdefault((row["dtype"], row["threads"]), []).append(row)
    titles = [f"GB of {dtype} a second, {n} thread(s), {first['data']}" for dtype, n in speeds]
    parts = [
        table(rows, SPEED_COLUMNS, title=title)
        for title, rows in zip(titles, speeds.values(), strict=True)
    ]
    columns = [
        Column(title="codec", field="codec", show=_label),
        Column(title="bits", field="bits", show="{:.2f}".format),
        *(Column(title=kind, field=kind, show="{:.4f}".format) for kind in kinds),
    ]
    title = f"Relative error, {first['dtype']}; bits of an element, {first['data']}"
    return Group(*parts, table(_errors(report), columns, title=title))


def draw(report: Report, path: Path | str) -> None:
    """Relative error on each kind of data; speed on the first, in the first dtype and number of threads."""
    first, errors = report.rows[0], _errors(report)
    left, right = (figure := charts.new_figure(panels=2, width=7.5, height=4.5)).axes
    kinds = list(dict.fromkeys(row["data"] for row in report.rows))
    few = [row for row in errors if row["bits"] < FEW_BITS] or errors
    heights = {_label(row["codec"]): [row[kind] for kind in kinds] for row in few}
    charts.bars(left, kinds, heights, label="relative error", title="what few bits lose")
    if len(heights) > 1:
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.08), "ncols": 3}
        left.legend(frameon=False, fontsize=7, **below)
    alike = ("dtype", "threads", "data")
    rows = [row for row in report.rows if all(row[k] == first[k] for k in alike)]
    rows = [row for row in rows if "copy_gb_s" in row]
    if rows:
        names = [_label(row["codec"]) for row in rows]
        speeds = {way: [row[f"{way}_gb_s"] for row in rows] for way in ("encode", "decode", "copy")}
        title = f"speed: {first['threads']} thread(s), {first['dtype']}, {first['data']}"
        charts.bars(right, names, speeds, label="GB/s of input", title=title)
        for text in right.get_xticklabels():
            text.set(rotation=30, horizontalalignment="right")
    charts.save(figure, path)


def _errors(report: Report) -> list[dict[str, Any]]:
    """A row for each codec: bits on the first kind of data, and the error on each kind."""
    found: dict[str, dict[str, Any]] = {}
    for row in report.rows:
        if row["dtype"] == report.rows[0]["dtype"]:
            bits = {"codec": row["codec"], "bits": row["bits_per_element"]}
            found.setdefault(row["codec"], bits)[row["data"]] = row["relative_error"]
    return list(found.values())


def _label(codec: str) -> str:
    """A codec's name without those of its arguments: "GroupInt(6, 32, True)"."""
    return re.sub(r"\w+=", "", codec)
