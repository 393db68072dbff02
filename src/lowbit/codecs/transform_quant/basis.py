"""The transform: an orthonormal one whose first coordinates are the directions that both ends hold.

It is a product of Householder reflections, one for each direction, in its compact form H = I - Y T Y': the token x gets
the coefficients x H, and comes back as their product with H'. Tokens are never multiplied by a C x C matrix. Both ends
compute H from the same directions; the last bits of their results may differ, which moves a tensor by rounding alone,
because nothing that is coded depends on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.kernels.exact import store


class Transform:
    """H for K directions of C channels."""

    def __init__(self, directions_KC: Tensor) -> None:
        packed_CK, tau_K = torch.geqrf(directions_KC.t())
        y_KC = packed_CK.t().triu(1)
        y_KC.diagonal().fill_(1)
        y_KC *= (tau_K != 0)[:, None]  # no direction, no reflection
        # T and its transpose's inverse are the two triangles of Y'Y, whose diagonal is that of both together.
        inverse_KK = (y_KC @ y_KC.t()).triu_(1)
        inverse_KK.diagonal().copy_(torch.where(tau_K != 0, tau_K, 1.0).reciprocal_())
        self._y_KC = y_KC
        self._there_KC = torch.linalg.solve_triangular(inverse_KK, y_KC, upper=True)  # T Y'
        self._back_KC = torch.linalg.solve_triangular(inverse_KK.t(), y_KC, upper=False)  # T' Y'

    def forward(self, x_RC: Tensor) -> Tensor:
        """Coefficients of float32 tokens, (R, C)."""
        return torch.addmm(x_RC, x_RC @ self._y_KC.t(), self._there_KC, alpha=-1)

    def inverse(self, z_RC: Tensor, out: Tensor) -> None:
        """Write the tokens with these coefficients to `out`, (R, C), in its dtype."""
        along_RK = z_RC @ self._y_KC.t()
        if out.dtype == torch.float32:
            torch.addmm(z_RC, along_RK, self._back_KC, alpha=-1, out=out)
        else:
            store(z_RC.addmm(along_RK, self._back_KC, alpha=-1), out, False)
