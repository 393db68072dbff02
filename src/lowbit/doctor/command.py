"""`lowbit doctor`: check several machines before they train together, and write cluster.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

from lowbit.config.atomic import check_written, write_unless_changed
from lowbit.config.files import in_toml
from lowbit.doctor.facts import Described
from lowbit.doctor.findings import findings, rounded
from lowbit.doctor.settings import DoctorSettings, check_place
from lowbit.doctor.survey import MachineSurvey, Measured, take
from lowbit.plan.cluster import Cluster
from lowbit.report import Column, Command, Row, Table, check_output

_PROGRAM = "lowbit doctor"


def examine(settings: DoctorSettings) -> tuple[list[Row], bool]:
    """Check the machines; return the rows of the page, equal on all of them, and whether this one writes `output`.

    Raises:
        ConfigError: no place to meet, or an output that somebody has changed.
        ConnectionError: the machines cannot meet there.
        ValueError: an output that cannot be written.
    """
    check_place(settings)
    if settings.output:
        check_output(Path(settings.output))
        check_written(settings.output, _PROGRAM, overwrite=settings.overwrite)
    survey = take(settings)
    return rows_from(survey), survey.first


def rows_from(survey: MachineSurvey) -> list[Row]:
    """The rows of the page, of the kinds "finding", "machine" and "link"; None where nothing could be measured."""
    machines, links = [], []
    auto = {machine.facts.connections for machine in survey.machines.values()} == {"auto"}

    def rate(link: Measured) -> float | None:  # that training will reach
        return max(link.mbit, link.better_mbit if auto else 0.0) or None

    for machine in survey.machines.values():
        own = machine.facts
        described = {each.name: getattr(own, each.name) for each in fields(Described)}
        described["address"] = own.gloo_address if own.gloo_address in machine.reached else own.address
        machines.append({"kind": "machine", **described, **vars(machine.speed), "clock_ms": machine.clock_ms})
    for (a, first), (b, second) in combinations(survey.machines.items(), 2):
        there, back = (survey.links.get(pair, Measured()) for pair in ((a, b), (b, a)))
        links.append({
            "kind": "link", "first": first.facts.name, "second": second.facts.name, "mbit": rate(there),
            "back_mbit": rate(back), "rtt_ms": there.rtt_ms or None, "loss": there.loss, "back_loss": back.loss,
        })  # fmt: skip
    return [*({"kind": "finding", **vars(each)} for each in findings(survey)), *machines, *links]


def write_output(settings: DoctorSettings, rows: Sequence[Row]) -> str:
    """Write `output`, and return a line that says what it contains; empty without an output."""
    if not settings.output:
        return ""
    if not (text := cluster_toml(rows)):
        return f"{settings.output} was not written: the speed of no machine is known."
    Cluster.from_mapping(tomllib.loads(text))
    write_unless_changed(settings.output, _PROGRAM, text, overwrite=settings.overwrite)
    recipe = f" --recipe {settings.recipe}" if settings.recipe else ""
    return f"{settings.output} has the machines and links: lowbit plan pipeline {settings.output}{recipe}"


def cluster_toml(rows: Sequence[Row]) -> str:
    """The text of the file; empty if the speed of no machine is known."""
    machines = [row for row in rows if row["kind"] == "machine" and (row["layer_seconds"] or row["tflops"])]
    names = {machine["name"] for machine in machines}
    links = [
        row for row in rows
        if row["kind"] == "link" and row["mbit"] and row["back_mbit"] and {row["first"], row["second"]} <= names
    ]  # fmt: skip
    return "".join(map(_table, (*machines, *links)))


def _table(row: Row) -> str:
    if row["kind"] == "link":
        values, names = {"between": (row["first"], row["second"])}, ("mbit", "back_mbit", "rtt_ms")
    else:
        values = {"name": row["name"], "address": row["address"], "cores": max(1, row["cores"]), "gpus": row["gpus"]}
        values["memory"] = f"{row['memory_bytes'] / 1e9:.1f}gb" if row["memory_bytes"] >= 1e8 else ""
        names = ("layer_seconds", "layer_tokens", "layer_overhead", "tflops", "optimizer_ns", "coding")
    values |= {name: float(f"{row[name]:.4g}") if isinstance(row[name], float) else row[name] for name in names}
    lines = [f"{name} = {in_toml(value)}" for name, value in values.items() if value not in (None, "", 0, ())]
    return "\n".join(["", f"[[{row['kind']}]]", *lines, ""])


def measure(settings: DoctorSettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Check the machines; yields the rows of the page once."""
    yield examine(settings)[0]


def _of(kind: str) -> Any:
    return lambda rows: [row for row in rows if row["kind"] == kind]


def _loss(row: Row) -> str | None:
    shares = [f"{share:.1%}" for share in (row["loss"], row["back_loss"]) if share is not None]
    return " / ".join(shares) or None


COMMAND = Command(
    name="doctor",
    summary="Check several machines before they train together, and write cluster.toml.",
    examples=(
        "lowbit doctor run.toml --meet 192.168.1.10:29400",
    ),
    settings=DoctorSettings,
    measure=measure,
    live=False,
    tables=(
        Table(
            rows=_of("finding"),
            columns=(
                Column("", "level"), Column("machine", "machine"), Column("what is wrong", "what"),
                Column("how to fix it", "fix"),
            ),
        ),
        Table(
            rows=_of("machine"),
            columns=(
                Column("machine", "name"), Column("address", "address"),
                Column("computes on", lambda r: f"{r['gpus']} x {r['device']}" if r["gpus"] else f"{r['cores']} cores"),
                Column("free", lambda row: row["memory_bytes"] / 1e9, "{:.1f} GB"), Column("PyTorch", "torch"),
                Column("lowbit", "lowbit"), Column("clock", "clock_ms", lambda ms: f"{round(ms):+d} ms"),
                Column("layer", lambda row: 1e3 * row["layer_seconds"] or None, "{:.1f} ms"),
            ),
        ),
        Table(
            rows=_of("link"),
            columns=(
                Column("from", "first"), Column("to", "second"), Column("Mbit/s", "mbit", rounded),
                Column("back", "back_mbit", rounded), Column("round trip", "rtt_ms", "{:.1f} ms"),
                Column("sent again", _loss),
            ),
        ),
    ),
)  # fmt: skip
