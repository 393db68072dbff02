"""Tokens, and the two ends of a boundary that learn directions from them."""

import torch
from torch import Tensor

from lowbit.codecs import Codec, Session, TransformQuant

SHAPE = (2, 40, 48)


def ends(
    codec: Codec = TransformQuant(), shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32, after: int = 0
) -> tuple[Session, Session]:
    """A sender and a receiver, after so many messages of `tokens`."""
    sender, receiver = (codec.open(shape=shape, dtype=dtype) for _ in range(2))
    for seed in range(after):
        crossed(sender, receiver, tokens(shape, seed=seed))
    return sender, receiver


def tokens(shape: tuple[int, ...] = SHAPE, *, seed: int, directions: int = 4) -> Tensor:
    """Near a subspace that is the same for every seed, with a tenth of noise and far from the origin."""
    fixed, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
    span = torch.randn(directions, shape[-1], generator=fixed)
    mean = torch.randn(shape[-1], generator=fixed)
    c = torch.randn(*shape[:-1], directions, generator=own)
    return c @ span + mean + 0.1 * torch.randn(shape, generator=own)


def decibels(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()  # squares of the largest numbers are beyond float32
    return float(20 * torch.log10(x.norm() / (x - y).norm()))


def crossed(sender: Session, receiver: Session, x: Tensor, **settings: bool) -> Tensor:
    payload = sender.encode(x, **settings)
    assert payload.shape == (sender.nbytes(),) == (receiver.nbytes(),) == (sender.max_nbytes(),)
    return receiver.decode(payload, **settings)


def same(a: object, b: object) -> None:
    """Assert that tensors, or lists and states of them, are exactly equal; NaN is equal to NaN."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
