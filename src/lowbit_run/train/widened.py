"""Compute in float32 with frozen weights in 16, 8 and 4 bits.

For processors without bfloat16 products, which emulate them 60 times slower. A matrix in bfloat16 is converted one
piece at a time, so that no float32 copy of it exists, in backward neither.
"""

import logging
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

_PIECE = 1 << 21  # weights that are converted at a time


def widen_(model: nn.Module) -> None:
    """Let a model in bfloat16, whose weights are frozen, compute in float32; in place, before adapters are added.

    Matrices stay as narrow as they are. Mixtures of experts that hold several experts in one tensor stay as they are
    altogether, which is logged.
    """
    from transformers.pytorch_utils import Conv1D

    others = (module for module in model.modules() if not isinstance(module, nn.Conv1d))
    if any(p.dim() > 2 and p.dtype == torch.bfloat16 for module in others for p in module.parameters(recurse=False)):
        log.warning("experts in bfloat16 are computed in bfloat16, which processors without it emulate slowly")
        return
    for module in model.modules():
        if hasattr(module, "compute_dtype"):  # 4 bits, of bitsandbytes
            module.compute_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
            if (state := getattr(module.weight, "quant_state", None)) is not None:  # none without data
                state.dtype = torch.float32  # of dequantized weights, which backward would round to bfloat16
        elif type(module) is nn.Linear or isinstance(module, Conv1D):
            module.forward = MethodType(_linear, module)
        elif isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _module, _inputs, output: output.float())
        else:
            for parameter in module.parameters(recurse=False):
                if parameter.dtype == torch.bfloat16:  # not 8 bits
                    parameter.data = parameter.data.float()
    model.compute_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def _linear(layer: Any, x: Tensor) -> Tensor:
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
    output: Any = _Product.apply(x.float(), weight)
    return output if layer.bias is None else output + layer.bias


class _Product(torch.autograd.Function):
    """x @ weight.T in float32 with a frozen matrix in bfloat16, which is saved as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        rows = x.reshape(-1, x.shape[-1])
        output = x.new_empty(len(rows), len(weight))
        for start, piece in _pieces(weight):
            torch.mm(rows, piece.T, out=output[:, start : start + len(piece)])
        return output.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        rows = grads[0].reshape(-1, len(weight))
        total = rows.new_zeros(len(rows), weight.shape[1])
        for start, piece in _pieces(weight):
            total.addmm_(rows[:, start : start + len(piece)], piece)
        return total.view(*grads[0].shape[:-1], -1), None


def _pieces(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    count = max(1, _PIECE // weight.shape[1])
    return ((start, weight[start : start + count].float()) for start in range(0, len(weight), count))
