"""On a GPU: the engine's matrix products, and a few of its operations on as many numbers as there are directions."""

from lowbit.codecs.basis.reference import coefficients, follow, invert, renew, units

__all__ = ["coefficients", "follow", "invert", "renew", "units"]
