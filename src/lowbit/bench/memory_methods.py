"""Ways of keeping activations, gradients and optimizer state that `lowbit bench memory` compares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.activations.hooks import coded_by
from lowbit.bench.memory import EIGHT_BIT
from lowbit.codecs import BlockFloat8
from lowbit.gradients import GradientStorage
from lowbit.train.config import OptimizerConfig
from lowbit.train.optim import make_optimizer

Around = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def saving(method: str, model: nn.Module, bits: int) -> Iterator[Around]:
    """Have autograd save a model's activations in a method's way while the block runs.

    bf16: as PyTorch does. checkpoint: the inputs of decoder layers, which run again in backward (non-reentrant). fp8:
    everything that is saved, attention's tensors too, as `BlockFloat8`, nothing recomputed (as COAT does, which fuses
    it into its layers). int4-uniform: `compress_saved_` with `bits` everywhere, in attention and norms, too. int4: all
    but attention. low-bit: as `LayerAware` has it, with 8 bits for norms.

    Yields:
        What each forward pass has to run in.
    """
    around: Around = contextlib.nullcontext
    with contextlib.ExitStack() as stack:
        if method == "checkpoint":
            # Versions of transformers before 5.2x know it under the second name.
            on, off = (
                getattr(model, f"activation_{word}", None) or getattr(model, f"gradient_{word}")
                for word in ("checkpointing_enable", "checkpointing_disable")
            )
            on({"use_reentrant": False})
            stack.callback(off)
        elif method == "fp8":
            around = partial(coded_by, BlockFloat8(), attention=BlockFloat8())
        elif method != "bf16":
            attention = bits if method == "int4-uniform" else 16
            norm = bits if method.startswith("int4") else None
            policy = LayerAware(bits=bits, norm=norm, attention=attention)
            compressed = compress_saved_(model, policy)
            stack.callback(compressed.remove)
        yield around


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
        loss().backward()
        gradients = {}
        for name, parameter in self.model.named_parameters():
            stored = parameter.grad
            if self.storage is not None:
                stored = self.storage.gradient(parameter, torch.float32)
            if stored is not None:
                gradients[name] = stored.detach().float().clone()
        if self.storage is not None:
            self.storage.zero_()
        self.optimizer.zero_grad()
        return gradients

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are stored now."""
        if self.storage is not None:
            return self.storage.nbytes
        return sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        values = [v for state in self.optimizer.state.values() for v in state.values()]
        return sum(_nbytes(value) for value in values if isinstance(value, Tensor))


def eight_bit_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """torchao's AdamW with states of 8 bits; not compiled on a CPU, where a compiler may be missing."""
    import torchao.optim  # pyright: ignore[reportMissingImports]

    every = list(parameters)
    if not every[0].is_cuda:
        torch.compiler.set_stance("force_eager")
    groups = [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torchao.optim.AdamW8bit(
        [group for group in groups if group["params"]],
        lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
    )  # fmt: skip


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor, also of one that holds others."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(_nbytes(getattr(tensor, name)) for name in names)
