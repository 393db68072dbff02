"""Formats by name, as what `lowbit.tensor_parallel` takes: a calibration, or one codec for all boundaries."""

from __future__ import annotations

from lowbit.codecs import Codec, parse
from lowbit.evaluate.settings import LOW_BIT
from lowbit.tensor_parallel import Calibration

CALIBRATED = ("int4", LOW_BIT, f"{LOW_BIT}-distributed")
"""Formats whose scales are measured beforehand; other names are codecs, whose scales travel."""


def make(name: str, calibration: Calibration | None) -> Calibration | Codec:
    """What partial sums travel in.

    Args:
        name: one of `CALIBRATED`, or what `lowbit.codecs.parse` takes.
        calibration: for the former.

    Raises:
        ValueError: an unknown name.
    """
    if name not in CALIBRATED:
        return parse(name)
    assert calibration is not None
    if name == "int4":
        return calibration.select(k=0)
    if name == LOW_BIT:
        return calibration
    return calibration.select(features="distributed")


def check(names: tuple[str, ...]) -> None:
    """Raise unless all are formats.

    Raises:
        ValueError: an unknown name.
    """
    for name in names:
        if name not in CALIBRATED:
            try:
                parse(name)
            except ValueError as error:
                raise ValueError(
                    str(error)
                    .replace("codec is", "format is")
                    .replace("allowed:", f"allowed: {', '.join(CALIBRATED)},")
                ) from error
