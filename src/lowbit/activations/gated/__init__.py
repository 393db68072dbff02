"""Gated activations whose backward starts from quantized inputs: operators of `lowbit.activations`."""
