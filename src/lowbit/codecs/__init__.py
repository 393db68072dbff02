"""Formats: each turns a tensor into bytes of a size known beforehand, and back."""

from __future__ import annotations

from lowbit.codecs.aq_sgd import AQSGD
from lowbit.codecs.base import Codec, Session
from lowbit.codecs.block_float8 import BlockFloat8
from lowbit.codecs.cast import Cast
from lowbit.codecs.feature_int4 import FeatureInt4
from lowbit.codecs.group_int import GroupInt
from lowbit.codecs.names import gradients_beside, parse, parse_pair
from lowbit.codecs.subspace_quant import SubspaceQuant
from lowbit.codecs.tah_quant import TAHQuant

__all__ = [
    "AQSGD",
    "BlockFloat8",
    "Cast",
    "Codec",
    "FeatureInt4",
    "GroupInt",
    "Session",
    "SubspaceQuant",
    "TAHQuant",
    "gradients_beside",
    "parse",
    "parse_pair",
]
