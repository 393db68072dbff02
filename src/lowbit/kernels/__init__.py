"""What operators on payloads share: how they are declared, their layouts, and building blocks of CPU and GPU kernels.

An operator belongs to a room, a package such as `lowbit.codecs.group_int`, that holds side by side its definition in
plain PyTorch (`reference.py`) and, under the same name, the numba kernel (`cpu.py`) and the Triton kernel (`gpu.py`).
"""

from __future__ import annotations

from lowbit.kernels.operators import Operator, apart, backend, implementation, operator

__all__ = ["Operator", "apart", "backend", "implementation", "operator"]
