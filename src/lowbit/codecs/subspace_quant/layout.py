"""The layout of `SubspaceQuant` payloads, and all that follows from a tensor's shape and the settings."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.layout import Layout, ceil_div


@dataclass(frozen=True)
class SubspaceGeometry:
    """Everything about a payload of `lowbit.codecs.SubspaceQuant` that follows from the shape and the settings.

    Attributes:
        rows: tokens in the message; channels: elements of a token.
        directions, bits, group: as in the codec; groups: of a token, a ragged last one included.
        renewed: directions that travel with a message.
        row_bytes: bytes of a token's codes.
        layout: the sections.
    """

    rows: int
    channels: int
    directions: int
    bits: int
    group: int
    groups: int
    renewed: int
    row_bytes: int
    layout: Layout


def subspace_geometry(
    rows: int, channels: int, directions: int, bits: int, group: int, refresh: int
) -> SubspaceGeometry:
    """Sizes of the payload of `rows` tokens of `channels` elements, which bring no more directions than they are."""
    groups, ragged = ceil_div(channels, group), channels % group
    row_bytes = (channels // group * group + ceil_div(ragged, 8) * 8) * bits // 8
    renewed = min(rows, ceil_div(directions, refresh))
    layout = Layout.of(
        header=16,
        slots=2 * renewed,
        lengths=4 * renewed,
        directions=renewed * channels,
        units=2 * directions,
        factors=2 * rows,
        coefficients=rows * directions,
        exponents=rows,
        steps=rows * groups,
        codes=rows * row_bytes,
    )
    return SubspaceGeometry(rows, channels, directions, bits, group, groups, renewed, row_bytes, layout)
