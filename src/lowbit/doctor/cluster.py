"""Writes `cluster.toml`, which `lowbit plan pipeline` reads, from the rows of a page."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lowbit.config.atomic import check_written, write_unless_changed
from lowbit.config.files import in_toml
from lowbit.doctor.messages import LinkRow, MachineRow
from lowbit.plan.cluster import Cluster
from lowbit.report import check_output

_PROGRAM = "lowbit doctor"


def check_file(path: str, *, overwrite: bool) -> None:
    """Check that the file can be written, before the measurements begin.

    Raises:
        ConfigError: it exists, and has been changed since `lowbit doctor` wrote it.
        ValueError: it cannot be written.
    """
    check_output(Path(path))
    check_written(path, _PROGRAM, overwrite=overwrite)


def write_cluster(path: str, rows: Sequence[Any], *, overwrite: bool) -> bool:
    """Write the machines and links that are known; return False if no machine has a known speed.

    Raises:
        ConfigError, ValueError: as `check_file`.
    """
    check_file(path, overwrite=overwrite)
    text = cluster_toml(rows)
    if not text:
        return False
    Cluster.from_mapping(tomllib.loads(text))
    write_unless_changed(path, _PROGRAM, text, overwrite=overwrite)
    return True


def cluster_toml(rows: Sequence[Any]) -> str:
    """The text of the file; empty if the speed of no machine is known."""
    machines = [row for row in rows if isinstance(row, MachineRow) and (row.layer_seconds or row.tflops)]
    names = [machine.name for machine in machines]
    links = [
        row for row in rows
        if isinstance(row, LinkRow) and row.mbit and row.back_mbit and {row.first, row.second} <= {*names}
    ]  # fmt: skip
    return "".join(f"\n{line}\n" for row in (*machines, *links) for line in ["\n".join(_lines(row))])


def _lines(row: MachineRow | LinkRow) -> Iterator[str]:
    values: dict[str, Any]
    if isinstance(row, LinkRow):
        yield "[[link]]"
        values, names = {"between": (row.first, row.second)}, ("mbit", "back_mbit", "rtt_ms")
    else:
        yield "[[machine]]"
        values = {"name": row.name, "address": row.address, "cores": max(1, row.cores), "gpus": row.gpus}
        values["memory"] = f"{row.memory_bytes / 1e9:.1f}gb" if row.memory_bytes >= 1e8 else ""
        names = ("layer_seconds", "layer_tokens", "layer_overhead", "tflops", "optimizer_ns", "coding")
    for name, value in {**values, **{name: getattr(row, name) for name in names}}.items():
        if value not in (None, "", 0, ()):
            yield f"{name} = {in_toml(float(f'{value:.4g}') if isinstance(value, float) else value)}"
