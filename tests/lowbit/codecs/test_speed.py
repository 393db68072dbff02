"""How fast a codec is said to be."""

import itertools

import pytest
import torch

from lowbit.codecs import Cast, speed


def test_a_tiny_tensor_is_measured_in_few_rounds(monkeypatch: pytest.MonkeyPatch):
    """Each round empties the cache, which takes thousands of times as long as coding does here."""
    ticks = itertools.count()
    monkeypatch.setattr(speed, "_now", lambda device: next(ticks) * 1e-6)
    monkeypatch.setattr(speed, "_CACHE", 1)
    assert speed.coding_speed(Cast(dtype=torch.bfloat16), (2, 8), seconds=0.5) == pytest.approx((64e6, 64e6))
    assert next(ticks) == 4 * 101
    assert speed.coding_speed(Cast(dtype=torch.bfloat16), (2, 8), seconds=1e-7) == pytest.approx((64e6, 64e6))
    assert next(ticks) == 4 * 101 + 1 + 4 * 6
