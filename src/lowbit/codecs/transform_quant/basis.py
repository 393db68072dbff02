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
        packed_CK, tau_K = torch.geqrf(directions_KC.double().t())
        used_K = tau_K != 0  # no direction, no reflection
        y_CK = packed_CK.tril(-1)
        y_CK.diagonal().fill_(1)
        y_CK = y_CK * used_K
        # T and its transpose's inverse are the two triangles of Y'Y, whose diagonal is that of both together.
        diagonal_K = torch.where(used_K, tau_K, 1.0).reciprocal()
        inverse_KK = (y_CK.t() @ y_CK).triu(1) + diagonal_K.diag()
        eye_KK = torch.eye(len(tau_K), dtype=torch.float64, device=tau_K.device)
        t_KK = torch.linalg.solve_triangular(inverse_KK, eye_KK, upper=True)
        self._y_KC = y_CK.t().float().contiguous()
        self._there_KC = (t_KK @ y_CK.t()).float()  # T Y'
        self._back_KC = (t_KK.t() @ y_CK.t()).float()  # T' Y'

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
