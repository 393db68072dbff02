from __future__ import annotations

import torch

from lowbit.codecs import Cast


def test_float32_is_exact_and_bits_are_counted() -> None:
    x = torch.randn(3, 5)
    assert torch.equal(Cast(dtype=torch.float32).round_trip(x), x)
    assert Cast(dtype=torch.float32).bits_per_element(x.shape) == 32
    assert Cast(dtype=torch.bfloat16).bits_per_element(x.shape) == 16
    assert torch.equal(Cast(dtype=torch.bfloat16).round_trip(x), x.bfloat16().float())


def test_float16_saturates_but_keeps_inf() -> None:
    x = torch.tensor([1e6, -1e6, float("inf"), float("-inf")])
    y = Cast(dtype=torch.float16).round_trip(x)
    assert y.tolist() == [65504.0, -65504.0, float("inf"), float("-inf")]
    y = Cast(dtype=torch.float32).decode(Cast().encode(x), shape=x.shape, dtype=torch.float16)
    assert y.tolist() == [65504.0, -65504.0, float("inf"), float("-inf")]


def test_bfloat16_saturates() -> None:
    x = torch.tensor([3.4028e38, float("inf")])
    assert Cast(dtype=torch.bfloat16).round_trip(x).tolist() == [torch.finfo(torch.bfloat16).max, float("inf")]
