"""The definition of `GroupInt`'s operators in plain PyTorch, by the rules of `lowbit.kernels.exact`.

Shape suffixes: N elements, G groups of L.
"""

import torch
from torch import Tensor

from lowbit.kernels import implementation, operator
from lowbit.kernels.exact import LARGEST, SMALLEST, inverse, store, uniform
from lowbit.kernels.layout import Layout, ceil_div, pack_groups, unpack_groups, zero_gaps
from lowbit.kernels.operators import check_bytes, check_numbers

NAN_SCALE = 0x7FC0  # the bfloat16 scale of a group with NaN or Inf, whose codes and middle are zero


def group_int_layout(numel: int, bits: int, group: int, symmetric: bool) -> Layout:
    """Payload of `encode` (see `lowbit.codecs.GroupInt` for the meaning of the sections)."""
    groups = ceil_div(numel, group)
    mids = 0 if symmetric else 2 * groups
    return Layout.of(scales=2 * groups, mids=mids, codes=ceil_div(numel, 8) * bits)  # whole bytes


def check_settings(bits: int, group: int) -> None:
    """Raise unless these are valid settings of groups."""
    if not (2 <= bits <= 8 and group >= 8 and group % 8 == 0):
        raise ValueError(f"bits is {bits}, group {group}; allowed: 2 to 8, and a multiple of 8")


def _check(x: Tensor, payload: Tensor, bits: int, group: int, symmetric: bool, _: object) -> None:
    check_settings(bits, group)
    check_numbers(x, 1)
    check_bytes("payload", payload, group_int_layout(x.numel(), bits, group, symmetric).nbytes, x.device)


@operator(writes="payload", check=_check)
def encode(x: Tensor, payload: Tensor, bits: int, group: int, symmetric: bool, seed: int | None) -> None:
    """x (N,) -> payload; with a seed it rounds stochastically. See `lowbit.codecs.GroupInt` for formulas and layout."""
    layout = group_int_layout(x.numel(), bits, group, symmetric)
    x_GL = _grouped(x.float(), group)
    low_G = x_GL.amin(-1).clamp(min=-LARGEST)
    high_G = x_GL.amax(-1).clamp(max=LARGEST)
    finite_G = x_GL.isfinite().all(-1)
    mid_G = torch.zeros_like(low_G)
    if symmetric:
        center = 2.0 ** (bits - 1) - 1
        extent_G = torch.maximum(high_G, -low_G)
    else:
        center = (2.0**bits - 1) / 2
        mid_G = high_G * 0.5 + low_G * 0.5
        half_G = high_G * 0.5 - low_G * 0.5
        extent_G = torch.maximum(half_G, mid_G.abs() * (center / (127 * 2.0**bits)))
    scale_G = (extent_G * (1 / center)).clamp(min=SMALLEST).bfloat16().float()
    scale_G = torch.where(extent_G > 0, scale_G, 0.0)
    inverse_G = inverse(scale_G)
    mid_G = (mid_G * inverse_G * (256 * 2.0**-bits)).round().clamp(-32767, 32767)
    shift_G = center - mid_G * (2.0**bits / 256)
    v_GL = x_GL * inverse_G[:, None] + shift_G[:, None]
    if seed is None:
        v_GL = v_GL.round()
    else:
        v_GL = (v_GL + uniform(v_GL.numel(), seed, x.device).view_as(v_GL)).floor()
    top = 2 * center if symmetric else 2.0**bits - 1
    codes_GL = torch.where(finite_G[:, None], v_GL.clamp(0, top), 0).to(torch.uint8)
    # Written as bits: the NaN of a conversion to bfloat16 differs between machines.
    bits_G = torch.where(finite_G, scale_G.view(torch.int32) >> 16, NAN_SCALE)
    layout.section(payload, "scales", torch.int16).copy_(bits_G)
    if not symmetric:
        layout.section(payload, "mids", torch.int16).copy_(torch.where(finite_G, mid_G, 0))
    # The padding of a ragged last group is zeros, so that equal tensors give equal bytes.
    codes_GL.view(-1)[x.numel() :] = 0
    layout.section(payload, "codes").copy_(pack_groups(codes_GL, x.numel(), bits))
    zero_gaps(payload, layout)


@operator(writes="out", check=lambda payload, out, *settings: _check(out, payload, *settings))
def decode(payload: Tensor, out: Tensor, bits: int, group: int, symmetric: bool, accumulate: bool) -> None:
    """Payload -> out (N,), or added to it."""
    layout = group_int_layout(out.numel(), bits, group, symmetric)
    codes_GL = unpack_groups(layout.section(payload, "codes"), out.numel(), group, bits)
    scale_G = layout.section(payload, "scales", torch.bfloat16).float()
    center = 2.0 ** (bits - 1) - 1 if symmetric else (2.0**bits - 1) / 2
    level_GL = codes_GL.float() - center
    if not symmetric:
        mid_G = layout.section(payload, "mids", torch.int16).float() * (2.0**bits / 256)
        level_GL = level_GL + mid_G[:, None]
    y = (level_GL * scale_G[:, None]).view(-1)[: out.numel()]
    store(y, out, accumulate)


def decoded(payload: Tensor, shape: torch.Size, bits: int, group: int) -> Tensor:
    """Decode an asymmetric payload to float32, for operators that have one as input."""
    x = torch.empty(shape, dtype=torch.float32, device=payload.device)
    implementation(decode, payload.device)(payload, x.view(-1), bits, group, False, False)
    return x


def check_asymmetric(name: str, payload: Tensor, like: Tensor, bits: int, group: int) -> None:
    """Raise unless this is a payload for the number of elements of `like`."""
    check_bytes(name, payload, group_int_layout(like.numel(), bits, group, False).nbytes, like.device)


def _grouped(x: Tensor, group: int) -> Tensor:
    """Pad with copies of the last element, which change neither minimum nor maximum of its group."""
    missing = -x.numel() % group
    return torch.cat([x, x[-1:].expand(missing)]).view(-1, group)
