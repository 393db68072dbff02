"""Shared parts of benchmarks: types of settings, checks, and columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, ValidationInfo

from lowbit.codecs import Codec, parse_pair
from lowbit.config import ConfigError
from lowbit.report import Column, Row
from lowbit_lab.network import Link

STOCK = ("stock-fp32", "stock-bf16")


def _each_once(values: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
    if not values or len(set(values)) < len(values):
        names = ", ".join(map(str, values)) or "empty"
        raise ConfigError(f"{info.field_name} is {names}; allowed: one or more, each once")
    return values


EachOnce = AfterValidator(_each_once)
"""Checks that a list is not empty and holds nothing twice."""
Links = Annotated[tuple[Link, ...], EachOnce]
Names = Annotated[tuple[str, ...], EachOnce]
Device = Literal["cpu", "cuda"]


def formats_of(boundary: str, backward: str) -> dict[str, str | None]:
    """Formats of a boundary in full, as `forward` and `backward`; None for PyTorch's own stage.

    Raises:
        ConfigError: an unknown name.
    """
    try:
        pair = (None, None) if boundary in STOCK else map(repr, parse_pair(boundary, backward))
    except ValueError as error:
        raise ConfigError(f"boundaries has {boundary!r}: {error}") from error
    return dict(zip(("forward", "backward"), pair, strict=True))


def check_shape(boundary: str, codecs: Iterable[Codec], shape: tuple[int, ...]) -> None:
    """Check that a boundary's formats can code messages of this shape without a warm-up.

    Raises:
        ConfigError: one cannot, or leaves something open.
    """
    for codec in codecs:
        try:
            codec.nbytes(shape)
        except ValueError as error:
            raise ConfigError(f"boundaries has {boundary!r}: {error}") from error


def check_device(device: str) -> None:
    """Check that PyTorch has the device.

    Raises:
        ConfigError: it does not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda; this machine has none that PyTorch can use; allowed: cpu")


def link_name(row: Row) -> str:
    """Title of a row's link: "100 Mbit/s, 40 ms", "1 Gbit/s" or "unlimited"."""
    return Link.parse(row["link"]).title


LINK = Column("link", link_name)


def megabytes(size: float) -> str:
    """Bytes in MB, with a decimal below 100 MB."""
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:.1f}"
