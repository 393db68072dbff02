"""Bases on a GPU: PyTorch's matrix products, and a few of its operations on one number per direction."""

from lowbit.codecs.basis.reference import follow, invert, renew

__all__ = ["follow", "invert", "renew"]
