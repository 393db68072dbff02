"""Low-bit gradients: stored between micro-batches, and averaged over data-parallel ranks."""

from lowbit.gradients.data_parallel import LowBitReduceScatter, all_reduce_hook
from lowbit.gradients.storage import GradientStorage

__all__ = ["GradientStorage", "LowBitReduceScatter", "all_reduce_hook"]
