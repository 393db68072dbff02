"""`lowbit doctor`: check several machines before they train together, and write cluster.toml."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any

from lowbit.config import ConfigError
from lowbit.doctor.cluster import check_file, write_cluster
from lowbit.doctor.findings import findings
from lowbit.doctor.hosts import from_hosts
from lowbit.doctor.messages import AnyRow, Described, Finding, LinkRow, MachineRow, Measured, read
from lowbit.doctor.settings import DoctorSettings
from lowbit.doctor.survey import MachineSurvey, take
from lowbit.job.process_group import interfaces
from lowbit.report import Column, Command, Row, Table


def examine(settings: DoctorSettings) -> tuple[list[Any], bool]:
    """Check the machines; return the rows of the page, equal on all of them, and whether this one writes `output`.

    Raises:
        ConfigError: no place to meet, or an output that somebody has changed.
        ConnectionError: the machines cannot meet there.
    """
    try:
        _ = settings.count, settings.place if not settings.hosts else None
    except ConfigError as error:
        here = ", ".join(f"{address} ({name})" for name, address in interfaces().items() if address != "127.0.0.1")
        raise ConfigError(f"{error}; this machine has {here or 'no address'}") from None
    if settings.output:
        check_file(settings.output, overwrite=settings.overwrite)
    if settings.hosts:
        values, problems = from_hosts(settings)
        return [*problems, *read(list[AnyRow], values)], True
    survey = take(settings)
    return rows_from(survey), survey.first


def rows_from(survey: MachineSurvey) -> list[Any]:
    """The rows of the page."""
    machines, links = [], []
    auto = {machine.facts.connections for machine in survey.machines.values()} == {"auto"}

    def rate(link: Measured) -> float | None:
        """What training will get."""
        return max(link.mbit, link.better_mbit if auto else 0.0) or None

    for machine in survey.machines.values():
        own = machine.facts
        described = {each.name: getattr(own, each.name) for each in fields(Described)}
        described["address"] = own.gloo_address if own.gloo_address in machine.reached else own.address
        machines.append(MachineRow(**described, **vars(machine.speed), clock_ms=machine.clock_ms))
    for (a, first), (b, second) in combinations(survey.machines.items(), 2):
        there, back = (survey.links.get(pair, Measured()) for pair in ((a, b), (b, a)))
        links.append(LinkRow(
            first=first.facts.name, second=second.facts.name, mbit=rate(there), back_mbit=rate(back),
            rtt_ms=there.rtt_ms or None, loss=there.loss, back_loss=back.loss,
        ))  # fmt: skip
    return [*findings(survey), *machines, *links]


def stops(rows: Sequence[Any]) -> bool:
    """Whether anything would stop the training."""
    return any(isinstance(row, Finding) and row.level == "stop" for row in rows)


def write_output(settings: DoctorSettings, rows: Sequence[Any]) -> str:
    """Write `output`, and return a line that says what it contains; empty without an output."""
    if not settings.output:
        return ""
    if not write_cluster(settings.output, rows, overwrite=settings.overwrite):
        return f"{settings.output} was not written: the speed of no machine is known."
    recipe = f" --recipe {settings.recipe}" if settings.recipe else ""
    return f"{settings.output} has the machines and links: lowbit plan pipeline {settings.output}{recipe}"


def measure(settings: DoctorSettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Check the machines; yields the rows of the page once."""
    yield [vars(row) for row in examine(settings)[0]]


def _of(kind: str) -> Any:
    return lambda rows: [row for row in rows if row["kind"] == kind]


def _device(row: Row) -> str:
    return f"{row['gpus']} x {row['device']}" if row["gpus"] else f"{row['cores']} cores"


def _memory(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _loss(row: Row) -> str | None:
    shares = [f"{share:.1%}" for share in (row["loss"], row["back_loss"]) if share is not None]
    return " / ".join(shares) or None


COMMAND = Command(
    name="doctor",
    summary="Check several machines before they train together, and write cluster.toml.",
    examples=(
        "lowbit doctor --meet 192.168.1.10:29400",
        "lowbit doctor --host 192.168.1.10,192.168.1.11 --program venv/bin/lowbit",
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
                Column("machine", "name"), Column("address", "address"), Column("computes on", _device),
                Column("free", "memory_bytes", _memory), Column("PyTorch", "torch"), Column("lowbit", "lowbit"),
                Column("clock", "clock_ms", "{:+.0f} ms"),
                Column("layer", lambda row: 1e3 * row["layer_seconds"] or None, "{:.1f} ms"),
            ),
        ),
        Table(
            rows=_of("link"),
            columns=(
                Column("from", "first"), Column("to", "second"), Column("Mbit/s", "mbit", "{:.3g}"),
                Column("back", "back_mbit", "{:.3g}"), Column("round trip", "rtt_ms", "{:.1f} ms"),
                Column("sent again", _loss),
            ),
        ),
    ),
)  # fmt: skip
