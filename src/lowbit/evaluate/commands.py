"""`lowbit calibrate` and `lowbit evaluate`: their tables and charts. Imports no PyTorch before they run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from lowbit.evaluate.settings import BASELINE, CalibrationConfig, EvaluationConfig
from lowbit.report import Bars, Baseline, Column, Command, Heights, Row, Table, compare
from lowbit.report.style import recommended, title_of

_SHOWN = 4  # features in the table of a calibration


def _calibrate(settings: Any, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    yield importlib.import_module("lowbit.evaluate.calibrate").measure(settings)


def _evaluate(settings: Any, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Also print each row on a terminal while others are still measured."""
    from rich.console import Console

    console = Console(stderr=True)
    shown = console.is_terminal and os.environ.get("RANK", "0") == "0"
    for rows in importlib.import_module("lowbit.evaluate.run").measure(settings):
        if shown:
            row = compare(rows, EVALUATE.baselines)[-1]
            console.print("{format}, tp {tp}: perplexity {perplexity:.4f}, kept {kept:.2%}".format(**row))
        yield rows


def _ranges_title(rows: Sequence[Row]) -> str:
    bits = sum(row["bits_per_value"] * row["width"] for row in rows) / sum(row["width"] for row in rows)
    return f"Ranges of partial sums; {bits:.4f} bits per value"


def _kind(row: Row) -> str:
    """Return `mlp.down_proj` for model.layers.3.mlp.down_proj."""
    parts = row["layer"].split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts)


def _few(features: Sequence[int]) -> str:
    return ", ".join(map(str, features[:_SHOWN])) + (", ..." if len(features) > _SHOWN else "")


CALIBRATE = Command(
    name="calibrate",
    summary="Measure the ranges of a model's tensor-parallel sums once, so that they can be sent in 4.2 bits.",
    examples=(
        "lowbit calibrate my_model --ranks 4",
        "lowbit calibrate my_model --text my_texts --output tp2.safetensors",
    ),
    settings=CalibrationConfig,
    measure=_calibrate,
    tables=(
        Table(
            title=_ranges_title,
            columns=(
                Column("layer", lambda row: row["layer"].removeprefix("model.")),
                Column("median\nrange", "range_median", "{:.3g}"),
                Column("largest", "range_largest", "{:.3g}"),
                Column("over\nmedian", lambda row: row["range_largest"] / row["range_median"], "{:.1f}"),
                Column("in\nbf16", "k"),
                Column("which", "features", _few),
            ),
        ),
    ),
    charts=(
        Heights(
            panel=_kind,
            values=lambda row: [value / row["range_median"] for value in row["aggregated"]],
            marks="features",
            x_label="feature",
            y_label="layer",
            label="range over the layer's median",
        ),
    ),
    live=False,
)


def _parallel(rows: Sequence[Row]) -> Sequence[Row]:
    return [row for row in rows if row["tp"] > 1]


def _ranks(row: Row) -> str:
    return f"{row['tp']} ranks"


def _perplexity_title(rows: Sequence[Row]) -> str:
    return f"Perplexity, {rows[0]['tokens']:,} tokens, {'real' if rows[0]['real'] else 'emulated'} ranks"


def _with_errors(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows with the error of sums, and names of their bars: the format, and the algorithm where there are several."""
    rows = [row for row in _parallel(rows) if row["sum_error"] is not None]
    several = len({(row["tp"], row["format"]) for row in rows}) < len(rows)
    names = [" ".join(filter(None, (row["format"], row["algorithm"] if several else None))) for row in rows]
    return [{**row, "bar": name} for row, name in zip(rows, names, strict=True)]


def _quality_title(rows: Sequence[Row]) -> str:
    """What the recommended format keeps with the fewest ranks."""
    best = recommended(rows, "format")
    if best is None:
        return "Perplexity with low-bit sums"
    bits = f" in {best['bits_per_value']:.2f} bits" if best.get("bits_per_value") else ""
    return f"{title_of(best['format'])} keeps {best['kept']:.2%} of the perplexity on {best['tp']} ranks{bits}"


def _share_coded(rows: Sequence[Row]) -> Sequence[Row]:
    """Leave the share of coded values out where it is all of them."""
    everything = all(row["coded"] in (None, 1) for row in rows)
    return [{**row, "coded": None} for row in rows] if everything else rows


def _task_columns(rows: Sequence[Row]) -> list[Column]:
    scores = [
        Column(name.replace(" ", "\n"), lambda row, name=name: row["scores"][name], "{:.4f}")
        for name in rows[0]["scores"]
    ]
    return [*_CASE, *scores, Column("kept", "scores_kept", "{:.2%}")]


_CASE = (Column("format", "format"), Column("tp", "tp"))

EVALUATE = Command(
    name="evaluate",
    summary="Perplexity and zero-shot scores of a model with low-bit tensor-parallel sums.",
    examples=(
        "lowbit evaluate my_model --low-bit --tp 2,4",
        "lowbit evaluate my_model --format int4,feature-int4 --json scores.json",
    ),
    settings=EvaluationConfig,
    measure=_evaluate,
    tables=(
        Table(
            title=_perplexity_title,
            rows=_share_coded,
            columns=(
                *_CASE,
                Column("bits per\nvalue", "bits_per_value", "{:.6g}"),
                Column("coded", "coded", "{:.0%}"),
                Column("all-\nreduce", "algorithm"),
                Column("perplex-\nity", "perplexity", "{:.4f}"),
                Column("kept", "kept", "{:.2%}"),
            ),
        ),
        Table(
            title="Errors; equal digits mean equal logits",
            columns=(
                *_CASE,
                Column("error of\nsums", "sum_error", "{:.2%}"),
                Column("error of\nlogits", "logits_error", "{:.2%}"),
                Column("digits of\nlogits", "logits", "{:.8}"),
            ),
        ),
        Table(
            title="Zero-shot scores",
            rows=lambda rows: [row for row in rows if row.get("scores")],
            columns=_task_columns,
        ),
    ),
    charts=(
        Bars(
            title=_quality_title,
            subtitle="Perplexity of BF16 over that of the format, minus 100 %.",
            rows=_parallel,
            group=_ranks,
            series="format",
            y=lambda row: 100 * (row["kept"] - 1),
            show=lambda row: f"{round(row['kept'] - 1, 4) + 0.0:+.2%}",
            label="perplexity kept, difference to BF16 in %",
        ),
        Bars(
            title="Relative error of the sums",
            rows=_with_errors,
            group=_ranks,
            series="bar",
            y=lambda row: 100 * row["sum_error"],
            label="relative error of the sums, %",
        ),
    ),
    baselines=(
        Baseline(field="kept", value="perplexity", to={"format": BASELINE}, alike=("tp",), way="under"),
        Baseline(field="scores_kept", value="score", to={"format": BASELINE}, alike=("tp",)),
    ),
    live=False,
)
