"""The methods of `lowbit bench memory`: how activations, gradients and optimizer states are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.activations.hooks import coded_by
from lowbit.codecs import BlockFloat8
from lowbit.gradients import GradientStorage
from lowbit.plan import measure
from lowbit.train.config import OptimizerConfig
from lowbit.train.optim import eight_bit_adamw, make_optimizer, parts_of
from lowbit_lab.bench.memory import in_8_bits

Around = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def saving(method: str, model: nn.Module, bits: int) -> Iterator[Around]:
    """Let autograd save a model's activations by a method while the block runs.

    bf16: as PyTorch does. checkpoint: the inputs of decoder layers, which run again in backward (non-reentrant). fp8:
    all saved tensors, attention's too, as `BlockFloat8`, none recomputed (COAT does the same in fused layers).
    low-bit: `compress_saved_`, with `bits` unless that is 0. int4: 4 bits (or `bits`) for all but attention, norms too.
    int4-uniform: for attention, too. agoq: `LayerAware.published()`. What follows "+" concerns `Updates`.

    Yields:
        Makes the context that each forward pass has to run in.
    """
    around: Around = contextlib.nullcontext
    method = method.partition("+")[0]
    with contextlib.ExitStack() as stack:
        if method == "checkpoint":
            stack.callback(enable_checkpointing(model))
        elif method == "fp8":
            around = partial(coded_by, BlockFloat8(), attention=BlockFloat8())
        elif method != "bf16":
            stack.callback(compress_saved_(model, policy_of(bits, method), report=False).remove)
        yield around


def policy_of(bits: int, method: str = "low-bit") -> LayerAware:
    """Return the policy of a method. bits: for saved activations; 0: its default."""
    if method == "low-bit":
        return LayerAware(bits=bits) if bits else LayerAware()
    if method == "agoq":
        return LayerAware.published()
    few = bits or 4
    return LayerAware(bits=few, norm=few, attention=few if method == "int4-uniform" else 16)


def enable_checkpointing(model: nn.Module) -> Callable[[], None]:
    """Checkpoint a model's decoder layers as Hugging Face does; returns what undoes it."""
    # Versions of transformers before 5.2x know it under the second name.
    on, off = (
        getattr(model, f"activation_{word}", None) or getattr(model, f"gradient_{word}")
        for word in ("checkpointing_enable", "checkpointing_disable")
    )
    on({"use_reentrant": False})
    return off


class Updates:
    """Gradients and optimizer of a method: in 8 bits if `in_8_bits` names them, otherwise `.grad` and PyTorch's AdamW.

    Raises:
        ModuleNotFoundError: torchao, whose 8-bit AdamW is used, is not installed.
    """

    def __init__(self, method: str, model: nn.Module, config: OptimizerConfig) -> None:
        self.model = model
        eight = in_8_bits(method)
        self.storage = GradientStorage(model) if "gradients" in eight else None
        make = eight_bit_adamw if "optimizer" in eight else make_optimizer
        self.optimizer = make(model.parameters(), config)

    def step(self, microbatches: int) -> None:
        """Take a step with the mean of the gradients, and drop them."""
        if self.storage is not None:
            self.storage.scale_(1 / microbatches)
            self.storage.step(self.optimizer)
            self.storage.zero_()
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / microbatches)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Gradients of a loss as they are stored, by name of the parameter, in float32; they are dropped at once."""
        if self.storage is None:
            return measure.gradients(self.model, loss)
        loss().backward()
        parameters = self.model.named_parameters()
        stored = {name: self.storage.gradient(parameter, torch.float32) for name, parameter in parameters}
        self.storage.zero_()
        return {name: gradient for name, gradient in stored.items() if gradient is not None}

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are stored now."""
        if self.storage is not None:
            return self.storage.nbytes
        return sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        values = [v for state in self.optimizer.state.values() for v in state.values()]
        return sum(x.nbytes for value in values if isinstance(value, Tensor) for x in parts_of(value).values())
