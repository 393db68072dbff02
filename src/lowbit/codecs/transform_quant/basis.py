"""The orthonormal transform, whose first coordinates are the directions that both ends hold.

It is a product of Householder reflections, one for each direction, in the compact form H = I - Y' T Y. A token x has
the coefficients x H, and is restored by multiplying them by H'. Tokens are never multiplied by a C x C matrix. Both
ends compute H from the same directions; the last bits of their results may differ, which changes a tensor only by
rounding, because no code depends on them. Shape suffixes: R rows (tokens), K directions, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.kernels import implementation
from lowbit.kernels.exact import store


def reflections(directions: Tensor, y: Tensor, ty: Tensor, back: bool) -> None:
    """Write Y, (K, C), and T Y, or T' Y for the way back, in float32; a direction of zeros reflects nothing."""
    packed_CK, tau_K = torch.geqrf(directions.t())
    y.copy_(packed_CK.t().triu(1))
    y.diagonal().fill_(1)
    y *= (tau_K != 0)[:, None]
    # The inverses of T and T' are the two triangles of Y Y', whose diagonal is the sum of both diagonals.
    inverse_KK = (y @ y.t()).triu_(1)
    inverse_KK.diagonal().copy_(torch.where(tau_K != 0, tau_K, 1.0).reciprocal_())
    inverse_KK = inverse_KK.t() if back else inverse_KK
    ty.copy_(torch.linalg.solve_triangular(inverse_KK, y, upper=not back))


def coefficients(x_RC: Tensor, directions_KC: Tensor) -> Tensor:
    """Coefficients of float32 tokens, (R, C)."""
    y_KC, ty_KC = _reflections(directions_KC, False)
    return torch.addmm(x_RC, x_RC @ y_KC.t(), ty_KC, alpha=-1)


def tokens(z_RC: Tensor, directions_KC: Tensor, out: Tensor, factors_C: Tensor | None = None) -> None:
    """Write the tokens of these coefficients, times channel factors if given, to `out`, (R, C), in its dtype."""
    y_KC, ty_KC = _reflections(directions_KC, True)
    along_RK = z_RC @ y_KC.t()
    if out.dtype == torch.float32:
        torch.addmm(z_RC, along_RK, ty_KC, alpha=-1, out=out)
        if factors_C is not None:
            out.mul_(factors_C)
    else:
        x_RC = z_RC.addmm(along_RK, ty_KC, alpha=-1)
        store(x_RC if factors_C is None else x_RC.mul_(factors_C), out, False)


def _reflections(directions_KC: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    y_KC, ty_KC = torch.empty_like(directions_KC), torch.empty_like(directions_KC)
    implementation(reflections, directions_KC.device)(directions_KC, y_KC, ty_KC, back)
    return y_KC, ty_KC
