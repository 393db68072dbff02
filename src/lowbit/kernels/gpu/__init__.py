"""Building blocks of GPU kernels, in Triton: the reference's bytes at the speed of memory.

With TRITON_INTERPRET=1 in the environment, before Triton is first imported, kernels run on CPU tensors.
"""
