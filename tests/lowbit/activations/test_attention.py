"""Attention that is written out as products and softmax: gradients, what is kept, and what users put in between."""

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lowbit.activations import LayerAware, compress_saved_, counted
from tests.lowbit.activations.models import Runs, distance, gradients

DIM, HEADS, LENGTH = 64, 4, 96


class Attention(nn.Module):
    """Heads of 16 channels, with a cap, a mask and dropout, in one of the ways that people write it."""

    def __init__(self, written: str = "matmul", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.written, self.dropout = written, nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))
        self.between: Callable[[Tensor], Any] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = self.scores(q, k.transpose(-1, -2))
        self.between(scores)
        probabilities = functional.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
        self.between(probabilities)
        y = self.dropout(probabilities) @ v
        return x + self.proj(y.transpose(1, 2).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        least = torch.finfo(q.dtype).min
        if self.written == "matmul":
            scores = 5 * torch.tanh(torch.matmul(q, k) / 4 / 5)
            return scores + torch.zeros_like(self.mask, dtype=q.dtype).masked_fill(self.mask, least)
        if self.written == "bmm":
            scores = torch.bmm(q.flatten(0, 1) * 0.25, k.flatten(0, 1)).view(len(q), HEADS, LENGTH, LENGTH)
            return scores.masked_fill(self.mask, -torch.inf)
        if self.written == "baddbmm":
            bias = -torch.arange(LENGTH, dtype=q.dtype).expand(len(q) * HEADS, 1, LENGTH) / 50
            scores = bias.baddbmm(batch1=q.flatten(0, 1), batch2=k.flatten(0, 1), beta=0.5, alpha=0.25)
            return scores.view(len(q), HEADS, LENGTH, LENGTH) + torch.where(self.mask, least, 0.0)
        scores = q @ k
        scores /= 4
        scores.masked_fill_(self.mask, least)
        return scores


def loss_of(model: nn.Module, *, autocast: bool = False, checkpointed: bool = False) -> Tensor:
    torch.manual_seed(1)  # dropout
    x = torch.randn(2, LENGTH, DIM)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
    return x.float().square().mean()


@pytest.mark.parametrize(("written", "dropout"), [("matmul", 0.2), ("bmm", 0.0), ("baddbmm", 0.2), ("in place", 0.0)])
def test_gradients_and_kept(written: str, dropout: float):
    plain = Attention(written, dropout)
    exact, ours, narrow = (copy.deepcopy(plain) for _ in range(3))
    compress_saved_(exact, LayerAware(bits=16))
    for model in (ours, narrow):
        compress_saved_(model)
    with counted(plain) as before:
        loss = loss_of(plain)
    with counted(ours) as after:
        assert torch.equal(loss_of(ours), loss)
    expected = gradients(plain, loss)
    assert distance(gradients(exact, loss_of(exact)), expected) < 1e-6
    assert distance(gradients(ours, loss_of(ours)), expected) < 0.03
    assert distance(gradients(ours, loss_of(ours, checkpointed=True)), expected) < 0.03
    in_bfloat16 = gradients(plain, loss_of(plain, autocast=True))
    assert distance(gradients(narrow, loss_of(narrow, autocast=True)), in_bfloat16) < 0.03
    assert after.total < 0.25 * before.total


@pytest.mark.parametrize("act", ["hook", "retain_grad", "module hook"])
def test_what_users_put_in_between(act: str):
    """Gradients of scores and probabilities are seen and changed as without compression."""
    plain, seen, found = Attention(), [], []
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=16))

    def hook(grad: Tensor) -> Tensor:
        seen.append(grad)
        return grad * 0.5

    def retained(x: Tensor) -> None:
        x.retain_grad()
        seen.append(x)

    for model in (plain, ours):
        if act == "module hook":
            model.dropout.register_full_backward_hook(lambda _, __, out: (hook(out[0]),))
        else:
            model.between = retained if act == "retain_grad" else lambda x: x.register_hook(hook)
        grads = gradients(model, loss_of(model))
        found.append((grads, [x.grad if act == "retain_grad" else x for x in seen]))
        seen.clear()
    assert len(found[0][1]) == len(found[1][1]) > 1
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-8)
    assert distance(found[1][0], found[0][0]) < 1e-6


def test_rows_without_a_single_token_stay_finite():
    """A mask with the least float32 would be -inf in bfloat16."""
    model = Attention()
    model.mask.fill_(True)  # pyright: ignore
    compress_saved_(model)
    grads = gradients(model, loss_of(model, autocast=True))
    assert all(grad.isfinite().all() for grad in grads.values())


def test_probabilities_of_routers_stay_as_they_are():
    """Softmax of anything but a product of two activations is left to PyTorch."""
    layer = nn.Sequential(nn.Linear(DIM, 32), nn.Softmax(-1))
    x = torch.randn(64, DIM)
    expected = layer(x)
    compress_saved_(layer)
    out = layer(x)
    assert torch.equal(out, expected)
    assert out.grad_fn is not None
    assert out.grad_fn.name() == "SoftmaxBackward0"


def masked(self: Runs, x: Tensor, how: str) -> Tensor:
    """One head, whose mask is written again before softmax runs, or made in inference mode."""
    q, k, v = self.qkv(x).chunk(3, -1)
    with torch.inference_mode(how == "inference"):
        mask = torch.full((1, LENGTH, LENGTH), -torch.inf).triu(1)
    scores = torch.baddbmm(mask, q, k.mT, alpha=1 / 8) if how == "baddbmm" else q @ k.mT / 8 + mask
    if how != "inference":
        mask.zero_()
    return self.proj(scores.softmax(-1) @ v)


@pytest.mark.parametrize("how", ["add", "baddbmm", "inference"])
def test_a_mask_that_cannot_be_read_again(how: str):
    plain = Runs(functools.partial(masked, how=how), qkv=nn.Linear(DIM, 3 * DIM), proj=nn.Linear(DIM, DIM))
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=16))
    assert distance(gradients(ours, loss_of(ours)), gradients(plain, loss_of(plain))) < 1e-4


def test_fused_attention_runs_again_as_it_ran():
    """By the kernels of the forward pass; its casts do not stay in the cache of an outer autocast."""
    backends, inputs = [], []

    def run_again(*args: Any, **kwargs: Any) -> Tensor:
        backends.append(_cur_sdpa_kernel_backends())
        inputs.extend(map(weakref.ref, args))
        return functional.scaled_dot_product_attention(*args, **kwargs)

    layer = Runs(lambda self, x: functional.scaled_dot_product_attention(x, x, x))
    compress_saved_(nn.ModuleList([layer, nn.Linear(8, 8)]))
    with torch.autocast("cpu", torch.bfloat16):
        with sdpa_kernel(SDPBackend.MATH):
            y: Any = layer(2 * torch.randn(2, 4, 32, 16, requires_grad=True))
        object.__setattr__(y.grad_fn.repeat, "func", run_again)
        y.float().sum().backward()
        assert [reference() for reference in inputs] == [None] * 3
    assert backends == [[SDPBackend.MATH]]
