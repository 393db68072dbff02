"""The directions that a boundary's tokens lie near: how a sender renews them, and how both ends take the new ones.

Nothing here waits for a GPU. Shape suffixes: R rows (tokens), K directions, M of them renewed, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.ops.group_int import inverse
from lowbit.ops.subspace import FARTHEST

ITERATIONS = 3  # of the block power method, from a random start
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

    def applied(self, directions_KC: Tensor) -> Tensor:
        """A basis with the new directions in it."""
        new_MC = self.codes_MC.float() * self.lengths_M[:, None]
        index_M = self.slots_M.long().clamp(min=0)
        new_MC = torch.where(self.slots_M[:, None] < 0, directions_KC[index_M], new_MC)
        return directions_KC.index_copy(0, index_M, new_MC)

    def digest(self) -> Tensor:
        """An int64 number that differs when any byte does, in all likelihood; sums of integers have no order."""
        parts = (self.slots_M, self.lengths_M.view(torch.int32), self.codes_MC.reshape(-1))
        values = torch.cat([part.long() for part in parts])
        weights = torch.arange(values.numel(), device=values.device) % 65521 + 1
        return (values * weights * 0x9E3779B1).sum()


def renew(x_RC: Tensor, directions_KC: Tensor, count: int) -> Renewal:
    """Find what tokens have most of outside the basis, in place of the `count` directions that serve them least.

    The tokens' remainder, once the directions that stay are taken out, goes through a block power method: products with
    `count` columns, and no C x C matrix. With all directions renewed this is the best basis for these tokens.

    Args:
        x_RC: float32. directions_KC: the last basis; zeros where there is none yet.
    """
    top = x_RC.abs().amax()
    usable = top <= FARTHEST  # not so for NaN
    # Squares of tiny gradients would underflow.
    x_RC = torch.where(usable, x_RC * inverse(top), 0.0)
    c_RK = project(x_RC, directions_KC)
    slots_M = c_RK.square().sum(0).argsort(stable=True)[:count]
    kept_KC = directions_KC.index_fill(0, slots_M, 0.0)
    rest_RC = x_RC - project(x_RC, kept_KC) @ kept_KC
    generator = torch.Generator().manual_seed(0)
    v_CM = torch.randn(x_RC.shape[1], count, generator=generator).to(x_RC.device)
    for _ in range(ITERATIONS):
        v_CM, _ = torch.linalg.qr(rest_RC.t() @ (rest_RC @ v_CM))
    new_MC = v_CM.t()
    lengths_M = new_MC.abs().amax(1) / 127
    codes_MC = (new_MC / lengths_M[:, None]).round().clamp(-127, 127)
    slots_M = torch.where(usable, slots_M, -1)
    return Renewal(slots_M.to(torch.int16), lengths_M, codes_MC.to(torch.int8))


def project(x_RC: Tensor, directions_KC: Tensor) -> Tensor:
    """Coefficients (R, K) whose combination of the directions comes nearest to each token.

    As they travel, directions are not quite orthogonal to each other: products with them alone would count twice.
    """
    eye_KK = torch.eye(len(directions_KC), device=x_RC.device)
    factor_KK, _ = torch.linalg.cholesky_ex(directions_KC @ directions_KC.t() + RIDGE * eye_KK)
    return x_RC @ torch.cholesky_solve(directions_KC, factor_KK).t()


def units_of(c_RK: Tensor) -> Tensor:
    """What the coefficients along each direction are measured in: their root mean square, bfloat16 (K,)."""
    top = torch.where(c_RK.abs() <= FARTHEST, c_RK, 0.0).abs().amax()
    scaled_RK = torch.where(c_RK.abs() <= FARTHEST, c_RK * inverse(top), 0.0)
    return (scaled_RK.square().mean(0).sqrt() * top).bfloat16()
