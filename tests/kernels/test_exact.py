from __future__ import annotations

import torch

from lowbit.kernels.exact import log2, smallest, uniform


def test_log2_is_within_its_bound() -> None:
    x = torch.logspace(-30, 30, 5001, base=2.0).float()
    assert (log2(x) - x.double().log2()).abs().max() < 4e-6
    assert log2(torch.tensor(8.0)) == 3


def test_smallest_takes_the_first_of_equals() -> None:
    key = torch.tensor([[2.0, 1.0, 1.0, float("inf"), 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert smallest(key, torch.tensor([2, 2])).tolist() == [
        [False, True, True, False, False],
        [True, True, False, False, False],
    ]
    assert not smallest(key, torch.tensor([0, 0])).any()
    assert smallest(key, torch.tensor([5, 5])).all()


def test_uniform_numbers_are_uniform_and_differ_by_seed() -> None:
    u = uniform(100_000, 1, torch.device("cpu"))
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    # Six deviations of the mean and of the lag-one correlation of that many uniform numbers.
    assert abs(u.mean() - 0.5) < 6 * (1 / 12 / 100_000) ** 0.5
    assert abs(((u[1:] - 0.5) * (u[:-1] - 0.5)).mean()) < 6 / 12 / 100_000**0.5
    assert not torch.equal(u, uniform(100_000, 2, torch.device("cpu")))
