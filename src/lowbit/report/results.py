"""What a benchmark found: rows with the settings and the machine they belong to, for people and for scripts."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]
TERMINAL = 80  # columns that a table should do with


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one command.

    Args:
        command: what was run, such as "bench pipeline".
        settings: how, as a mapping or a dataclass.
        machine: on what, from `machine()`.
        rows: one mapping for each thing measured.
    """

    command: str
    settings: Any
    machine: Mapping[str, Any]
    rows: Sequence[Row]

    def write_json(self, path: Path | str) -> None:
        """Write `{"command", "settings", "machine", "rows"}`; a reader never sees half a file.

        Numbers that JSON does not have (NaN, infinities) become null.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        whole = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        try:
            part.write_text(json.dumps(_plain(whole), indent=1, allow_nan=False) + "\n", "utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def read_json(cls, path: Path | str, *, command: str = "", fields: Collection[str] = ()) -> Report:
        """A report that `write_json` wrote: of any command, or of this one, with at least these fields in each row.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        try:
            whole = json.loads(Path(path).read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}): name another file") from None
        match whole:
            case {"command": str(), "settings": dict(), "machine": dict(), "rows": [*rows]} if (
                len(whole) == 4
                and command in ("", whole["command"])
                and all(isinstance(row, dict) and row.keys() >= set(fields) for row in rows)
            ):
                return cls(**whole)
        kind = f"of `lowbit {command}`" if command else "that lowbit wrote"
        raise ValueError(f"{path} holds no report {kind}: name another file")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Args:
        title: what stands above it.
        field: which value of a row stands in it.
        show: makes text of the value; a missing value is shown as a dash.
    """

    title: str
    field: str
    show: Callable[[Any], str] = str


def table(rows: Sequence[Row], columns: Sequence[Column], *, title: str = "") -> Table:
    """Rows as a rich table; numbers to the right. A column without any value is left out.

    Where there is little room, columns move together, and text goes on in the next line; numbers stay whole.
    """
    from rich import box
    from rich.table import Table

    columns = [c for c in columns if any(row.get(c.field) is not None for row in rows)]
    lines = [[_cell(row, column) for column in columns] for row in rows]
    wide = sum(
        max(map(len, (*column.title.split("\n"), *(line[i] for line in lines)))) + 2 for i, column in enumerate(columns)
    )
    result = Table(
        title=title or None,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, int(wide < TERMINAL), 0, 0),
        pad_edge=False,
    )
    for column in columns:
        numeric = any(isinstance(row.get(column.field), int | float) for row in rows)
        justify = "right" if numeric else "left"
        result.add_column(column.title, justify=justify, no_wrap=numeric, overflow="fold")
    for line in lines:
        result.add_row(*line)
    return result


def _cell(row: Row, column: Column) -> str:
    value = row.get(column.field)
    return "–" if value is None else column.show(value)


def machine() -> dict[str, Any]:
    """What figures depend on, and nothing that identifies the machine: no name, no address, no path."""
    import torch

    import lowbit

    found = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lowbit": lowbit.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _plain(value: Any) -> Any:
    """The value in JSON's own types."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)
