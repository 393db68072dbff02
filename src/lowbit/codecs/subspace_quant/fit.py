"""Choose the number of directions for a boundary's tokens (see `lowbit.codecs.SubspaceQuant`)."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.codecs.basis.reference import leading
from lowbit.codecs.subspace_quant.layout import suited

MOST = 256  # directions among which `best_directions` chooses


def best_directions(x_RC: Tensor, bits: int, refresh: int | None) -> int:
    """Choose the number of directions for these tokens: most decibels for their bits, with `bits` for the remainder.

    An integer of b bits leaves noise in proportion to 4^-b of the coded energy, for the remainder and for coefficients
    (8 bits), and another bit per element always gains 6.02 dB. So the best number k minimises noise(k) 4^bits(k).

    The energy along each direction comes from the block power method with `MOST` columns, which is therefore the
    maximum; with fewer tokens or channels it covers the whole space. The last bits of products depend on the machine
    and its threads, and so may the result: if the other end needs it, send it there.

    Returns:
        1 to `MOST`; 0 for unusable tokens: all zeros, or with NaN or Inf.
    """
    if not bool(x_RC.any()) or not bool(x_RC.isfinite().all()):
        return 0
    rows, channels = x_RC.shape
    x_RC = (x_RC.double() / x_RC.abs().amax()).float()  # in float64: reciprocals of tiny float32 numbers are Inf
    v_NC = leading(x_RC, min(MOST, rows, channels), x_RC.new_ones(()))
    seen_RN = (x_RC @ v_NC.t()).double()
    energy_N = torch.linalg.eigvalsh(seen_RN.t() @ seen_RN).flip(0).clamp(min=0)
    total = x_RC.square().sum(dtype=torch.float64)
    share_N = (energy_N.cumsum(0) / total).clamp(max=1)
    k_N = torch.arange(1, len(energy_N) + 1, device=x_RC.device)
    noise_N = (1 - share_N) * 4.0**-bits + share_N * 4.0**-8
    each_N = k_N.new_tensor([suited(rows, channels, k, refresh)[1] for k in range(1, len(k_N) + 1)])
    new_N = ((k_N + each_N - 1) // each_N).clamp(max=rows)
    bits_N = 8 * k_N / channels + 8 * new_N / rows
    return int((noise_N.log2() / 2 + bits_N).argmin()) + 1
