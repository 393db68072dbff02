"""Building blocks of CPU kernels, compiled by numba: the reference's bytes at the speed of memory."""
