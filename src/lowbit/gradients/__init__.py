"""Low-bit gradients: stored between micro-batches, and averaged over data-parallel ranks."""

from __future__ import annotations

from lowbit.gradients.ddp import all_reduce_hook
from lowbit.gradients.fsdp import LowBitReduceScatter
from lowbit.gradients.storage import GradientStorage

__all__ = ["GradientStorage", "LowBitReduceScatter", "all_reduce_hook"]
