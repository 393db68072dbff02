"""The formats where nobody names one."""

from __future__ import annotations

from lowbit.codecs.base import Codec
from lowbit.codecs.group_int.codec import GroupInt
from lowbit.codecs.transform_quant.codec import TransformQuant

RECOMMENDED = TransformQuant()
"""The format of activations between pipeline stages."""


def backward_codec(forward: Codec) -> Codec:
    """Return the default format of gradients for a format of activations: 6 bits in groups of 32.

    A format may decide otherwise (`Codec.for_gradients`): plain numbers travel alike both ways, `TransformQuant` comes
    back with one step for all tokens, and `SubspaceQuant` with at least 4 bits.
    """
    return forward.for_gradients() or GroupInt(bits=6, group=32, symmetric=True)
