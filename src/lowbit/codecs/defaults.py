"""Default formats."""

from lowbit.codecs.base import Codec
from lowbit.codecs.group_int.codec import GroupInt
from lowbit.codecs.transform_quant.codec import TransformQuant

RECOMMENDED = TransformQuant()
"""Default format of activations between pipeline stages."""


def backward_codec(forward: Codec) -> Codec:
    """Return the default format of gradients for a format of activations: 6 bits in groups of 32.

    A format may override this (`Codec.for_gradients`): plain numbers are used both ways, and `TransformQuant` uses one
    step for all tokens.
    """
    return forward.for_gradients() or GroupInt(bits=6, group=32, symmetric=True)
