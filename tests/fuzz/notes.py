"""What an attacking process leaves for the one that started it, which may outlive it."""

from __future__ import annotations

import json
import mmap
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

NOTE = 4096


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A case that was not survived.

    Attributes:
        number: which case of the seed; text: what it is; why: what went wrong, or how the process ended.
    """

    number: int
    text: str
    why: str


@dataclass(kw_only=True)
class Outcome:
    """Cases survived, by target; and those that were not."""

    survived: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Count what another process did."""
        self.survived.update(other.survived)
        self.faults += other.faults

    def save(self, path: Path) -> None:
        """As JSON."""
        content = {"survived": self.survived, "faults": [asdict(fault) for fault in self.faults]}
        path.write_text(json.dumps(content))

    @staticmethod
    def load(path: Path) -> Outcome:
        """What was saved; nothing if nothing was."""
        content = json.loads(path.read_text()) if path.exists() else {"survived": {}, "faults": []}
        faults = [Fault(**fault) for fault in content["faults"]]
        return Outcome(survived=Counter(content["survived"]), faults=faults)


class Note:
    """What a process is at, in a file that outlives it: the number of the case, then its text."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(NOTE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), NOTE)

    def write(self, number: int, text: str) -> None:
        """Before it is tried."""
        line = f"{number}\n{text}".encode()[: NOTE - 1]
        self._map[: len(line) + 1] = line + b"\0"

    def read(self) -> tuple[int, str]:
        """The last one; -1 if there was none."""
        line = self._map[:].split(b"\0")[0].decode(errors="replace")
        number, _, text = line.partition("\n")
        return int(number or -1), text
