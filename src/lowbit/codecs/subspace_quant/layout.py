"""The layout of `SubspaceQuant` payloads, derived from a tensor's shape and the settings."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.layout import Layout, ceil_div


def suited(rows: int, channels: int, directions: int | None = None, refresh: int | None = None) -> tuple[int, int]:
    """Return default `directions` and `refresh` for messages of this shape, in place of those that are None.

    Both ends derive them from the shape, so another rule needs another payload version. Sessions of one width share
    their directions, so their number depends only on the width.

    A direction costs 8 / channels bits an element for its coefficients: 1 bit in all up to 256 channels, and less
    beyond. A new direction costs 8 / rows bits an element: each message brings an eighth of the directions, or fewer if
    they would take more than 1/4 bit, but at least one. (A message without any would be as long.)
    """
    directions = directions or min(32, max(1, channels // 8))
    renewed = max(1, min(ceil_div(directions, 8), rows // 32))
    return directions, refresh or ceil_div(directions, renewed)


@dataclass(frozen=True)
class SubspaceGeometry:
    """Sizes of a payload of `lowbit.codecs.SubspaceQuant`, derived from the shape and the settings.

    Attributes:
        rows: tokens in the message; channels: elements of a token.
        directions, bits, group: as in the codec; groups: of a token, a ragged last one included.
        renewed: directions that are sent with a message.
        pause: messages from one that brings new directions to the next, once all directions exist.
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
    pause: int
    row_bytes: int
    layout: Layout


def subspace_geometry(
    rows: int, channels: int, directions: int, bits: int, group: int, refresh: int
) -> SubspaceGeometry:
    """Compute the sizes of a payload of `rows` tokens of `channels` elements; it brings at most `rows` directions."""
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
    pause = max(1, refresh // directions)
    return SubspaceGeometry(rows, channels, directions, bits, group, groups, renewed, pause, row_bytes, layout)
