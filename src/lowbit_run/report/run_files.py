"""Read what a folder of `lowbit train` holds; a file that cannot be read is left out and named."""

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG, METRICS, EVALUATIONS = "config.json", "metrics.jsonl", "evaluations.jsonl"
SUMMARY, RANKS, TRACE = "summary.json", "ranks.json", "trace/all-ranks.json.gz"
_MOST_BYTES = 256 << 20  # of a file of lines
_MOST_UNPACKED, _MOST_VALUES = 64 << 20, 4_000_000  # of a trace: an event takes 200 bytes and has a dozen values


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run.

    Attributes:
        config, summary, ranks: as they were written; empty if missing.
        steps, evaluations: lines of metrics and of held-out scores, by ascending step.
        spans: Chrome trace events of all ranks.
        problems: what could not be read, one line each.
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    ranks: Mapping[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    spans: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the configuration by "section.key"."""
        sections = {name: values for name, values in self.config.items() if isinstance(values, dict)}
        return {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}


def read_run(folder: Path) -> RunFiles:
    """Read a folder of `lowbit train`. Raises ValueError: it is not a run's folder, or nothing in it can be read."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {problem}; allowed: the folder of a run or a file of results of lowbit")
    problems: list[str] = []
    config, summary, ranks = (_part(folder / name, _object, problems, {}) for name in (CONFIG, SUMMARY, RANKS))
    steps = _part(folder / METRICS, lambda data: _lines(data, METRICS, problems), problems, [])
    evaluations = _part(folder / EVALUATIONS, lambda data: _lines(data, EVALUATIONS, problems), problems, [])
    if not (config or summary or steps):
        reason = f": {problems[0]}" if problems else ""
        raise ValueError(f"{folder} holds no run of lowbit that can be shown{reason}; allowed: a run.output folder")
    spans = _part(folder / TRACE, _spans, problems, [])
    if not config:
        problems.append(f"{CONFIG} is missing or cannot be read: no settings")
    if not summary:
        settings = config.get("run")
        of = f" of {settings['steps']}" if isinstance(settings, dict) and "steps" in settings else ""
        last = steps[-1]["step"] if steps else 0
        problems.append(f"The run did not end: {last}{of} steps are recorded, and there is no {SUMMARY}.")
    return RunFiles(
        folder=folder, config=config, summary=summary, ranks=ranks, steps=steps, evaluations=evaluations, spans=spans,
        problems=problems,
    )  # fmt: skip


def number(value: Any) -> float | None:
    """Return the value if it is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None


def _part(path: Path, parse: Callable[[bytearray], Any], problems: list[str], absent: Any) -> Any:
    """Parse a file; return `absent` if it is missing, or if it cannot be read, which is a problem."""
    if not path.is_file():
        return absent
    try:
        return parse(_read(path))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError, KeyError, TypeError) as error:
        problems.append(f"{path.name} cannot be read and is left out: {' '.join(str(error).split())[:200]}")
        return absent


def _read(path: Path) -> bytearray:
    """Read a file, unpacked; refuse one that is too large, or would be too large as values."""
    packed = path.suffix == ".gz"
    most = _MOST_UNPACKED if packed else _MOST_BYTES
    data = bytearray()
    with gzip.open(path) if packed else path.open("rb") as file:
        while piece := file.read(min(1 << 20, most + 1 - len(data))):  # gzip holds several times what it reads at once
            data += piece
    if len(data) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    if packed and (values := sum(map(data.count, (b",", b"[", b"{")))) > _MOST_VALUES:
        raise ValueError(f"it has {values} values; allowed: at most {_MOST_VALUES}")
    return data


def _object(data: bytearray) -> dict[str, Any]:
    values = json.loads(data)
    if not isinstance(values, dict):
        raise ValueError("it holds no object")
    return values


def _lines(data: bytearray, name: str, problems: list[str]) -> list[dict[str, Any]]:
    """Read lines with a step, sorted by step; the last line of a step counts. An unfinished last line is left out."""
    by_step: dict[int, dict[str, Any]] = {}
    bad = 0
    for line in data.split(b"\n")[:-1]:
        try:
            values = json.loads(line)
            if type(values["step"]) is not int:
                raise ValueError("a step is no integer")
            by_step[values["step"]] = values
        except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
            bad += 1
    if bad:
        problems.append(f"{name}: {bad} {'line' if bad == 1 else 'lines'} cannot be read and are left out")
    return [by_step[step] for step in sorted(by_step)]


def _spans(data: bytearray) -> list[dict[str, Any]]:
    spans = [event for event in _object(data)["traceEvents"] if event["ph"] == "X"]
    for span in spans:
        texts = isinstance(span["name"], str) and isinstance(span["cat"], str) and isinstance(span["args"], dict)
        if not texts or any(number(span[key]) is None for key in ("ts", "dur", "pid", "tid")):
            raise ValueError("an event has no name, kind, time or arguments")
    return spans
