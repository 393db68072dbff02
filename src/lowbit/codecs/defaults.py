"""The formats where nobody names one."""

from __future__ import annotations

from lowbit.codecs.base import Codec
from lowbit.codecs.group_int.codec import GroupInt
from lowbit.codecs.subspace_quant.codec import SubspaceQuant

RECOMMENDED = SubspaceQuant()
"""The format of activations between pipeline stages."""


def backward_codec(forward: Codec) -> Codec:
    """Return the default format of gradients for a format of activations: 6 bits in groups of 32.

    A format may decide otherwise (`Codec.for_gradients`): plain numbers travel alike both ways, and `SubspaceQuant`
    comes back with the same settings and at least 4 bits.
    """
    return forward.for_gradients() or GroupInt(bits=6, group=32, symmetric=True)
