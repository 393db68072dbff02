"""The operators on GPU tensors, in Triton: the reference's bytes at the speed of memory.

With TRITON_INTERPRET=1 in the environment, before Triton is first imported, the same kernels run on CPU tensors.
"""

from __future__ import annotations

import functools

import torch
from triton import knobs

from lowbit.ops.gpu.block_float8 import block_float8_decode, block_float8_encode
from lowbit.ops.gpu.feature_int4 import feature_int4_decode, feature_int4_encode, feature_int4_sum
from lowbit.ops.gpu.gated import gated_backward, gated_encode, gated_recompute
from lowbit.ops.gpu.group_int import group_int_decode, group_int_encode
from lowbit.ops.gpu.norm import norm_backward, norm_encode, norm_recompute
from lowbit.ops.gpu.subspace import (
    subspace_coefficients_decode,
    subspace_coefficients_encode,
    subspace_rest_decode,
    subspace_rest_encode,
)
from lowbit.ops.gpu.tah_quant import tah_quant_decode, tah_quant_encode

# The engine's matrix products, and a few of its operations on as many numbers as there are directions.
from lowbit.ops.subspace_basis import subspace_follow, subspace_inverse, subspace_renew

interpreted: bool = knobs.runtime.interpret


@functools.cache
def unsupported(device: torch.device) -> str:
    """Why kernels cannot run on a device, or nothing."""
    if torch.version.hip:
        return "the kernels are made for NVIDIA's GPUs"
    found = torch.cuda.get_device_capability(device)
    if found < (8, 0):
        return f"the kernels need compute capability 8.0, and it has {found[0]}.{found[1]}"
    return ""


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
    "interpreted",
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
    "unsupported",
]
