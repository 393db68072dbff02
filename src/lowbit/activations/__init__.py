"""Saved activations, which autograd keeps from forward to backward, in few bits (AGoQ, arXiv 2605.00539).

A new model family needs a change only where it computes something new: a norm or an activation function is recognized
in `structure`, a layer of experts in `experts`, an autograd function of another package in `python_functions`; what a
torch function saves is in `handlers`, and how backward rebuilds a tensor in `recipes`.
"""

from lowbit.activations.checkpoint import checkpoint_
from lowbit.activations.counting import counted
from lowbit.activations.hooks import low_bit_saved
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
    "low_bit_saved",
    "restore_",
]
