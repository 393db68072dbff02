"""The directions that a boundary's tokens lie near: how a sender renews them, and how both ends take the new ones.

Nothing here waits for a GPU. Shape suffixes: R rows (tokens), K directions, M of them renewed, C channels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.ops.group_int import SMALLEST, inverse
from lowbit.ops.subspace import FARTHEST

ITERATIONS = 3  # of the block power method, from a random start
MOST = 256  # directions among which `best_rank` chooses
RIDGE = 1e-4  # directions are of length 1 and near to orthogonal; absent ones are zeros


class Renewal(NamedTuple):
    """Directions that replace others, as they travel: integers of 8 bits, times a length each.

    Attributes:
        slots_M: int16, which ones are replaced; -1: none, the tokens were of no use.
        lengths_M: float32.
        codes_MC: int8.
    """

    slots_M: Tensor
    lengths_M: Tensor
    codes_MC: Tensor

    @staticmethod
    def none(count: int, channels: int, device: torch.device) -> Renewal:
        """No new directions, in the place of so many."""
        slots_M = torch.full((count,), -1, dtype=torch.int16, device=device)
        lengths_M = torch.zeros(count, dtype=torch.float32, device=device)
        return Renewal(
            slots_M, lengths_M, torch.zeros(count, channels, dtype=torch.int8, device=device)
        )

    def applied(self, directions_KC: Tensor) -> Tensor:
        """A basis with the new directions in it."""
        new_MC = self.codes_MC.float() * self.lengths_M[:, None]
        index_M = self.slots_M.long().clamp(min=0)
        new_MC = torch.where(self.slots_M[:, None] < 0, directions_KC[index_M], new_MC)
        return directions_KC.index_copy(0, index_M, new_MC)

    def digest(self) -> Tensor:
        """An int64 number of 31 bits, other for every change of one slot, one code or half a length.

        Of any other change one in 2^31 goes unnoticed. Sums of integers are the same in every order.
        """
        # Parts and weights below 2^16: their products' lowest 31 bits are not all zero, so that each change shows.
        parts = (self.slots_M, self.lengths_M.view(torch.int16), self.codes_MC.reshape(-1))
        values = torch.cat([part.long() for part in parts])
        return (values * _weights(values.numel(), values.device)).sum() & 0x7FFFFFFF


def renew(
    x_RC: Tensor,
    directions_KC: Tensor,
    count: int,
    products_RK: Tensor,
    inverse_KK: Tensor,
) -> Renewal:
    """Find what tokens have most of outside the basis, in place of the `count` directions that serve them least.

    The tokens' remainder, once the directions that stay are taken out, goes through a block power method: products with
    `count` columns, and no C x C matrix. With all directions renewed this is the best basis for these tokens.

    Args:
        x_RC: float32. directions_KC: the last basis; zeros where there is none yet.
        products_RK: of tokens and directions; inverse_KK: `gram_inverse(directions_KC)`.
    """
    low, high = x_RC.aminmax()
    top = torch.maximum(high, -low)
    usable = (top >= SMALLEST) & (top <= FARTHEST)  # not so for NaN
    scale = inverse(torch.where(usable, top, 0.0))  # squares of tiny gradients would underflow
    c_RK = products_RK @ inverse_KK
    slots_M = (c_RK * scale).square().sum(0).argsort(stable=True)[:count]
    # Without some of the directions, the others' coefficients are other ones; a block of the inverse says which.
    factor_MM, _ = torch.linalg.cholesky_ex(inverse_KK[slots_M][:, slots_M])
    share_MK = torch.cholesky_solve(inverse_KK[slots_M], factor_MM)
    kept_RK = (c_RK - c_RK[:, slots_M] @ share_MK).index_fill(1, slots_M, 0.0)
    rest_RC = torch.addmm(x_RC, kept_RK, directions_KC, alpha=-1)
    new_MC = _leading(rest_RC, count, scale)
    lengths_M = new_MC.abs().amax(1) / 127
    codes_MC = (new_MC / lengths_M[:, None]).round().clamp(-127, 127)
    slots_M = torch.where(usable, slots_M, -1)
    return Renewal(slots_M.to(torch.int16), lengths_M, codes_MC.to(torch.int8))


def _leading(x_RC: Tensor, count: int, scale: Tensor) -> Tensor:
    """Orthonormal (count, C): about the principal directions of these tokens; any others where there is NaN.

    Args:
        scale: a factor that keeps squares of the tokens from underflow.
    """
    v_MC = _start(count, x_RC.shape[1], x_RC.device)
    for _ in range(ITERATIONS):
        # Few rows rather than few columns at every product: several times faster on CPUs.
        along_MR = (v_MC @ x_RC.t()) * scale
        powers_MC = (along_MR @ x_RC * scale).nan_to_num(0.0, 0.0, 0.0)
        v_MC = torch.linalg.qr(powers_MC.t())[0].t().contiguous()
    return v_MC


# What follows is kept, because it is the same for every message. It is made on the host, whose copy waits until it is
# there, so that every stream may read it.


@functools.lru_cache(maxsize=64)
def _start(count: int, channels: int, device: torch.device) -> Tensor:
    """Where the power method starts."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    start_CM = torch.randn(channels, count, generator=generator, dtype=torch.float32, device="cpu")
    return start_CM.t().contiguous().to(device)


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    return ((torch.arange(count, device="cpu") % 65521 + 1) * 0x9E3779B1).to(device)


def gram_inverse(directions_KC: Tensor) -> Tensor:
    """The (K, K) that makes coefficients of tokens' products with the directions, from the directions alone.

    As they travel, directions are not quite orthogonal to each other: products by themselves would count twice.
    """
    gram_KK = directions_KC @ directions_KC.t()
    gram_KK.diagonal().add_(RIDGE)
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(gram_KK)[0])


def renewed_products(
    x_RC: Tensor, products_RK: Tensor, renewal: Renewal, directions_KC: Tensor
) -> Tensor:
    """Products (R, K) of tokens and a basis with new directions in it, from those before: new columns alone."""
    index_M = renewal.slots_M.long().clamp(min=0)
    return products_RK.index_copy(1, index_M, x_RC @ directions_KC[index_M].t())


def units_of(c_RK: Tensor) -> Tensor:
    """What the coefficients along each direction are measured in: their root mean square, bfloat16 (K,)."""
    size_RK = c_RK.abs()
    size_RK = torch.where(size_RK <= FARTHEST, size_RK, 0.0)  # not NaN either
    top = size_RK.amax()
    top = torch.where(top >= SMALLEST, top, 0.0)  # the reciprocal of less would be Inf
    return ((size_RK * inverse(top)).square().mean(0).sqrt() * top).bfloat16()


def best_rank(x_RC: Tensor, bits: int, refresh: int) -> int:
    """How many directions suit these tokens, if the rest has so many bits: most decibels for the bits that they cost.

    An integer of b bits leaves noise in proportion to 4^-b of what it codes, whether remainder or coefficients (8), and
    everywhere a bit more an element is worth 6.02 dB. So the best number has the least noise(k) 4^bits(k).

    The energy along each direction comes from the block power method with `MOST` columns, so that is the most this
    returns; below `MOST` tokens or channels it sees all there is. The last bits of products depend on the machine and
    its threads, and so might the answer: who needs the same one elsewhere must send it there.

    Returns:
        1 to `MOST`; 0 for tokens that tell nothing: all zeros, or with NaN or Inf.
    """
    if not bool(x_RC.any()) or not bool(x_RC.isfinite().all()):
        return 0
    rows, channels = x_RC.shape
    x_RC = (x_RC.double() / x_RC.abs().amax()).float()  # the reciprocal of tiny numbers is Inf
    v_NC = _leading(x_RC, min(MOST, rows, channels), x_RC.new_ones(()))
    seen_RN = (x_RC @ v_NC.t()).double()
    energy_N = torch.linalg.eigvalsh(seen_RN.t() @ seen_RN).flip(0).clamp(min=0)
    total = x_RC.square().sum(dtype=torch.float64)
    share_N = (energy_N.cumsum(0) / total).clamp(max=1)
    k_N = torch.arange(1, len(energy_N) + 1, device=x_RC.device)
    noise_N = (1 - share_N) * 4.0**-bits + share_N * 4.0**-8
    new_N = (k_N + refresh - 1) // refresh
    bits_N = 8 * k_N / channels + 8 * new_N / rows
    return int((noise_N.log2() / 2 + bits_N).argmin()) + 1
