"""Weights of channels: they follow gradients, travel with messages, and bring the error where it is not felt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import TransformQuant
from lowbit.codecs.sessions import Session
from lowbit.codecs.transform_quant.weights import ALL_ONE, FELT, ONE, levels_of, packed, weights
from tests.codecs.transform_quant.test_transform_quant import ends, tokens

SHAPE = (64, 33)


def gradient(scale: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * scale


def uneven() -> Tensor:
    """A third of the channels has gradients 4 times as large, another one 4 times as small."""
    return 1e-6 * 4.0 ** (torch.arange(SHAPE[1]) % 3 - 1)


def observed(session: Session, scale: Tensor) -> None:
    session.observe(gradient(scale))
    session.end_step()


def error(sender: Session, receiver: Session, x: Tensor) -> Tensor:
    """Mean square by channel."""
    return (receiver.decode(sender.encode(x)) - x).square().mean(0)


def test_errors_fall_where_gradients_are_small_at_the_same_bytes():
    pairs = [ends(TransformQuant(bits=3.5), SHAPE) for _ in range(2)]
    observed(pairs[0][0], uneven())
    for seed in range(4):
        weighted, plain = (error(*pair, tokens(SHAPE, seed=seed)) for pair in pairs)
    least, middle, most = (weighted[i::3].mean() for i in range(3))
    assert least > 4 * middle > 16 * most
    felt = uneven().square()
    assert (felt @ weighted) < 0.7 * (felt @ plain)
    assert pairs[0][0].nbytes() == pairs[1][0].nbytes()


def test_both_ends_stay_the_same_and_the_receiver_needs_no_gradients():
    sender, receiver = ends(TransformQuant(), SHAPE)
    for seed in range(3):
        error(sender, receiver, tokens(SHAPE, seed=seed))
        observed(sender, uneven() * 10.0**seed)
    state = sender.state_dict()
    assert FELT in state
    assert FELT not in receiver.state_dict()
    assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(v)) for k, v in receiver.state_dict().items())


def test_weights_of_one_change_nothing():
    """Gradients that are alike in all channels, that are zeros, or that have NaN or Inf."""
    x = tokens(SHAPE, seed=0)
    expected = ends(TransformQuant(), SHAPE)[0].encode(x)
    for scale in (torch.zeros(()), torch.tensor(torch.nan), torch.tensor(torch.inf)):
        session = ends(TransformQuant(), SHAPE)[0]
        observed(session, scale)
        assert torch.equal(session.encode(x), expected)
        assert FELT not in session.state_dict()
    session = ends(TransformQuant(), SHAPE)[0]
    session.observe(torch.full(SHAPE, 1e-30))
    session.end_step()
    assert torch.equal(session.encode(x), expected)


def test_gradients_are_sent_without_weights():
    codec = TransformQuant(step="message")
    sender, other = (ends(codec, SHAPE)[0] for _ in range(2))
    observed(sender, uneven())
    x = tokens(SHAPE, seed=0)
    assert torch.equal(sender.encode(x), other.encode(x))


def test_steps_count_and_micro_batches_do_not():
    """Weights change between steps alone, and depend neither on the order nor on the scale of gradients."""
    parts = [gradient(uneven(), seed) for seed in range(3)]
    sessions = [ends(TransformQuant(), SHAPE)[0] for _ in range(3)]
    for session, order, scale in zip(sessions, ([0, 1, 2], [2, 0, 1], [0, 1, 2]), (1, 1, 2**20), strict=True):
        session.encode(tokens(SHAPE, seed=0))
        for i in order:
            session.observe(parts[i] * scale)
            assert (session._memory.levels == ONE).all()
        session.end_step()
    payloads = [session.encode(tokens(SHAPE, seed=1)) for session in sessions]
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)
    assert (sessions[0]._memory.levels != ONE).any()


def test_a_restored_sender_goes_on_bit_for_bit():
    codec = TransformQuant()
    sender, _ = ends(codec, SHAPE)
    sender.encode(tokens(SHAPE, seed=0))
    observed(sender, uneven())
    sender.observe(gradient(uneven().flip(0), 1))  # in the step that the checkpoint ends
    restored = ends(codec, SHAPE)[0]
    restored.load_state_dict(sender.state_dict())
    for session in (sender, restored):
        session.end_step()
    assert torch.equal(sender.encode(tokens(SHAPE, seed=1)), restored.encode(tokens(SHAPE, seed=1)))


@pytest.mark.parametrize(
    "felt",
    [torch.ones(5, dtype=torch.float64), torch.ones(33), -torch.ones(33, dtype=torch.float64), "ones",
     torch.full((33,), torch.nan, dtype=torch.float64)],
)  # fmt: skip
def test_a_state_that_cannot_be_one_is_refused(felt: object):
    session = ends(TransformQuant(), SHAPE)[0]
    session.encode(tokens(SHAPE, seed=0))
    with pytest.raises(ValueError, match="state has felt"):
        session.load_state_dict({**session.state_dict(), FELT: felt})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backends_write_the_same_weights_and_read_the_same_tokens(dtype: torch.dtype):
    read = []
    for backend in ("reference", "cpu"):
        with kernels.backend("reference"):
            sender, receiver = (TransformQuant(bits=4).open(shape=SHAPE, dtype=dtype) for _ in range(2))
            observed(sender, uneven())
            payload = sender.encode(tokens(SHAPE, seed=0).to(dtype))
        with kernels.backend(backend):
            read.append(receiver.decode(payload))
            other = TransformQuant(bits=4).open(shape=SHAPE, dtype=dtype)
            observed(other, uneven())
            own = other.encode(tokens(SHAPE, seed=0).to(dtype))
        section = sender._geometry.layout.section
        assert torch.equal(section(own, "weights"), section(payload, "weights"))
    torch.testing.assert_close(read[0], read[1], rtol=1e-2, atol=1e-3)


def test_levels_travel_as_they_are():
    levels = torch.arange(33).to(torch.uint8) % 16
    travelling = packed(levels)
    assert len(travelling) == 17
    assert (
        weights(travelling, 33, inverse=False).log2().mul(2).add(ONE).round().to(torch.uint8).tolist()
        == levels.tolist()
    )
    product = weights(travelling, 33, inverse=False) * weights(travelling, 33, inverse=True)
    torch.testing.assert_close(product, torch.ones(33))
    assert set(packed(levels_of(torch.zeros(8, dtype=torch.float64))).tolist()) == {ALL_ONE}
    assert levels_of(torch.tensor([0.0, 1, 1, 1, 1e30], dtype=torch.float64)).tolist() == [0, ONE, ONE, ONE, 15]
