"""Codecs: each encodes a tensor into a number of bytes that is known beforehand, and decodes it."""

from lowbit.codecs.aq_sgd.codec import AQSGD
from lowbit.codecs.base import Codec, Session, StatefulCodec, Summable
from lowbit.codecs.block_float8.codec import BlockFloat8
from lowbit.codecs.cast.codec import Cast
from lowbit.codecs.defaults import backward_codec
from lowbit.codecs.feature_int.codec import FeatureInt
from lowbit.codecs.foreign import CodecError
from lowbit.codecs.group_int.codec import GroupInt
from lowbit.codecs.names import parse, parse_pair
from lowbit.codecs.tah_quant.codec import TAHQuant
from lowbit.codecs.transform_quant.codec import TransformQuant
from lowbit.codecs.transform_quant.rates import RateGoal

__all__ = [
    "AQSGD",
    "BlockFloat8",
    "Cast",
    "Codec",
    "CodecError",
    "FeatureInt",
    "GroupInt",
    "RateGoal",
    "Session",
    "StatefulCodec",
    "Summable",
    "TAHQuant",
    "TransformQuant",
    "backward_codec",
    "parse",
    "parse_pair",
]
