"""The declaration of a command that measures, the runner that all such commands share, and its results as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.config.atomic import write
from lowbit.report.tables import Baseline, Row, Table, compare
from lowbit.terminal import console, filtered_again

_LOG_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Command:
    """The declaration of a command: settings, measurement, and how rows are shown.

    Args:
        name: of the command, such as "bench pipeline".
        summary: one line for the help.
        examples: whole command lines for the help.
        settings: a frozen dataclass whose fields are options.
        measure: takes settings and the rows of an earlier file; repeatedly yields all rows so far.
        tables: the first is also shown during the measurement.
        charts: `lowbit_lab.charts` of the rows, one below the other in one picture.
        baselines: comparisons that are added to the rows.
        key: fields that identify a row; with a key, rows of an earlier `--json` file are kept.
        free: settings that may differ from those of that file.
        live: show rows as they come; False for a command that shows its own progress.
    """

    name: str
    summary: str
    settings: type
    measure: Callable[[Any, Sequence[Row]], Iterator[Sequence[Row]]]
    tables: Sequence[Table]
    charts: Sequence[Any] = ()
    examples: tuple[str, ...] = ()
    baselines: Sequence[Baseline] = ()
    key: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    live: bool = True


def run(
    command: Command, settings: Any, *, file: Path | None = None, on_rows: Callable[[Sequence[Row]], None] | None = None
) -> Report:
    """Run the measurement, and return the report.

    Args:
        file: all rows are written to it as they come; a command with a `key` first reads an earlier call's rows.
        on_rows: called with all rows so far whenever there are new ones.

    Raises:
        ValueError: `file` holds rows with other settings, or the command refuses its settings.
    """
    about = machine()
    rows = compare(earlier_rows(command, settings, file) if file and command.key else [], command.baselines)
    for current in command.measure(settings, rows):
        rows = compare(current, command.baselines)
        if file:
            Report(command=command.name, settings=settings, machine=about, rows=rows).write_json(file)
        if on_rows:
            on_rows(rows)
    return Report(command=command.name, settings=settings, machine=about, rows=rows)


def earlier_rows(command: Command, settings: Any, file: Path) -> list[Row]:
    """Read the rows of an earlier call with the same settings; none if the file does not exist.

    Raises:
        ValueError: the file holds no report of this command, or rows of other settings.
    """
    if not file.exists():
        return []
    earlier = Report.read_json(file, command=command.name, fields=command.key)
    before = flat(plain(command.settings())) | flat(earlier.settings)  # settings added since had their defaults
    for name, value in flat(plain(settings)).items():
        if name.partition(".")[0] not in command.free and before.get(name) != value:
            raise ValueError(
                f"{file} holds rows with {name} {before.get(name)!r}; this call has {value!r}: name another file"
            )
    return list(earlier.rows)


def execute(command: Command, settings: Any, *, json: Path | None = None) -> Report:
    """Run a command on a terminal: show rows as they come and at the end, and write them.

    With several ranks (`RANK`), only rank 0 shows and writes.

    Raises:
        ValueError: `json` cannot be written, which is checked first, or the command refuses its settings.
    """
    check_output(json)
    if os.environ.get("RANK", "0") != "0":
        return run(command, settings)
    with _shown(command) if command.live else nullcontext() as show:
        report = run(command, settings, file=json, on_rows=show)
    for table in command.tables:
        console().print(table.render(report.rows))
    return report


@contextmanager
def _shown(command: Command) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Show rows as they come: the first table on a terminal, elsewhere an occasional line."""
    from rich.live import Live

    screen = console(stderr=True)
    if screen.is_terminal:
        # No refresh: its thread would slow down the measurement.
        with Live(console=screen, transient=True, auto_refresh=False) as live, filtered_again():
            yield lambda rows: live.update(command.tables[0].render(rows), refresh=True)
        return
    began = last = time.monotonic()

    def log(rows: Sequence[Row]) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _LOG_SECONDS:
            last = now
            count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
            sys.stderr.write(f"{command.name}: {count} after {now - began:.0f} s\n")
            sys.stderr.flush()

    yield log


def check_output(path: Path | None) -> None:
    """Raise ValueError unless a file can be written; for use before a long run whose results go there."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # an atomic write would replace a device by a file
            raise ValueError(f"{path} cannot be written: it is a folder or a device; allowed: a file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}."):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted names."""
    items: dict[str, Any] = {}
    for name, value in values.items():
        items |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return items


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a command, such as "bench pipeline". settings: a mapping or a dataclass."""

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
        write(path, json.dumps(plain(vars(self)), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read_json(cls, path: Path | str, *, command: str = "", fields: Collection[str] = ()) -> Report:
        """Read a report that `write_json` wrote, of this command and with at least these fields in each row, if given.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        try:
            values = json.loads(Path(path).read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}): name another file") from None
        match values:
            case {"command": str(), "settings": dict(), "machine": dict(), "rows": [*rows]} if (
                len(values) == 4
                and command in ("", values["command"])
                and all(isinstance(row, dict) and row.keys() >= set(fields) for row in rows)
            ):
                return cls(**values)
        kind = f"of `lowbit {command}`" if command else "that lowbit wrote"
        raise ValueError(f"{path} does not hold a report {kind}: name another file")


def machine() -> dict[str, Any]:
    """Describe the hardware and versions that figures depend on, without name, address or path of the machine."""
    import torch

    import lowbit

    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    about = {
        "cpu": next(names, platform.processor() or platform.machine()),
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
        about["gpu"] = torch.cuda.get_device_name()
    return about


def plain(value: Any) -> Any:
    """Convert a value to JSON's own types."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__str__ is not object.__str__:  # such as a link
            return str(value)
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)
