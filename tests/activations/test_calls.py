"""Functions of a compressed model may be called in each way that PyTorch allows."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowbit.activations import LayerAware, compress_saved_
from tests.activations.models import DIM, GatedBlock, distance

CALLS: dict[str, Any] = {
    "mm": lambda x, w: torch.mm(x, w),
    "mm mat2": lambda x, w: torch.mm(x, mat2=w),
    "mm by name": lambda x, w: torch.mm(input=x, mat2=w),
    "Tensor.mm mat2": lambda x, w: x.mm(mat2=w),
    "matmul other": lambda x, w: torch.matmul(x, other=w),
    "Tensor.matmul": lambda x, w: x.matmul(other=w),
    "addmm": lambda x, w: torch.addmm(input=w[0], mat1=x, mat2=w),
    "addmm beta": lambda x, w: torch.addmm(w[0], x, w, beta=0.5, alpha=2),
    "linear": lambda x, w: functional.linear(input=x, weight=w, bias=None),
    "dropout train": lambda x, w: torch.dropout(x @ w, 0.5, train=True),
    "dropout by name": lambda x, w: torch.dropout(input=x @ w, p=0.5, train=True),
    "functional.dropout": lambda x, w: functional.dropout(input=x @ w, p=0.5, training=True, inplace=False),
    "mul": lambda x, w: torch.mul(input=x @ w, other=x),
    "relu": lambda x, w: torch.relu(input=x @ w),
    "silu": lambda x, w: functional.silu(input=x @ w, inplace=False),
    "gelu": lambda x, w: functional.gelu(input=x @ w, approximate="tanh"),
    "bmm": lambda x, w: torch.bmm(input=x[None], mat2=w[None]),
    "index_select": lambda x, w: torch.index_select(input=x @ w, dim=0, index=torch.arange(4)),
    "layer_norm": lambda x, w: functional.layer_norm(input=x @ w, normalized_shape=[DIM], weight=w[0], bias=w[1]),
    "rms_norm": lambda x, w: functional.rms_norm(input=x @ w, normalized_shape=[DIM], weight=w[0]),
    "reshape": lambda x, w: torch.reshape(input=functional.silu(x @ w), shape=(-1,)),
    "chunk": lambda x, w: torch.chunk(input=functional.silu(x @ w), chunks=2, dim=1)[0],
    "select": lambda x, w: torch.select(input=functional.silu(x @ w), dim=0, index=1),
}


class Calls(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call, self.weight = call, nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight)


@pytest.mark.parametrize("name", CALLS)
def test_legal_calls(name: str):
    torch.manual_seed(0)
    model, x = Calls(CALLS[name]), torch.randn(40, DIM)
    grads = []
    for compressed in (False, True):
        if compressed:
            compress_saved_(model, LayerAware(bits=16, attention=16))
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(model(x).square().sum(), [model.weight])[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-2)


def test_selective_checkpoints_save_as_they_are():
    torch.manual_seed(0)
    model, x = GatedBlock(), torch.randn(2, 20, DIM)
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        lambda _, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
        ),
    )
    grads = []
    for compressed in (False, True):
        if compressed:
            compress_saved_(model)
        out: Any = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        out.square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    assert distance(grads[1], grads[0]) < 1e-5
