"""Small functions that every backend must reproduce to the last bit, in plain PyTorch.

Each step is one IEEE float32 operation with one rounding, in the order written; sums are sums of integers.
"""

import torch
from torch import Tensor

LOG2_COEFFICIENTS = (
    1.4426932334899902,
    -0.721162736415863,
    0.4777059257030487,
    -0.33924776315689087,
    0.2155885100364685,
    -0.09606623649597168,
    0.020490340888500214,
)  # log2(1 + t) / t on [0, 1], error 1.4e-6
BEND, TILT = 0.42286539077758789, -0.15922018885612488  # of `quick_log2`
# Larger magnitudes saturate: slightly larger decoded values are still finite, and a scale's reciprocal still normal.
LARGEST = 2.0**126
SMALLEST = 2.0**-126  # scales are normal numbers, so that denormal modes do not matter


def store(y: Tensor, out: Tensor, accumulate: bool) -> None:
    """Write float32 `y` to `out`, or add it in float32 and round once; finite values stay finite in float16."""
    if accumulate:
        y = out.float() + y
    if out.dtype == torch.float16:
        # NaN and Inf are not clamped: the receiver must see that the sender had them.
        y = torch.where(y.isfinite(), y.clamp(-65504, 65504), y)
    out.copy_(y)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale rounded once, or 1 where scale is 0. It is the only division: elements are multiplied by it."""
    return torch.where(scale > 0, scale, 1.0).reciprocal()


def octave_rounding(bits: int) -> int:
    """Addend for a step's bits that makes their truncation to sixteenths of an octave round to nearest.

    From 6 bits on it makes them round up, because there a range that is cut short costs whole cells.
    """
    return 1 << 18 if bits < 6 else (1 << 19) - 1


def octave_steps(exponent_R: Tensor, below_RT: Tensor) -> Tensor:
    """float32 steps from each row's exponent and each run's sixteenths of an octave below its top; 255 means 0."""
    octave = (exponent_R[:, None].int() * 16 + 15 - below_RT.int()).clamp(min=16)
    return torch.where(below_RT == 255, 0.0, (octave << 19).view(torch.float32))


def uniform(count: int, seed: int, device: torch.device) -> Tensor:
    """`count` float32 numbers in [0, 1) with 24 bits, each from its index and `seed` by a 32-bit integer hash."""
    # In int64 with masks: PyTorch does not multiply unsigned 32-bit integers.
    index = torch.arange(count, device=device)
    h = (index & 0xFFFFFFFF) ^ ((seed + (index >> 32) * 0x9E3779B9) & 0xFFFFFFFF)
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    return (h >> 8).float() * 2.0**-24


def log2(x: Tensor) -> Tensor:
    """log2 of positive normal float32 numbers: exponent plus a polynomial of the mantissa, by Horner's rule."""
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 127).float()
    t = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    p = torch.full_like(t, LOG2_COEFFICIENTS[-1])
    for c in LOG2_COEFFICIENTS[-2::-1]:
        p = p * t + c
    return exponent + p * t


def quick_log2(x: Tensor) -> Tensor:
    """log2 within 9e-4 in a third of the steps: a float's bits are nearly its logarithm, up to a small correction.

    Zero gives -127.
    """
    bits = x.view(torch.int32)
    straight = (bits - 0x3F800000).float() * 2.0**-23
    t = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32) - 1.0
    return straight + (t - t * t) * (t * TILT + BEND)


def entropy(x: Tensor) -> Tensor:
    """Entropy, in bits, of p = |x| / sum|x| along the last dimension, from magnitudes as 15-bit integers.

    The largest magnitude sets the binary point. All sums are of integers, so that their order does not matter:
    H = log2(A) - (sum of a log2 a) / A with A = sum of a. a log2 a uses `quick_log2` and is rounded to 1/16, an error
    below that of 15-bit magnitudes: this is most of the work of choosing tiles by entropy.
    """
    magnitude = x.abs().float()
    exponent = (magnitude.amax(-1, keepdim=True).view(torch.int32) >> 23).clamp(min=27, max=254)
    scale = ((127 + 14 + 127 - exponent) << 23).view(torch.float32)
    a = (magnitude * scale).round()
    total = a.long().sum(-1)
    terms = (a * quick_log2(a) * 16).round().long().sum(-1)
    weight = total.clamp(min=1).float()
    return log2(weight) - (terms.float() * 0.0625) / weight


def smallest(key: Tensor, count: Tensor) -> Tensor:
    """Flag the `count` (rows,) smallest keys of each row; of equal keys, the first ones."""
    order = key.sort(dim=-1, stable=True).indices
    first = torch.arange(key.shape[-1], device=key.device) < count[:, None]
    return torch.zeros(key.shape, dtype=torch.bool, device=key.device).scatter_(1, order, first)


def rotate(x: Tensor) -> Tensor:
    """Normalised Walsh-Hadamard transform (Sylvester order) of the last dimension; its own inverse."""
    shape, size, step = x.shape, x.shape[-1], 1
    while step < size:
        a, b = x.reshape(-1, size // (2 * step), 2, step).unbind(2)
        x = torch.stack((a + b, a - b), 2)
        step *= 2
    # Once at the end: one rounding instead of one in each step.
    return x.reshape(shape) * size**-0.5
