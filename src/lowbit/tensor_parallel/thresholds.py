"""Thresholds: the number of rows from which on a sum is faster in few bits than by the engine's own all-reduce."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

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
        ...
        low_bit_(another, calibration, settings=SumSettings(small=installed.thresholds))

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
