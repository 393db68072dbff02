"""Low-bit communication inside the engines of others, one module for each: torchft, TorchTitan, Megatron, Transformers.

The modules import their engines, so none is imported here. Each names the extra that installs its engine.
"""

from lowbit.integrations.engine import EngineError

__all__ = ["EngineError"]
