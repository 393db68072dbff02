"""The definition of `BlockFloat8`'s operators in plain PyTorch, by the rules of `lowbit.kernels.exact`.

Scales are powers of two, so that scaling is exact and the only rounding is the one to the format itself. A code is an
integer r with the exponent e of its binade, or of the smallest normal number below that: r = |y| 2^(bits + 127 - e)
and code = (e - lowest) 2^bits + r, in which a carry out of r moves into the exponent by itself. Shape suffixes:
N elements, G blocks of L.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.escape import shown
from lowbit.kernels import operator
from lowbit.kernels.exact import store, uniform
from lowbit.kernels.layout import Layout, ceil_div, zero_gaps
from lowbit.kernels.operators import check_bytes, check_numbers

NAN_SCALE = 255  # for a block with NaN or Inf: as float32 exponent it gives Inf, and Inf times the codes, 0, is NaN
EXPONENT = 23  # position of the exponent in a float32
QUARTER_BELOW = 0x1FFFFF  # makes mantissas above 1.75, that of both formats' largest number, carry into the exponent


class Format(NamedTuple):
    """A float8 format with a sign bit, whose largest number is 1.75 * 2^top.

    Attributes:
        bits: mantissa bits. top: exponent of the largest number. lowest: exponent of the smallest normal one, plus 127.
    """

    bits: int
    top: int
    lowest: int


FORMATS = {"e4m3": Format(3, 8, 121), "e5m2": Format(2, 15, 113)}
"""Formats of the Open Compute Project: torch.float8_e4m3fn and torch.float8_e5m2."""


def block_float8_layout(numel: int, block: int) -> Layout:
    """Payload of `encode` (see `lowbit.codecs.BlockFloat8`)."""
    return Layout.of(codes=numel, scales=ceil_div(numel, block))


def _check(x: Tensor, payload: Tensor, format: str, block: int, *_: object) -> None:
    if format not in FORMATS or block < 32 or block % 32:
        raise ValueError(
            f"format is {shown(format)}, block {block}; allowed: {', '.join(map(repr, FORMATS))}, and a multiple of 32"
        )
    check_numbers(x, 1)
    check_bytes("payload", payload, block_float8_layout(x.numel(), block).nbytes, x.device)


@operator(writes="payload", check=_check)
def encode(x: Tensor, payload: Tensor, format: str, block: int, seed: int | None, accumulate: bool) -> None:
    """x (N,) -> payload, or added to what it holds; with a seed it rounds stochastically.

    See `lowbit.codecs.BlockFloat8` for formulas and layout.
    """
    form, layout = FORMATS[format], block_float8_layout(x.numel(), block)
    y = x.float()
    if accumulate:
        y = _decoded(payload, x.numel(), format, block) + y
    y_GL = torch.nn.functional.pad(y, (0, -y.numel() % block)).view(-1, block)
    bits_GL = y_GL.view(torch.int32)
    largest_G = (bits_GL & 0x7FFFFFFF).amax(-1)
    scale_G = ((largest_G + QUARTER_BELOW) >> EXPONENT) - form.top
    scale_G = scale_G.clamp(1, 254 - form.top)
    inverse_G = ((254 - scale_G) << EXPONENT).view(torch.float32)
    v_GL = (y_GL.abs() * inverse_G[:, None]).clamp(max=1.75 * 2.0**form.top)
    exponent_GL = (v_GL.view(torch.int32) >> EXPONENT).clamp(min=form.lowest)
    r_GL = v_GL * ((254 + form.bits - exponent_GL) << EXPONENT).view(torch.float32)
    if seed is None:
        r_GL = r_GL.round()
    else:
        r_GL = (r_GL + uniform(r_GL.numel(), seed, x.device).view_as(r_GL)).floor()
    code_GL = ((exponent_GL - form.lowest) << form.bits) + r_GL.nan_to_num(0).int()
    code_GL = code_GL | ((bits_GL >> 24) & 0x80)
    finite_G = largest_G < 0x7F800000
    code_GL = torch.where(finite_G[:, None], code_GL, 0)
    zero_gaps(payload, layout)
    layout.section(payload, "scales").copy_(torch.where(finite_G, scale_G, NAN_SCALE))
    layout.section(payload, "codes").copy_(code_GL.view(-1)[: x.numel()])


@operator(writes="out", check=lambda payload, out, *settings: _check(out, payload, *settings))
def decode(payload: Tensor, out: Tensor, format: str, block: int, accumulate: bool) -> None:
    """Payload -> out (N,), or added to it."""
    store(_decoded(payload, out.numel(), format, block), out, accumulate)


def _decoded(payload: Tensor, numel: int, format: str, block: int) -> Tensor:
    """Decode to float32 (N,). Every product is exact, except for numbers below float32's smallest."""
    form, layout = FORMATS[format], block_float8_layout(numel, block)
    code = layout.section(payload, "codes").int()
    scale_G = (layout.section(payload, "scales").int() << EXPONENT).view(torch.float32)
    magnitude = code & 0x7F
    exponent = (magnitude >> form.bits).clamp(min=1)
    r = (magnitude - ((exponent - 1) << form.bits)).float()
    unit = ((exponent + (form.lowest - 1 - form.bits)) << EXPONENT).view(torch.float32)
    value = r * unit
    value = (value.view(torch.int32) | ((code & 0x80) << 24)).view(torch.float32)
    return value * scale_G.repeat_interleave(block)[:numel]
