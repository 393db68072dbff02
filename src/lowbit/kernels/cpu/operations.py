"""The formulas of `lowbit.kernels.cpu.formulas` as functions for kernels."""

from __future__ import annotations

from numba.types import float32, int32, uint8, uint16, uint64

from lowbit.kernels.cpu import formulas
from lowbit.kernels.cpu.jit import operation

float_bits = operation(int32, float32)(formulas.float_bits)
bits_float = operation(float32, int32)(formulas.bits_float)
order_key = operation(int32, float32)(formulas.order_key)
key_value = operation(float32, int32)(formulas.key_value)
lesser = operation(float32, float32, float32)(formulas.lesser)
greater = operation(float32, float32, float32)(formulas.greater)
lesser32 = operation(int32, int32, int32)(formulas.lesser32)
greater32 = operation(int32, int32, int32)(formulas.greater32)
add32 = operation(int32, int32, int32)(formulas.add32)
truncate = operation(int32, float32)(formulas.truncate)
magnitude = operation(float32, float32)(formulas.magnitude)
power_of_two = operation(float32, int32)(formulas.power_of_two)
round_signed = operation(float32, float32)(formulas.round_signed)
round_bf16 = operation(float32, float32)(formulas.round_bf16)
code = operation(uint8, float32, float32)(formulas.code)
code_below = operation(uint8, float32, float32)(formulas.code_below)
restored = operation(float32, uint8, float32, float32)(formulas.restored)
level = operation(float32, float32, float32)(formulas.level)
weighted_log = operation(float32, float32)(formulas.weighted_log)
log2 = operation(float32, float32)(formulas.log2)
steps_below = operation(int32, int32, int32)(formulas.steps_below)
step_below = operation(float32, int32, int32)(formulas.step_below)
uniform = operation(float32, uint64, uint64)(formulas.uniform)
byte_of_flags = operation(uint8, uint64)(formulas.byte_of_flags)
flags_of_byte = operation(uint64, uint8)(formulas.flags_of_byte)
from_bf16 = operation(float32, uint16)(formulas.from_bf16)
to_bf16 = operation(uint16, float32)(formulas.to_bf16)
from_fp16 = operation(float32, uint16)(formulas.from_fp16)
to_fp16 = operation(uint16, float32)(formulas.to_fp16)
overflown = operation(float32, float32)(formulas.overflown)
