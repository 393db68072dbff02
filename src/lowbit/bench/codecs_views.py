"""What `lowbit bench codecs` measured, as tables and as a picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.bench import charts
from lowbit.bench.report import Column, Report, Row, table

if TYPE_CHECKING:
    from rich.console import Group

FEW_BITS = 6  # formats below it are compared in the picture
SPEED_COLUMNS = (
    Column(title="codec", field="codec", show=lambda codec: _label(codec)),
    Column(title="encode", field="encode_gb_s", show="{:.2f}".format),
    Column(title="of\ncopy", field="encode_share_of_copy", show="{:.0%}".format),
    Column(title="of its\nrate", field="encode_share_of_rate", show="{:.0%}".format),
    Column(title="decode", field="decode_gb_s", show="{:.2f}".format),
    Column(title="of\ncopy", field="decode_share_of_copy", show="{:.0%}".format),
    Column(title="of its\nrate", field="decode_share_of_rate", show="{:.0%}".format),
    Column(title="check-\nsum", field="checksum_gb_s", show="{:.1f}".format),
    Column(title="adds", field="checksum_share", show="{:.2%}".format),
    Column(title="both, of\na layer", field="share_of_layer", show="{:.2%}".format),
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
    parts = [table(rows, SPEED_COLUMNS, title=title) for title, rows in zip(titles, speeds.values(), strict=True)]
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
