"""Memory for payloads."""

from __future__ import annotations

import torch

from lowbit.collectives.exchange import Scratch

CPU = torch.device("cpu")
MB = 1 << 20


def take_all(scratch: Scratch, sizes: list[int]) -> None:
    """One call's payloads: each has its own memory."""
    taken = [scratch.take(size, CPU) for size in sizes]
    for i, payload in enumerate(taken):
        assert payload.numel() == sizes[i]
        assert payload.data_ptr() % 64 == 0
        payload.fill_(i)
    for i, payload in enumerate(taken):
        assert bool((payload == i).all())
    scratch.reset()


def test_as_much_is_held_as_the_largest_call_needed() -> None:
    scratch = Scratch()
    for sizes in ([3 * MB, 5], [2 * MB, 2 * MB, 2 * MB], [5 * MB, 1], [100] * 50, [0], [6 * MB]):
        take_all(scratch, sizes)
    take_all(scratch, [2 * MB, 2 * MB, 2 * MB])
    assert 6 * MB <= scratch.nbytes() <= 6 * MB + 64
    held = scratch.take(MB, CPU).data_ptr()
    scratch.reset()
    assert scratch.take(2 * MB, CPU).data_ptr() == held, "no fresh pages"
