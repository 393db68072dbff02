"""Operators on payloads, declared through `torch.library` (see `lowbit.ops.contract`)."""

from __future__ import annotations

import torch

from lowbit.ops.contract import backend

block_float8_encode = torch.ops.lowbit.block_float8_encode.default
block_float8_decode = torch.ops.lowbit.block_float8_decode.default
group_int_encode = torch.ops.lowbit.group_int_encode.default
group_int_decode = torch.ops.lowbit.group_int_decode.default
tah_quant_encode = torch.ops.lowbit.tah_quant_encode.default
tah_quant_decode = torch.ops.lowbit.tah_quant_decode.default

__all__ = [
    "backend",
    "block_float8_decode",
    "block_float8_encode",
    "group_int_decode",
    "group_int_encode",
    "tah_quant_decode",
    "tah_quant_encode",
]
