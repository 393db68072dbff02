"""`lowbit doctor`: check several machines before they train together, and write cluster.toml."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lowbit.config import ConfigError
from lowbit.doctor.channel import StrangerError, read
from lowbit.doctor.cluster import check_file, write_cluster
from lowbit.doctor.facts import interfaces
from lowbit.doctor.findings import findings
from lowbit.doctor.hosts import from_hosts
from lowbit.doctor.meeting import meet
from lowbit.doctor.messages import Finding, LinkRow, MachineRow
from lowbit.doctor.settings import DoctorSettings
from lowbit.doctor.survey import Survey, tell
from lowbit.report import Column, Command, Row, Table

_KINDS: dict[str, Any] = {"finding": Finding, "machine": MachineRow, "link": LinkRow}


def examine(settings: DoctorSettings) -> tuple[list[Any], bool]:
    """Check the machines: the rows of the page, equal on all of them, and whether this one writes `output`.

    Raises:
        ConfigError: no place to meet, or an output that somebody has changed.
        MeetingFailed: the machines cannot meet there.
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
        return [*problems, *rows_of(values)], True
    survey, values = meet(settings)
    if survey is None:
        return rows_of(values), False
    rows = rows_from(survey)
    tell(survey, [vars(row) for row in rows])
    return rows, not survey.alone


def rows_from(survey: Survey) -> list[Any]:
    """The rows of the page."""
    machines, links = [], []
    for seat in survey.seats:
        own, speed = seat.facts, seat.speed
        reached = {address for (_, number), states in survey.states.items() if survey.seats[number] is seat
                   for (address, _), state in states.items() if state == "open"}  # fmt: skip
        names = ("name", "interface", "device", "cores", "gpus", "memory_bytes", "python", "torch", "lowbit")
        speeds = ("layer_seconds", "layer_tokens", "layer_overhead", "tflops", "optimizer_ns", "coding")
        machines.append(MachineRow(
            address=own.gloo_address if own.gloo_address in reached else own.address, clock_ms=seat.clock_ms,
            **{name: getattr(own, name) for name in names}, **{name: getattr(speed, name) for name in speeds},
        ))  # fmt: skip
    for a, first in enumerate(survey.seats):
        for b, second in list(enumerate(survey.seats))[a + 1 :]:
            rate, back = survey.rates.get((a, b)), survey.rates.get((b, a))
            links.append(LinkRow(
                first=first.facts.name, second=second.facts.name,
                mbit=rate.mbit if rate else None, back_mbit=back.mbit if back else None,
                rtt_ms=min((each.rtt_ms for each in (rate, back) if each), default=None),
                loss=rate.loss if rate else None, back_loss=back.loss if back else None,
            ))  # fmt: skip
    return [*findings(survey), *machines, *links]


def rows_of(values: Sequence[Any]) -> list[Any]:
    """Rows that another machine sent.

    Raises:
        StrangerError: they are something else.
    """
    rows = []
    for value in values:
        kind = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            raise StrangerError("the first machine sent a page with unknown rows")
        rows.append(read(_KINDS[kind], value))
    return rows


def stops(rows: Sequence[Any]) -> bool:
    """Whether anything would stop the training."""
    return any(isinstance(row, Finding) and row.level == "stop" for row in rows)


def write_output(settings: DoctorSettings, rows: Sequence[Any]) -> str:
    """Write `output`, and tell in a line what is in it; empty without one."""
    if not settings.output:
        return ""
    if not write_cluster(settings.output, rows, overwrite=settings.overwrite):
        return f"{settings.output} was not written: the speed of no machine is known."
    return f"{settings.output} has the machines and links: lowbit plan pipeline {settings.output}"


def measure(settings: DoctorSettings, earlier: Sequence[Row] = ()) -> Iterator[Sequence[Row]]:
    """Check the machines; yields the rows of the page once."""
    yield [vars(row) for row in examine(replace(settings))[0]]


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
                Column("how to mend it", "mend"),
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
