"""The rate-distortion bound of messages: the fewest bits per element at a given error.

The bound is that of Gaussian sources with the second moments of the messages. The principal directions of such a source
are independent components, and the spectrum lists their variances. Reverse water-filling gives the least rate: there is
one level, a component above it takes 1/2 log2(variance / level) bits, the others take none, and the errors,
min(variance, level), add up to the requested error.

Of all sources with the same second moments, a Gaussian one takes the most bits. So a format that uses only these
moments cannot go below the bound. A format that uses more, such as the norm of each token, can. The bits that describe
the spectrum and its directions to a receiver are not counted, so the bound of messages with few tokens compared with
their channels is lower than what a format can reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def spectrum(x: Tensor) -> Tensor:
    """Mean squares of tokens (..., C) along their principal directions: (C,) float64; NaN if any is not finite."""
    tokens = x.reshape(-1, x.shape[-1]).double()
    count, channels = tokens.shape
    if not bool(tokens.isfinite().all()):
        return torch.full((channels,), math.nan, dtype=torch.float64)
    size = tokens.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    tokens = tokens / size
    products = tokens.t() @ tokens if channels <= count else tokens @ tokens.t()
    energies = torch.linalg.eigvalsh(products).clamp(min=0) * (size.square() / count)
    return torch.cat([energies, energies.new_zeros(channels - len(energies))])


def norms(x: Tensor) -> Tensor:
    """Norms of tokens (..., C), (..., 1) float64; 1 for tokens of zeros."""
    norm = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True)
    return torch.where(norm > 0, norm, 1.0)


def rate(spectra: Sequence[Tensor], error: float) -> float | None:
    """Return the least bits per element of messages with these spectra.

    Args:
        spectra: of messages with equally many tokens.
        error: mean squared error of the elements of all messages. The bound distributes it among them in the best way.

    Returns:
        0 if sending nothing has no larger error; None for an error of 0, which no finite rate reaches, or NaN.
    """
    variances = torch.cat(list(spectra)).sort().values
    count = len(variances)
    mean = float(variances.mean())
    if math.isnan(mean) or math.isnan(error):
        return None
    if error >= mean:
        return 0.0
    if error <= 0:
        return None
    # If the n smallest variances are below the level, their components have these variances as errors, and the others
    # share the rest. For every n that is too small, the level is above the next variance.
    below = torch.cat([variances.new_zeros(1), variances.cumsum(0)[:-1]])
    levels = (error * count - below) / torch.arange(count, 0, -1, dtype=torch.float64)
    n = min(int((levels > variances).sum()), count - 1)
    return float((variances[n:] / levels[n]).log2().sum()) / (2 * count)


def rate_at(spectra: Sequence[Tensor], decibels: float) -> float | None:
    """Return `rate` for an error this many decibels below the messages."""
    return rate(spectra, float(torch.cat(list(spectra)).mean()) * 10 ** (-decibels / 10))
