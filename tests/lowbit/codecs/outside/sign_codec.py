"""A format of somebody else's package: the sign of each element, as a byte."""

from dataclasses import dataclass
from math import prod

from lowbit.codecs import Codec


@dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    """`scale` times the sign of each element."""

    scale: float = 1.0

    def format_nbytes(self, shape):
        return prod(shape)

    def _encode(self, x, payload):
        payload.copy_((x > 0).view(-1))

    def _decode(self, payload, out, accumulate):
        y = (payload.float() * 2 - 1).view(out.shape) * self.scale
        out.copy_(out + y if accumulate else y)
