"""Thresholds: the number of rows from which on a sum is faster in few bits than by the engine's own all-reduce."""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from lowbit.codecs.base import Codec

log = logging.getLogger(__name__)
Choice = Literal["plain", "one_shot", "two_shot"]
"""How a sum is computed: by the engine's own all-reduce in the model's dtype, or coded by one of two algorithms."""
Steps = tuple[tuple[int, Choice], ...]
"""Numbers of rows, ascending, and the choice from each of them on. With fewer rows than the first: "plain"."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Measurements of one link, and the choices that follow from them; the same on all ranks.

    `low_bit_` measures them unless `SumSettings.small` is a number or earlier thresholds:

        installed = low_bit_(model, calibration)
        installed.thresholds.save("calibration-tp2.thresholds.json")
        ...
        low_bit_(model, calibration, settings=SumSettings(small=Thresholds.load("calibration-tp2.thresholds.json")))

    Args:
        ranks: of the group. steps: by kind of sum (features, dtype, whole bits of the format).
        milliseconds: by kind, measured number of rows and choice: the slowest rank's median.
        mbit: rate of the engine's all-reduce at the largest size, in 10^6 bits per second. date: in UTC.
    """

    ranks: int
    steps: Mapping[str, Steps]
    milliseconds: Mapping[str, Mapping[str, Mapping[str, float]]]
    mbit: float
    date: str

    @cached_property
    def least(self) -> int:
        """The fewest rows from which on sums of any kind are coded; 0 if none is."""
        return min((steps[0][0] for steps in self.steps.values() if steps), default=0)

    def choice(self, kind: str, rows: int) -> Choice:
        """Return the choice for a sum of `rows` rows: "plain" for an unmeasured kind, which is logged once."""
        if kind not in self.steps:
            _warn_unmeasured(kind, ", ".join(self.steps))
            return "plain"
        steps = self.steps[kind]
        index = bisect_right([least for least, _ in steps], rows)
        return steps[index - 1][1] if index else "plain"

    def save(self, path: str | Path) -> None:
        """Write a JSON file, atomically; one rank is enough."""
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Thresholds:
        """Read a file that `save` wrote.

        Raises:
            ValueError: the file does not hold thresholds.
        """
        try:
            values: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
            steps = {kind: tuple((int(n), name) for n, name in s) for kind, s in values["steps"].items()}
            taken = [step for kind in steps.values() for step in kind]
            if int(values["ranks"]) < 2 or any(rows < 1 or name not in get_args(Choice) for rows, name in taken):
                raise ValueError("fewer than 2 ranks, fewer than 1 row, or an unknown choice")
            return cls(**{**values, "steps": steps})
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} does not hold thresholds: {type(error).__name__}: {error}; allowed: what Thresholds.save wrote"
            ) from error

    def __str__(self) -> str:
        parts = []
        for kind, steps in self.steps.items():
            parts.append(f"{kind}: {', '.join(f'{name} from {rows} rows' for rows, name in steps) or 'never coded'}")
        return f"{'; '.join(parts)} ({self.ranks} ranks, {self.mbit:.0f} Mbit/s, {self.date})"


def kind_of(width: int, dtype: torch.dtype, codec: Codec) -> str:
    """Name the kind of a sum: everything but its rows on which its time depends."""
    bits = codec.bits_per_element((64, width))
    return f"{width} features, {str(dtype).removeprefix('torch.')}, {bits:.0f} bits"


@cache
def _warn_unmeasured(kind: str, measured: str) -> None:
    log.warning(
        "sums of %s are not coded: thresholds were measured for %s; give the model its dtype before low_bit_, or a "
        "number as small", kind, measured,
    )  # fmt: skip
