"""Operators on payloads, declared through `torch.library` (see `lowbit.ops.contract`)."""

from __future__ import annotations

import torch

from lowbit.ops.contract import apart, backend, implementation

block_float8_encode = torch.ops.lowbit.block_float8_encode.default
block_float8_decode = torch.ops.lowbit.block_float8_decode.default
feature_int4_decode = torch.ops.lowbit.feature_int4_decode.default
feature_int4_encode = torch.ops.lowbit.feature_int4_encode.default
feature_int4_sum = torch.ops.lowbit.feature_int4_sum.default
gated_backward = torch.ops.lowbit.gated_backward.default
gated_encode = torch.ops.lowbit.gated_encode.default
gated_recompute = torch.ops.lowbit.gated_recompute.default
group_int_encode = torch.ops.lowbit.group_int_encode.default
group_int_decode = torch.ops.lowbit.group_int_decode.default
norm_backward = torch.ops.lowbit.norm_backward.default
norm_encode = torch.ops.lowbit.norm_encode.default
norm_recompute = torch.ops.lowbit.norm_recompute.default
subspace_coefficients_encode = torch.ops.lowbit.subspace_coefficients_encode.default
subspace_coefficients_decode = torch.ops.lowbit.subspace_coefficients_decode.default
subspace_follow = torch.ops.lowbit.subspace_follow.default
subspace_inverse = torch.ops.lowbit.subspace_inverse.default
subspace_renew = torch.ops.lowbit.subspace_renew.default
subspace_rest_encode = torch.ops.lowbit.subspace_rest_encode.default
subspace_rest_decode = torch.ops.lowbit.subspace_rest_decode.default
tah_quant_encode = torch.ops.lowbit.tah_quant_encode.default
tah_quant_decode = torch.ops.lowbit.tah_quant_decode.default

__all__ = [
    "apart",
    "backend",
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
    "implementation",
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
