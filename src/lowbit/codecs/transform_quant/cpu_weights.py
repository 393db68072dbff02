"""Whether channels of a message differ so much that a sender weights them, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.codecs.transform_quant.weights import OWN_SEEN, OWN_SPREAD, OWN_TOKENS, ZEROS, sampled
from lowbit.kernels.cpu.jit import kernel
from lowbit.kernels.cpu.lines import norm_of
from lowbit.kernels.cpu.memory import get_double, get_float, get_word, put_double

TINY = float(torch.finfo(torch.float32).tiny)


def own_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `weights`."""
    rows = sampled(len(x), OWN_SEEN, x.device)
    squares = torch.zeros(x.shape[1], dtype=torch.float64, device="cpu")
    differ = _own_squares(x.data_ptr(), rows.data_ptr(), len(rows), x.shape[1], squares.data_ptr())
    return squares, torch.tensor(differ, device="cpu")


@kernel
def _own_squares(x, rows, count, channels, out) -> Any:
    used, total = 0, 0.0
    for i in range(count):
        line = x + 4 * np.int64(get_word(rows, i)) * channels
        norm = np.float64(norm_of(line, channels))
        used += norm > 0
        scale = 1 / max(norm, TINY)
        for j in range(channels):
            value = np.float64(get_float(line, j)) * scale
            put_double(out, j, get_double(out, j) + value * value)
    for j in range(channels):
        put_double(out, j, get_double(out, j) / count)
        total += get_double(out, j)
    if not total < np.inf or used < OWN_TOKENS:
        return False
    squares = np.empty(channels)
    for j in range(channels):
        squares[j] = get_double(out, j)
    ordered = np.sort(squares)
    median = ordered[(channels - 1) // 2]  # as PyTorch's
    mean, square = 0.0, 0.0
    for j in range(channels):
        squares[j] = np.log2(squares[j] if squares[j] > ZEROS else median)
        mean += squares[j] / channels
    for j in range(channels):
        square += (squares[j] - mean) ** 2 / channels
    return np.sqrt(square) / 2 > OWN_SPREAD
