"""TAH-Quant in NumPy, written from its specification (arXiv 2506.01352) and not from lowbit's code.

1. Each token's channels are cut into tiles of 64.
2. p = |x| / sum|x|, H = -sum p log p. In each token (v2) the fifth of its tiles with the lowest H gets 3 bits, in each
   sequence (v1) the fifth of its tokens; rounded down. The others get 4. One bit for each tells which.
3. A tile whose largest |x| is at least twice its second has it swapped to position 0, and is multiplied by the
   normalised Walsh-Hadamard matrix (Sylvester). One flag bit and six of the position: here a byte, 0 or 1 + position.
4. zero = min, scale = (max - min) / (2^b - 1), both sent in FP16; code = round((x - zero) / scale), clamped.
5. One buffer whose size follows from the shape.

All in float32. The paper's FP16 overflows beyond 65504; here it saturates.
"""

from dataclasses import dataclass

import numpy as np

G = 64


def entropies(x: np.ndarray) -> np.ndarray:
    """H in bits along the last dimension."""
    a = np.abs(x.astype(np.float64))
    p = a / a.sum(-1, keepdims=True)
    return -(p * np.log2(np.where(p > 0, p, 1))).sum(-1)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Sylvester's H_2n = [[H_n, H_n], [H_n, -H_n]] times x, along the last dimension."""
    if x.shape[-1] == 1:
        return x
    a, b = (hadamard(half) for half in np.split(x, 2, axis=-1))
    return np.concatenate([a + b, a - b], -1)


@dataclass
class Coded:
    """Tiles of (..., G) as they are sent: the arrays have a number for each tile, `codes` one for each element."""

    bits: np.ndarray
    pivots: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    codes: np.ndarray


def encode(x: np.ndarray, low: np.ndarray) -> Coded:
    """Encode tiles, float32 (..., G); low: which of them get 3 bits."""
    largest = np.sort(np.abs(x), -1)
    pivot = np.abs(x).argmax(-1)[..., None]
    has = (largest[..., -1] >= 2 * largest[..., -2])[..., None]
    turned = np.copy(x)
    np.put_along_axis(turned, pivot, x[..., :1], -1)
    turned[..., :1] = np.take_along_axis(x, pivot, -1)
    turned = hadamard(turned) * np.float32(1 / 8)
    y = np.where(has, turned, x)
    bits = np.where(low, 3, 4)
    zero = y.min(-1)
    scale = (y.max(-1) - zero) / (2**bits - 1).astype(np.float32)
    codes = np.rint((y - zero[..., None]) / scale[..., None])
    codes = np.clip(codes, 0, (2**bits - 1)[..., None]).astype(np.uint8)
    scales, zeros = (np.clip(each, -65504, 65504).astype(np.float16) for each in (scale, zero))
    return Coded(bits, np.where(has, pivot + 1, 0)[..., 0].astype(np.uint8), scales, zeros, codes)


def decode(coded: Coded) -> np.ndarray:
    """What the receiver gets."""
    levels = coded.zeros.astype(np.float32)[..., None]
    levels = levels + coded.codes.astype(np.float32) * coded.scales.astype(np.float32)[..., None]
    turned = hadamard(levels) * np.float32(1 / 8)
    position = np.maximum(coded.pivots.astype(int) - 1, 0)[..., None]
    back = np.copy(turned)
    np.put_along_axis(back, position, turned[..., :1], -1)
    back[..., :1] = np.take_along_axis(turned, position, -1)
    return np.where(coded.pivots[..., None] > 0, back, levels)


def packed(coded: Coded) -> bytes:
    """The codes in bit planes of 4, 2 and 1 bits, low bits first; byte j of w has elements j, j + w, j + 2 w, ..."""
    out = b""
    for bits, codes in zip(coded.bits.flat, coded.codes.reshape(-1, G), strict=True):
        done = 0
        for plane in (4,) if bits == 4 else (2, 1):
            fields = ((codes >> done) & (2**plane - 1)).reshape(8 // plane, G * plane // 8)
            shifts = np.arange(0, 8, plane)[:, None]
            out += (fields.astype(int) << shifts).sum(0).astype(np.uint8).tobytes()
            done += plane
    return out
