"""Saves activations, which autograd keeps from forward to backward, in few bits (AGoQ, arXiv 2605.00539).

A new model family needs changes only for what it computes differently: `structure` recognizes norms and activation
functions, and `experts` layers of experts; `saved` lets autograd functions of other packages be followed; `handlers`
defines what a torch function saves, and `recipes` how backward rebuilds a tensor.
"""

from lowbit.activations.checkpoint import checkpoint_
from lowbit.activations.counting import counted
from lowbit.activations.layer_plan import LayerChoice, LayerPlan
from lowbit.activations.policy import LayerAware
from lowbit.activations.saved import Compressed, compress_saved_, restore_

__all__ = [
    "Compressed",
    "LayerAware",
    "LayerChoice",
    "LayerPlan",
    "checkpoint_",
    "compress_saved_",
    "counted",
    "restore_",
]
