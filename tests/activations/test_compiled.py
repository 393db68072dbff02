"""`torch.compile(fullgraph=True)` of compressed models."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.codecs import BlockFloat8, GroupInt
from tests.activations.models import GatedBlock, distance, gradients, hugging_face, loss_of, saved_bytes, tokens

SPLIT = "aot_eager_decomp_partition"
"""Partitions the graph as Inductor does, and needs no C++ compiler."""


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("norm", "bits"), [(nn.LayerNorm, 8), (nn.RMSNorm, BlockFloat8())], ids=str)
def test_a_block_is_one_graph(norm: Any, bits: Any):
    torch.manual_seed(0)
    plain = GatedBlock(norm=norm)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=bits, norm=bits, smallest=0))
    compiled: Any = torch.compile(ours, fullgraph=True, backend=SPLIT)
    x = torch.randn(4, 20, 32, requires_grad=True)
    y = x.detach().requires_grad_()
    with saved_bytes(ours) as saved:
        out = compiled(x)
    wanted = plain(y)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    found = gradients(ours, out.square().sum()) | {"x": x.grad}
    expected = gradients(plain, wanted.square().sum()) | {"x": y.grad}
    error = distance(found, expected)
    assert error < (0.02 if bits == 8 else 0.06)
    codec = GroupInt(bits=bits) if isinstance(bits, int) else bits
    row, wide = codec.nbytes((4, 20, 32)), codec.nbytes((4, 20, 72))
    # The norm's input, what gate and up share, and the activation's input. The product follows from its factors.
    assert saved[torch.uint8] == 2 * row + wide


@pytest.mark.slow
def test_llama_in_one_graph_and_layers_that_are_compiled_by_themselves():
    plain, ids = hugging_face("llama"), tokens()
    expected = gradients(plain, loss_of(plain, ids))
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=8))
    model: Any = torch.compile(ours, fullgraph=True, backend=SPLIT)
    for _ in range(2):
        assert distance(gradients(ours, loss_of(model, ids)), expected) < 0.02
    with torch.autocast("cpu", torch.bfloat16):
        assert distance(gradients(ours, loss_of(model, ids)), expected) < 0.05
    for layer in ours.model.layers:
        layer.compile(backend="aot_eager")
    for _ in range(3):
        assert distance(gradients(ours, loss_of(ours, ids)), expected) < 0.03


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_another_shape_and_evaluation(backend: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 72), nn.GELU(), nn.Linear(72, 32))
    expected = copy.deepcopy(model)
    compress_saved_(model, LayerAware(bits=8, smallest=0))
    compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
    for rows in (20, 12):
        x = torch.randn(4, rows, 32)
        found = gradients(model, compiled(x).square().sum())
        assert distance(found, gradients(expected, expected(x).square().sum())) < 0.02
    model.eval()
    torch.testing.assert_close(compiled(x), expected(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(x))
