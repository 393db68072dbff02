"""Declaration of operators on payloads, the layout of payloads, and building blocks of CPU and GPU kernels.

A package such as `lowbit.codecs.group_int` holds an operator's definition in plain PyTorch (`reference.py`) and, under
the same name, its numba kernel (`cpu.py`) and its Triton kernel (`gpu.py`).
"""

from lowbit.kernels.operators import Operator, apart, backend, implementation, operator

__all__ = ["Operator", "apart", "backend", "implementation", "operator"]
