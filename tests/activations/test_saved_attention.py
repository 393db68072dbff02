"""Attention runs again in backward as it ran in forward."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from lowbit.activations import compress_saved_


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


def test_kernels_that_are_chosen_in_forward_serve_backward():
    seen: list[Any] = []

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(_cur_sdpa_kernel_backends())
        return functional.scaled_dot_product_attention(*args, **kwargs)

    ours = Attention()
    compress_saved_(nn.ModuleList([ours, nn.Linear(8, 8)]))
    with sdpa_kernel(SDPBackend.MATH):
        y: Any = ours(torch.randn(2, 4, 32, 16, requires_grad=True))
    object.__setattr__(y.grad_fn.repeat, "func", noting)
    y.sum().backward()
    assert seen == [[SDPBackend.MATH]]


def test_no_casts_stay_in_the_cache_of_an_outer_autocast():
    inputs: list[Any] = []

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        inputs.extend(map(weakref.ref, args))
        return functional.scaled_dot_product_attention(*args, **kwargs)

    ours = Attention()
    compress_saved_(nn.ModuleList([ours, nn.Linear(8, 8)]))
    with torch.autocast("cpu", torch.bfloat16):
        y: Any = ours(2 * torch.randn(2, 4, 32, 16, requires_grad=True))
        object.__setattr__(y.grad_fn.repeat, "func", noting)
        y.float().sum().backward()
        assert [reference() for reference in inputs] == [None] * 3
