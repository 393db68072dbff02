"""The orthonormal transform, whose first coordinates are the directions that both ends hold.

It is a product of Householder reflections, one for each direction, in the compact form H = I - Y' T Y. A token x has
the coefficients x H, and is restored by multiplying them by H'. Tokens are never multiplied by a C x C matrix. Both
ends compute H from the same directions; the last bits of their results may differ, which changes a tensor only by
rounding, because no code depends on them. Shape suffixes: R rows (tokens), K directions, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.codecs.basis.reference import invert
from lowbit.kernels import implementation
from lowbit.kernels.exact import store


def transform_of(directions: Tensor, before: Transform | None = None, slots: Tensor | None = None) -> Transform:
    """The transform of directions (K, C), float32.

    Args:
        before: the transform of directions that differ at `slots` alone, int16 (M,), with -1 for none.
    """
    return Transform(directions)


class Transform:
    """The transform of these directions, (K, C)."""

    def __init__(self, directions_KC: Tensor) -> None:
        self.directions_KC = directions_KC

    def coefficients(self, x_RC: Tensor, products_RK: Tensor | None = None) -> Tensor:
        """Coefficients of float32 tokens, (R, C), whose products with the directions may be known."""
        y_KC, ty_KC = self._reflections(back=False)
        return torch.addmm(x_RC, x_RC @ y_KC.t(), ty_KC, alpha=-1)

    def tokens(self, z_RC: Tensor, out: Tensor, factors_C: Tensor | None = None) -> None:
        """Write the tokens of these coefficients, times channel factors if given, to `out`, (R, C), in its dtype."""
        y_KC, ty_KC = self._reflections(back=True)
        along_RK = z_RC @ y_KC.t()
        if out.dtype == torch.float32:
            torch.addmm(z_RC, along_RK, ty_KC, alpha=-1, out=out)
            if factors_C is not None:
                out.mul_(factors_C)
        else:
            x_RC = z_RC.addmm(along_RK, ty_KC, alpha=-1)
            store(x_RC if factors_C is None else x_RC.mul_(factors_C), out, False)

    def inverse(self) -> Tensor:
        """The inverse of the directions' products with each other, float32 (K, K)."""
        count = len(self.directions_KC)
        inverse_KK = self.directions_KC.new_empty(count, count)
        implementation(invert, inverse_KK.device)(self.directions_KC, inverse_KK)
        return inverse_KK

    def _reflections(self, *, back: bool) -> tuple[Tensor, Tensor]:
        """Return Y, (K, C), and T Y, or T' Y for the way back; a direction of zeros reflects nothing.

        The signs of reflections are those of float64 sums, so that all ends find the same.
        """
        directions_KC = self.directions_KC
        packed_CK, tau_K = torch.geqrf(directions_KC.t().double())
        y_KC = packed_CK.t().triu(1)
        y_KC.diagonal().fill_(1)
        y_KC *= (tau_K != 0)[:, None]
        # The inverses of T and T' are the two triangles of Y Y', whose diagonal is the sum of both diagonals.
        inverse_KK = (y_KC @ y_KC.t()).triu_(1)
        inverse_KK.diagonal().copy_(torch.where(tau_K != 0, tau_K, 1.0).reciprocal_())
        inverse_KK = inverse_KK.t() if back else inverse_KK
        return y_KC.float(), torch.linalg.solve_triangular(inverse_KK, y_KC, upper=not back).float()


def coefficients(x_RC: Tensor, directions_KC: Tensor) -> Tensor:
    """Coefficients of float32 tokens, (R, C)."""
    return implementation(transform_of, x_RC.device)(directions_KC).coefficients(x_RC)


def tokens(z_RC: Tensor, directions_KC: Tensor, out: Tensor, factors_C: Tensor | None = None) -> None:
    """Write the tokens of these coefficients, times channel factors if given, to `out`, (R, C), in its dtype."""
    implementation(transform_of, z_RC.device)(directions_KC).tokens(z_RC, out, factors_C)
