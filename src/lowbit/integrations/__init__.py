"""Low-bit communication in other engines, one module for each: torchft, TorchTitan, Megatron, Transformers, vLLM.

The modules import their engines, so none is imported here. Each names the extra that installs its engine.
"""

from lowbit.integrations.engine import EngineError

__all__ = ["EngineError"]
