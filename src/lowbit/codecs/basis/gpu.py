"""Bases on a GPU: PyTorch's matrix products, and a few of its operations on one number per direction."""

from lowbit.codecs.basis.reference import coefficients, follow, invert, renew, units

__all__ = ["coefficients", "follow", "invert", "renew", "units"]
