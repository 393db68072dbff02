"""The operators on CPU tensors, compiled by numba: the reference's bytes at the speed of memory."""

from __future__ import annotations

from lowbit.ops.cpu.block_float8 import block_float8_decode, block_float8_encode
from lowbit.ops.cpu.feature_int4 import feature_int4_decode, feature_int4_encode, feature_int4_sum
from lowbit.ops.cpu.gated import gated_backward, gated_encode, gated_recompute
from lowbit.ops.cpu.group_int import group_int_decode, group_int_encode
from lowbit.ops.cpu.norm import norm_backward, norm_encode, norm_recompute
from lowbit.ops.cpu.subspace import (
    subspace_coefficients_decode,
    subspace_coefficients_encode,
    subspace_rest_decode,
    subspace_rest_encode,
)
from lowbit.ops.cpu.subspace_basis import subspace_follow, subspace_inverse, subspace_renew
from lowbit.ops.cpu.tah_decode import tah_quant_decode
from lowbit.ops.cpu.tah_encode import tah_quant_encode

__all__ = [
    "block_float8_decode",
    "block_float8_encode",
    "feature_int4_decode",
    "feature_int4_encode",
    "feature_int4_sum",
    "gated_backward",
    "gated_encode",
    "gated_recompute",
    "group_int_decode",
    "group_int_encode",
    "norm_backward",
    "norm_encode",
    "norm_recompute",
    "subspace_coefficients_decode",
    "subspace_coefficients_encode",
    "subspace_follow",
    "subspace_inverse",
    "subspace_renew",
    "subspace_rest_decode",
    "subspace_rest_encode",
    "tah_quant_decode",
    "tah_quant_encode",
]
