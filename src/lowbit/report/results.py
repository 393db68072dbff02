"""Results as JSON: rows, with settings and machine of the measurement."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.report.rows import Row


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
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(plain(vars(self)), indent=1, allow_nan=False) + "\n", "utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

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

    about = {
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


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
