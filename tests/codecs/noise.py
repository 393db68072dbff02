"""What errors may be."""

from __future__ import annotations

import math


def of_steps(bits: int, rounding: str = "nearest") -> float:
    """Relative error that uniform noise of half a step gives, with a range of at most 6 deviations."""
    return 6 / (2**bits - 1 - (bits == 2)) / math.sqrt(12 / (2 if rounding == "stochastic" else 1)) * 1.2
