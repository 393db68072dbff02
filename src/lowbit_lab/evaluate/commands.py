"""`lowbit calibrate` and `lowbit evaluate`: their tables and charts. PyTorch is imported only when they run."""

import importlib
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowbit_lab.charts import Bars, Heights
from lowbit_lab.charts.style import recommended, title_of
from lowbit_lab.evaluate.settings import BASELINE, CalibrationConfig, EvaluationConfig
from lowbit_run.report import Baseline, Column, Command, Row, Table, compare
from lowbit_run.terminal import console, wrote


def _calibrate(settings: Any, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    yield importlib.import_module("lowbit_lab.evaluate.calibrate").measure(settings)


def _evaluate(settings: Any, earlier: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Evaluate; on a terminal, also print each row while others are still being measured."""
    screen = console(stderr=True)
    shown = screen.is_terminal and os.environ.get("RANK", "0") == "0"
    for rows in importlib.import_module("lowbit_lab.evaluate.run").Evaluation(settings).rows():
        if shown:
            row = compare(rows, EVALUATE.baselines)[-1]
            screen.print(_line(row))
        yield rows


def _line(row: Row) -> str:
    shown = {
        "perplexity": "perplexity {:.4f}", "kept": "kept {:.2%}", "nearest": "nearest neighbour kept {:.1%}",
        "nearest_10": "10 nearest {:.1%}", "same_tokens": "tokens equal {:.1%}",
    }  # fmt: skip
    parts = [form.format(row[name]) for name, form in shown.items() if row.get(name) is not None]
    parts += ["nothing was coded"] if row["coded"] == 0 else []
    return f"{row['format']}, tp {row['tp']}: {', '.join(parts)}"


def _ranges_title(rows: Sequence[Row]) -> str:
    bits = sum(row["bits_per_value"] * row["width"] for row in rows) / sum(row["width"] for row in rows)
    published = ", as published: no gain for each token" if rows[0].get("gain") == "static" else ""
    sent = [row["whole_weight"] for row in rows if row["inputs"]]
    inputs = f"; {len(sent)} layers send their inputs, whose weights take {sum(sent) / 1e6:.1f} MB more on each rank"
    return f"Ranges of partial sums; {bits:.4f} bits per value{published}{inputs * bool(sent)}"


CALIBRATE = Command(
    name="calibrate",
    summary="Measure the ranges of a model's tensor-parallel sums once, so that they can be sent in 4.25 bits.",
    examples=(
        "lowbit calibrate my_model --ranks 4",
        "lowbit calibrate my_model --text my_texts --output tp2.safetensors",
    ),
    settings=CalibrationConfig,
    measure=_calibrate,
    ending=lambda settings: [
        ("ranges", str(settings.path)),
        wrote("", settings.model, f"lowbit evaluate {{}} --low-bit --tp {settings.ranks}")[1],
    ],
    tables=(
        Table(
            title=_ranges_title,
            columns=(
                Column("layer", lambda row: row["layer"].removeprefix("model.")),
                Column("median\nrange", "range_median", "{:.3g}"),
                Column("largest", "range_largest", "{:.3g}"),
                Column("over\nmedian", lambda row: row["range_largest"] / row["range_median"], "{:.1f}"),
                Column("sums in\nbits", "codes"),
                Column("inputs\nin bits", "inputs"),
                Column("in\nbf16", "k"),
                Column("which", lambda row: ", ".join(map(str, row["features"][:4])) + ", ..." * (row["k"] > 4)),
            ),
        ),
    ),
    charts=(
        Heights(
            panel=lambda row: kind_of(row["layer"]),
            values=lambda row: [value / row["range_median"] for value in row["aggregated"]],
            marks="features", marked="in bfloat16", x_label="feature", y_label="layer",
            label="range over the layer's median",
        ),
    ),
    live=False,
)  # fmt: skip


def _parallel(rows: Sequence[Row], field: str) -> Sequence[Row]:
    return [row for row in rows if row["tp"] > 1 and row.get(field) is not None]


def _ranks(row: Row) -> str:
    return f"{row['tp']} ranks"


def _with(field: str) -> Callable[[Sequence[Row]], Sequence[Row]]:
    """Select the rows that measured this; drop the shares of coded values if all were coded."""

    def select(rows: Sequence[Row]) -> Sequence[Row]:
        rows = [row for row in rows if row.get(field) is not None]
        everything = all(row["coded"] in (None, 1) for row in rows)
        return [{**row, "coded": None} for row in rows] if everything else rows

    return select


def _title(measured: str) -> Callable[[Sequence[Row]], str]:
    """Make titles that state the measure with values of the rows, the model, and whether its ranks are real."""

    def title(rows: Sequence[Row]) -> str:
        first, formats = rows[0], [row for row in _parallel(rows, "format") if row["format"] != BASELINE]
        what = measured.format(**first)
        nothing = "; NOTHING WAS CODED" if formats and all(row["coded"] == 0 for row in formats) else ""
        return f"{what}: {first['model']}, {'real' if first['real'] else 'emulated'} ranks{nothing}"

    return title


def kind_of(layer: str) -> str:
    """Return `mlp.down_proj` for model.layers.3.mlp.down_proj."""
    parts = layer.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts)


def _layer_columns(rows: Sequence[Row]) -> list[Column]:
    """Make a column for each kind of layer: the root mean square of the errors of its layers."""

    def error_of(row: Row, kind: str) -> float | None:
        squares = [error**2 for layer, error in row["layers"].items() if kind_of(layer) == kind]
        return math.sqrt(statistics.fmean(squares)) if squares else None

    kinds = dict.fromkeys(kind_of(layer) for row in rows for layer in row["layers"])
    return [
        *_CASE,
        *(Column(kind.replace(".", "\n"), lambda row, kind=kind: error_of(row, kind), "{:.2%}") for kind in kinds),
        Column("worst\nboundary", lambda row: max(row["layers"].values(), default=None), "{:.2%}"),
        Column("each token\nalike", "token_error", "{:.2%}"),
    ]  # fmt: skip


def _with_errors(rows: Sequence[Row]) -> Sequence[Row]:
    """Return rows with the error of sums, and names of bars: the format, and the algorithm if there are several."""
    rows = _parallel(rows, "sum_error")
    several = len({(row["tp"], row["format"]) for row in rows}) < len(rows)
    names = [" ".join(filter(None, (row["format"], row["algorithm"] if several else None))) for row in rows]
    return [{**row, "bar": name} for row, name in zip(rows, names, strict=True)]


def _finding(field: str, what: str, otherwise: str) -> Callable[[Sequence[Row]], str]:
    """Make titles that state what the recommended format keeps with the fewest ranks."""

    def finding(rows: Sequence[Row]) -> str:
        best = recommended(rows, "format")
        if best is None:
            return otherwise
        if best["coded"] == 0:
            return f"{best['model']}: nothing was coded: every sum is below {best['small']:,} elements"
        bits = f" in {best['bits_per_value']:.2f} bits" if best.get("bits_per_value") else ""
        kept = what.format(best[field], best["model"])
        return f"{title_of(best['format'])} keeps {kept} on {best['tp']} ranks{bits}"

    return finding


def _by_score(rows: Sequence[Row]) -> Sequence[Row]:
    """Make a row for each score, and one for their mean if there are several."""
    listed: list[Row] = []
    for row in rows:
        scores = row.get("scores") or {}
        for name, score in scores.items():
            task, _, metric = name.partition(" ")
            listed.append({
                **row, "task": task, "metric": metric, "score": score, "score_error": row["scores_error"][name],
                "kept": row["score_kept"].get(name), "kept_error": row["score_kept_error"].get(name),
                "chance": row["chance"].get(task),
            })  # fmt: skip
        if len(scores) > 1:
            means = {"kept": row["scores_kept"], "kept_error": row["scores_kept_error"]}
            listed.append({**row, "task": "mean", "metric": "", "chance": None, **means})
    return listed


def _by_task(rows: Sequence[Row]) -> Sequence[Row]:
    """Make a row for each task whose choices were compared with those of bf16."""
    fields = [name + error for name in ("same_answers", "divergence", "change") for error in ("", "_error")]
    return [
        {**row, "task": task, **{name: row[name][task] for name in fields}}
        for row in rows if row["format"] != BASELINE
        for task in row.get("same_answers") or ()
    ]  # fmt: skip


_CASE = (Column("format", "format"), Column("tp", "tp"))
_SENT = (
    *_CASE,
    Column("bits per\nvalue", "bits_per_value", "{:.6g}"),
    Column("coded", "coded", "{:.0%}"),
    Column("all-\nreduce", "algorithm"),
)

_SMALL = {"coded": 0}  # a format that coded nothing is not compared

EVALUATE = Command(
    name="evaluate",
    summary="Accuracy of a model or encoder with low-bit tensor-parallel sums: perplexity, neighbours, tasks.",
    examples=(
        "lowbit evaluate my_model --low-bit --tp 2,4",
        "lowbit evaluate my_model --format int4,feature-int4 --json scores.json",
    ),
    settings=EvaluationConfig,
    measure=_evaluate,
    tables=(
        Table(
            title=_title("Perplexity of {tokens:,} tokens"),
            rows=_with("perplexity"),
            columns=(*_SENT, Column("perplex-\nity", "perplexity", "{:.4f}"), Column("kept", "kept", "{:.2%}")),
        ),
        Table(
            title=_title("Neighbours of {sentences:,} sentences"),
            rows=_with("nearest"),
            columns=(
                *_SENT,
                Column("nearest\nkept", "nearest", "{:.1%}"),
                Column("10 nearest\nkept", "nearest_10", "{:.1%}"),
                Column("rank\ncorrelation", "rank_correlation", "{:.2%}"),
            ),
        ),
        Table(
            title=_title("Greedy generation"),
            rows=_with("same_tokens"),
            columns=(
                *_SENT,
                Column("tokens\nequal", "same_tokens", "{:.1%}"),
                Column("before the first\ndifference", "tokens_before", "{:.1f}"),
                Column("texts\nequal", "same_texts", "{:.0%}"),
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
            title="Errors of the sums by boundary",
            rows=lambda rows: [row for row in rows if row["layers"]],
            columns=_layer_columns,
        ),
        Table(
            title="Zero-shot scores, ± standard errors",
            rows=_by_score,
            columns=(
                *_CASE,
                Column("task", "task"),
                Column("metric", "metric"),
                Column("chance", "chance", "{:.4f}"),
                Column("score", "score", "{:.4f}"),
                Column("±", "score_error", "{:.4f}"),
                Column("kept", "kept", "{:.2%}"),
                Column("± of\nkept", "kept_error", "{:.2%}"),
            ),
        ),
        Table(
            title="Choices compared with those of bf16 on as many ranks, ± standard errors",
            rows=_by_task,
            columns=(
                *_CASE,
                Column("task", "task"),
                Column("same\nanswers", "same_answers", "{:.1%}"),
                Column("±", "same_answers_error", "{:.1%}"),
                Column("divergence\nin nats", "divergence", "{:.4f}"),
                Column("±", "divergence_error", "{:.4f}"),
                Column("log-likelihood\nchanged by, nats", "change", "{:.3f}"),
                Column("±", "change_error", "{:.3f}"),
            ),
        ),
    ),
    charts=(
        Bars(
            title=_finding("kept", "{:.2%} of the perplexity of {}", "Perplexity with low-bit sums"),
            subtitle="Perplexity of BF16 over that of the format, minus 100 %.",
            rows=lambda rows: _parallel(rows, "kept"),
            group=_ranks, series="format", y=lambda row: 100 * (row["kept"] - 1),
            show=lambda row: f"{round(row['kept'] - 1, 4) + 0.0:+.2%}",
            label="perplexity kept, difference to BF16 in %",
        ),
        Bars(
            title=_finding(
                "nearest_10", "{:.1%} of the 10 nearest neighbours of {}", "Nearest neighbours with low-bit sums"
            ),
            subtitle="10 nearest neighbours that are the same as in the first row.",
            rows=lambda rows: _parallel(rows, "nearest_10"),
            group=_ranks, series="format", y=lambda row: 100 * row["nearest_10"],
            label="10 nearest neighbours kept, %",
        ),
        Bars(
            title="Relative error of the sums", rows=_with_errors, group=_ranks, series="bar",
            y=lambda row: 100 * row["sum_error"], label="relative error of the sums, %",
        ),
    ),
    baselines=(
        Baseline(field="kept", value="perplexity", to={"format": BASELINE}, alike=("tp",), way="under", unless=_SMALL),
        Baseline(field="scores_kept", value="score", to={"format": BASELINE}, alike=("tp",), unless=_SMALL),
    ),
    live=False,
)  # fmt: skip
