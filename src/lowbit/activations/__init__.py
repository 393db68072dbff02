"""Saved activations, which autograd keeps from forward to backward, in few bits (AGoQ, arXiv 2605.00539)."""

from lowbit.activations.changes import Compressed, restore_
from lowbit.activations.checkpoint import checkpoint_
from lowbit.activations.counting import counted
from lowbit.activations.hooks import low_bit_saved
from lowbit.activations.layer_plan import LayerChoice, LayerPlan
from lowbit.activations.policy import LayerAware
from lowbit.activations.saved import compress_saved_

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
