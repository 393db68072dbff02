"""The definition of `SubspaceQuant` in plain PyTorch, by the rules of `lowbit.kernels.exact`.

Sessions call these functions, and kernels of the same names, directly (`lowbit.kernels.implementation`). What a
token's coefficients stand for is a sum in any order, PyTorch's here. Shape suffixes: R rows (tokens), K directions,
C channels, G groups of a row, L elements of a group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.codecs.basis.reference import FARTHEST
from lowbit.codecs.subspace_quant.layout import SubspaceGeometry
from lowbit.kernels.exact import LARGEST, SMALLEST, inverse, octave_rounding, octave_steps, store
from lowbit.kernels.layout import ceil_div
from lowbit.kernels.packing import pack, unpack

ZERO_STEP, NAN_STEP = 255, 254  # for a group that is all zero, and for one with NaN or Inf


def coefficients_encode(c: Tensor, unit: Tensor, payload: Tensor, out: Tensor, geo: SubspaceGeometry) -> None:
    """Write c (R, K) float32, in units (K,), to the payload, and its decoded values to out (R, K), which may be c."""
    usable_R = c.abs().amax(-1) <= FARTHEST  # false for NaN
    v_RK = torch.where(usable_R[:, None] & (unit > 0), c * inverse(unit), 0.0)
    most_R = v_RK.abs().amax(-1)
    coded_R = (most_R >= SMALLEST) & (most_R <= FARTHEST)
    factor_R = _bf16_above(torch.where(coded_R, most_R, 0.0))
    v_RK = torch.where(coded_R[:, None], v_RK, 0.0)
    codes_RK = (v_RK * (127 * inverse(factor_R))[:, None]).round().clamp(-127, 127)
    geo.layout.section(payload, "factors", torch.int16).copy_(factor_R.view(torch.int32) >> 16)
    geo.layout.section(payload, "coefficients", torch.int8).copy_(codes_RK.view(-1))
    out.copy_(_coefficients(codes_RK, factor_R, unit))


def coefficients_decode(payload: Tensor, unit: Tensor, out: Tensor, geo: SubspaceGeometry) -> None:
    """Inverse of `coefficients_encode`; out (R, K) is float32."""
    factor_R = geo.layout.section(payload, "factors", torch.bfloat16).float()
    codes_RK = geo.layout.section(payload, "coefficients", torch.int8).float().view(out.shape)
    out.copy_(_coefficients(codes_RK, factor_R, unit))


def rest_encode(x: Tensor, c: Tensor, directions: Tensor, payload: Tensor, geo: SubspaceGeometry) -> None:
    """Code x - c directions in groups; x (R, C) of any dtype, c (R, K) and directions (K, C) float32."""
    bits = geo.bits
    rest_RGL = _grouped(x.float() - c @ directions, geo)
    finite_RG = rest_RGL.isfinite().all(-1)
    extent_RG = torch.where(finite_RG, rest_RGL.abs().amax(-1).clamp(max=LARGEST), 0.0)
    step_RG = (extent_RG * 2.0 ** (1 - bits)).clamp(min=SMALLEST)
    step_RG = torch.where(extent_RG > 0, step_RG, 0.0)
    octave_RG = (step_RG.view(torch.int32) + octave_rounding(bits)) >> 19
    exponent_R = octave_RG.amax(-1) >> 4
    below_RG = (exponent_R[:, None] * 16 + 15 - octave_RG).clamp(0, NAN_STEP - 1)
    below_RG = torch.where(octave_RG > 0, below_RG, ZERO_STEP)
    below_RG = torch.where(finite_RG, below_RG, NAN_STEP)
    step_RG = group_steps(exponent_R, below_RG)
    inverse_RG = inverse(step_RG)
    v_RGL = rest_RGL * inverse_RG[..., None] + (2.0**bits - 1) / 2
    coded_RG = (below_RG < NAN_STEP)[..., None]
    codes_RGL = torch.where(coded_RG, v_RGL.round().clamp(0, 2.0**bits - 1), 0.0).to(torch.uint8)
    codes_RGL.view(geo.rows, -1)[:, geo.channels :] = 0

    geo.layout.section(payload, "exponents").copy_(exponent_R)
    geo.layout.section(payload, "steps").copy_(below_RG.view(-1))
    full = geo.channels // geo.group
    parts = [pack(codes_RGL[:, :full], bits).view(geo.rows, -1)]
    parts.append(pack(codes_RGL[:, full:, : _ragged(geo)], bits).view(geo.rows, -1))
    geo.layout.section(payload, "codes").copy_(torch.cat(parts, 1).view(-1))


def rest_decode(payload: Tensor, c: Tensor, directions: Tensor, out: Tensor, geo: SubspaceGeometry) -> None:
    """out (R, C) = c directions + what `rest_encode` coded."""
    bits = geo.bits
    exponent_R = geo.layout.section(payload, "exponents")
    below_RG = geo.layout.section(payload, "steps").view(geo.rows, geo.groups)
    step_RG = group_steps(exponent_R, below_RG)
    full = geo.channels // geo.group
    codes = geo.layout.section(payload, "codes").view(geo.rows, -1)
    cut = full * geo.group * bits // 8
    whole = unpack(codes[:, :cut].reshape(geo.rows, full, geo.group * bits // 8), bits)
    tail = unpack(codes[:, cut:], bits)
    codes_RC = torch.cat([whole.view(geo.rows, -1), tail], 1)[:, : geo.channels]
    step_RC = step_RG.repeat_interleave(geo.group, 1)[:, : geo.channels]
    y = c @ directions + (codes_RC.float() - (2.0**bits - 1) / 2) * step_RC
    store(y, out, False)


def group_steps(exponent_R: Tensor, below_RG: Tensor) -> Tensor:
    """float32 steps, from each row's exponent and each group's sixteenths of an octave below its top."""
    step = octave_steps(exponent_R, below_RG)
    return torch.where(below_RG == NAN_STEP, math.nan, step)


def _coefficients(codes_RK: Tensor, factor_R: Tensor, unit: Tensor) -> Tensor:
    return codes_RK * (factor_R * (1 / 127))[:, None] * unit


def _bf16_above(x: Tensor) -> Tensor:
    """Round a non-negative number up to bfloat16, as float32."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def _grouped(x: Tensor, geo: SubspaceGeometry) -> Tensor:
    """(R, G, L), a ragged last group padded with copies of its last element."""
    pad = x[:, -1:].expand(-1, geo.groups * geo.group - geo.channels)
    return torch.cat([x, pad], 1).view(geo.rows, geo.groups, geo.group)


def _ragged(geo: SubspaceGeometry) -> int:
    return ceil_div(geo.channels % geo.group, 8) * 8
