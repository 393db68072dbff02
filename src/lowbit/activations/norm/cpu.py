"""Norms on the CPU: the definitions in PyTorch; `GroupInt`'s kernels code their payloads."""

from lowbit.activations.norm import reference

encode, recompute, backward = (
    operator.definition for operator in (reference.encode, reference.recompute, reference.backward)
)
