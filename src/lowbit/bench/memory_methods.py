"""The methods of `lowbit bench memory`: how activations, gradients and optimizer states are kept."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.activations.hooks import coded_by
from lowbit.bench.memory import EIGHT_BIT
from lowbit.codecs import BlockFloat8
from lowbit.gradients import GradientStorage
from lowbit.plan import measure
from lowbit.train.config import OptimizerConfig
from lowbit.train.optim import make_optimizer, parameter_groups

Around = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def saving(method: str, model: nn.Module, bits: int) -> Iterator[Around]:
    """Let autograd save a model's activations by a method while the block runs.

    bf16: as PyTorch does. checkpoint: the inputs of decoder layers, which run again in backward (non-reentrant). fp8:
    all saved tensors, attention's too, as `BlockFloat8`, none recomputed (COAT does the same in fused layers).
    low-bit: `compress_saved_`, with `bits` unless that is 0. int4: 4 bits (or `bits`) for all but attention, norms too.
    int4-uniform: for attention, too.

    Yields:
        Makes the context that each forward pass has to run in.
    """
    around: Around = contextlib.nullcontext
    with contextlib.ExitStack() as stack:
        if method == "checkpoint":
            stack.callback(enable_checkpointing(model))
        elif method == "fp8":
            around = partial(coded_by, BlockFloat8(), attention=BlockFloat8())
        elif method.startswith("int4"):
            few = bits or 4
            policy = LayerAware(bits=few, norm=few, attention=few if method == "int4-uniform" else 16)
            stack.callback(compress_saved_(model, policy, report=False).remove)
        elif method != "bf16":
            stack.callback(compress_saved_(model, policy_of(bits), report=False).remove)
        yield around


def policy_of(bits: int) -> LayerAware:
    """The policy with so many bits; 0: the default."""
    return LayerAware(bits=bits) if bits else LayerAware()


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
    """Gradients and optimizer of a method: 8 bits each for `low-bit+8bit`, otherwise `.grad` and PyTorch's AdamW.

    Raises:
        ModuleNotFoundError: torchao, whose 8-bit AdamW is used, is not installed.
    """

    def __init__(self, method: str, model: nn.Module, config: OptimizerConfig) -> None:
        self.model = model
        self.storage = GradientStorage(model) if method == EIGHT_BIT else None
        make = eight_bit_adamw if method == EIGHT_BIT else make_optimizer
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
        return sum(_nbytes(value) for value in values if isinstance(value, Tensor))


def eight_bit_adamw(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, compiled: bool = False
) -> torch.optim.Optimizer:
    """torchao's AdamW with states of 8 bits.

    `compiled`: also on a CPU, if there is a C++ compiler. That is four times as fast, but takes memory of its own.
    """
    import torchao.optim  # pyright: ignore[reportMissingImports]

    groups = parameter_groups(parameters, config)
    if not groups[0]["params"][0].is_cuda and not (compiled and shutil.which(os.environ.get("CXX", "g++"))):
        torch.compiler.set_stance("force_eager")
    return torchao.optim.AdamW8bit(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor, or of the tensors that a tensor subclass holds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(_nbytes(getattr(tensor, name)) for name in names)
