"""Shared parts of benchmarks: types of settings, checks, and columns."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, ValidationInfo

from lowbit.codecs import Codec, parse_pair
from lowbit_lab.network import Link
from lowbit_run.config import ConfigError
from lowbit_run.report import Column, Row
from lowbit_run.train.config import AUTO, ModelConfig
from lowbit_run.train.model import hidden_size

STOCK = ("stock-fp32", "stock-bf16")
"""Boundaries with PyTorch's own stage, in float32 or bfloat16, as baselines."""


def _each_once(values: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
    if not values or len(set(values)) < len(values):
        names = ", ".join(map(str, values)) or "empty"
        raise ConfigError(f"{info.field_name} is {names}; allowed: one or more, each once")
    return values


EachOnce = AfterValidator(_each_once)
"""Checks that a list is not empty and contains nothing twice."""
Links = Annotated[tuple[Link, ...], EachOnce]
Names = Annotated[tuple[str, ...], EachOnce]
AtLeastTwo = Annotated[int, Field(ge=2)]
Device = Literal["cpu", "cuda"]


def formats_of(boundary: str, backward: str) -> dict[str, str | None]:
    """Return a boundary's formats in full, as `forward` and `backward`; None for PyTorch's own stage; "auto" stays."""
    try:
        plain = {AUTO: AUTO, **dict.fromkeys(STOCK)}
        pair = (plain[boundary],) * 2 if boundary in plain else map(repr, parse_pair(boundary, backward))
    except ValueError as error:
        raise ConfigError(f"boundaries has {boundary!r}: {error}") from error
    return dict(zip(("forward", "backward"), pair, strict=True))


def check_messages(boundary: str, codecs: Iterable[Codec], model: ModelConfig, batch: int, sequence: int) -> None:
    """Check that a boundary's formats can code a model's messages, if its width is known."""
    if (width := hidden_size(model)) is None:
        return
    for codec in codecs:
        try:
            codec.nbytes((batch, sequence, width))
        except ValueError as error:
            raise ConfigError(f"boundaries has {boundary!r}: {error}") from error


def check_stages(stages: int, layers: int) -> None:
    """Check that a model has enough layers for the stages of an emulated pipeline."""
    if stages > layers:
        raise ConfigError(f"stages is {stages}; the model has {layers} layers; allowed: at most as many")


def check_plain(key: str, name: str, codec: Codec) -> None:
    """Check that a format does not need repeated samples."""
    if codec.needs_key:
        raise ConfigError(
            f"{key} has {name!r}, which learns from epoch to epoch; allowed: other formats, or `lowbit bench pipeline` "
            "and `convergence`, which repeat samples"
        )


def check_constant(key: str, links: Iterable[Link]) -> None:
    """Check that links do not change, for benchmarks that are about one rate."""
    if changing := next((link for link in links if link.changes), None):
        raise ConfigError(f"{key} has {changing}, which changes; allowed: links that stay as they are")


def check_device(device: str) -> None:
    """Check that PyTorch has the device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda; this machine has none that PyTorch can use; allowed: cpu")


def link_name(row: Row) -> str:
    """Return the title of a row's link: "100 Mbit/s, 40 ms", "1 Gbit/s" or "unlimited"."""
    return Link.parse(row["link"]).title


LINK = Column("link", link_name)


def on_slowest_link(rows: Sequence[Row], field: str) -> list[Row]:
    """Return the rows of the slowest link among those that have a value of this field."""
    rows = [row for row in rows if row.get(field)]
    slowest = min(rows, key=lambda row: row["link_mbit"] or math.inf, default={"link": None})["link"]
    return [row for row in rows if row["link"] == slowest]


def half_range(name: str, row: Row) -> float:
    """Return half the range from the lowest to the highest of a row's values, as a share of the median."""
    return (row[f"{name}_high"] - row[f"{name}_low"]) / 2 / row[name]


def megabytes(size: float) -> str:
    """Format bytes in MB, with a decimal below 100 MB."""
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:.1f}"
