"""Charts of the library's own commands, by name: the library declares no pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lowbit.codecs.names import pair_name
from lowbit.report import Row
from lowbit_lab.charts.bars import Bars
from lowbit_lab.charts.charts import Chart


def _series(fields: Mapping[str, str]) -> Callable[[Sequence[Row]], Sequence[Row]]:
    """Return what makes a row for each stage and field; fields that are 16 everywhere are left out."""

    def long(rows: Sequence[Row]) -> Sequence[Row]:
        rows = [row for row in rows if "choices" not in row]
        shown = {name: field for name, field in fields.items() if any(row[field] != 16 for row in rows)}
        return [{**row, "series": name, "y": row[field]} for row in rows for name, field in shown.items()]

    return long


_stage = "stage {stage}\n{held} held".format_map
CHARTS: dict[str, Sequence[Chart]] = {
    "plan memory": (
        Bars(
            group=_stage,
            series="series",
            y=lambda row: row["y"] / 1e6,
            label="MB",
            title="Saved activations at the peak of each stage",
            rows=_series({"plain BF16": "bf16_bytes", "this plan": "saved_bytes", "4 bits everywhere": "int4_bytes"}),
        ),
        Bars(
            group=_stage,
            series="series",
            y="y",
            label="bits",
            title="Bits by layer type",
            rows=_series({kind: kind for kind in ("norm", "mlp", "linear")}),
        ),
    ),
    "plan pipeline": (
        Bars(
            group=lambda row: "",
            series=lambda row: ", ".join(map(pair_name, row["formats"])),
            y="tokens_per_second",
            label="tokens per second",
            title="Predicted training speed by boundary format",
        ),
    ),
}
