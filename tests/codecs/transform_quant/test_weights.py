"""Weights: they follow what crosses the other way, travel with messages, and bring the error where it costs little."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import TransformQuant
from lowbit.codecs.base import Session
from lowbit.codecs.transform_quant.memory import FELT, ONE, SEEN, factors, levels_of, packed, sampled, sinks
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


def with_sink(factor: float = 100.0, row: int = 5) -> Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    x[row] *= factor
    return x


def test_gradients_of_channels_with_large_activations_are_more_exact_at_the_same_bytes():
    pairs = [ends(TransformQuant(bits=3.5, step="message"), SHAPE) for _ in range(2)]
    pairs[0][0].observe(gradient(uneven() * 1e6))
    pairs[0][0].end_step()
    for seed in range(4):
        weighted, plain = (error(*pair, tokens(SHAPE, seed=seed)) for pair in pairs)
    least, middle, most = (weighted[i::3].mean() for i in range(3))
    assert least > 2 * middle > 4 * most, "fourth roots of mean squares: errors of 4 times the energy"
    assert (uneven().square() @ weighted) < 0.9 * (uneven().square() @ plain)
    assert pairs[0][0].nbytes() == pairs[1][0].nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sinks_gradient_is_more_exact_by_its_norm_and_the_others_lose_little(dtype: torch.dtype):
    pairs = [ends(TransformQuant(bits=4, step="message"), SHAPE, dtype) for _ in range(2)]
    note = pairs[0][0].observe(with_sink().to(dtype))
    assert note is not None
    assert note.nonzero().tolist() == [[5]]
    finer, plain = torch.zeros(2, SHAPE[0], dtype=torch.float64)
    for (sender, receiver), given, sums in zip(pairs, (note, None), (finer, plain), strict=True):
        for seed in range(4):
            x = tokens(SHAPE, seed=seed).to(dtype)
            sums += (receiver.decode(sender.encode(x, note=given)) - x).double().square().mean(1)
    rounding = 2 ** (-18 if dtype == torch.bfloat16 else -40)
    assert finer[5] < plain[5] / 2**9 + rounding
    others = torch.arange(SHAPE[0]) != 5
    assert finer[others].mean() < 2 * plain[others].mean()


@pytest.mark.parametrize(("sequences", "length"), [(128, 64), (64, 64), (8, 1024), (1, 2048), (127, 96)])
def test_no_place_of_the_sequences_is_looked_at_more_than_others(sequences: int, length: int):
    """A regular stride would see the sinks of all sequences, and nothing else."""
    places = sampled(sequences * length, SEEN, torch.device("cpu")) % length
    assert len(places.unique()) > min(length, len(places)) / 2
    assert (places == 0).sum() <= 2 + 3 * len(places) / length
    assert sampled(SEEN, SEEN, torch.device("cpu")).tolist() == list(range(SEEN))
    assert sampled(1, SEEN, torch.device("cpu")).tolist() == [0]


def test_a_note_is_of_one_message():
    sender, other = (ends(TransformQuant(step="message"), SHAPE)[0] for _ in range(2))
    note, x = sender.observe(with_sink()), tokens(SHAPE, seed=0)
    first = sender.encode(x, note=note)
    assert not torch.equal(first, other.encode(x))
    assert not sender._geometry.layout.section(sender.encode(x), "gains").any()


def test_which_tokens_are_sinks():
    assert not sinks(with_sink(3.0))[0].any()
    assert not sinks(torch.zeros(SHAPE))[0].any()
    assert not sinks(torch.ones(1, 5))[0].any()
    assert not sinks(with_sink(math.nan))[0].any()
    levels, relative = sinks(with_sink(1e4))
    assert levels[5] == 15
    assert levels.sum() == 15
    torch.testing.assert_close(relative.norm(dim=1), torch.ones(SHAPE[0]))
    several = with_sink(1.0)
    several[:33] *= 2.0**10
    assert not sinks(several)[0].any(), "most of a message are no exceptions"
    many = sinks(torch.ones(1200, 3))
    assert len(many[0]) == 1200
    assert SEEN / 2 < len(many[1]) <= SEEN
    for strange in (math.nan, math.inf):
        x = with_sink()
        x[7, 2] = strange
        levels, relative = sinks(x)
        assert levels.nonzero().tolist() == [[5]]
        assert relative.isfinite().all()


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
    travelling = packed(levels, ONE)
    assert len(travelling) == 17
    there, back = (factors(travelling, 33, ONE, inverse=inverse) for inverse in (False, True))
    assert there is not None
    assert back is not None
    assert there.log2().mul(2).add(ONE).round().to(torch.uint8).tolist() == levels.tolist()
    torch.testing.assert_close(there * back, torch.ones(33))
    zeros = packed(levels_of(torch.zeros(8, dtype=torch.float64), 2), ONE)
    assert factors(zeros, 8, ONE, inverse=True) is None
    assert levels_of(torch.tensor([0.0, 1, 1, 1, 1e30], dtype=torch.float64), 2).tolist() == [0, ONE, ONE, ONE, 15]


def spread(octaves: float, seed: int = 0) -> Tensor:
    """Tokens; the logarithms of channels' root mean squares have this standard deviation."""
    return gradient((octaves * math.sqrt(1.5) * (torch.arange(SHAPE[1]) % 3 - 1)).exp2(), seed)


def test_without_gradients_channels_that_differ_very_much_get_larger_errors_where_they_are_large():
    sender, receiver = ends(TransformQuant(bits=7), SHAPE)
    for seed in range(4):
        found = error(sender, receiver, spread(2.5, seed))
    small, middle, large = (found[i::3].mean().sqrt().log2() for i in range(3))
    assert middle - small == pytest.approx(2.5 * math.sqrt(1.5) * 0.75, abs=0.3)
    assert large - middle == pytest.approx(2.5 * math.sqrt(1.5) * 0.75, abs=0.3)
    assert FELT not in sender.state_dict()


@pytest.mark.parametrize(
    "x",
    [spread(0.9), spread(2.5)[:7], torch.cat([spread(2.5)[:7], torch.zeros(40, SHAPE[1])]), spread(2.5) * torch.nan],
    ids=["like SmolLM2", "few tokens", "padded", "NaN"],
)
def test_otherwise_channels_are_alike(x: Tensor) -> None:
    sender, _ = ends(TransformQuant(), tuple(x.shape))
    payload = sender.encode(x)
    assert (sender._geometry.layout.section(payload, "weights") == ONE * 17).all()


def test_channels_of_zeros_count_as_if_in_the_middle() -> None:
    for octaves, level in ((0.9, ONE), (2.3, ONE + 4)):  # 2.3 * 1.22 * 3 / 4 octaves, in halves
        x = spread(octaves)
        x[:, 1] = 0
        sender, _ = ends(TransformQuant(), SHAPE)
        packed = sender._geometry.layout.section(sender.encode(x), "weights")
        assert torch.stack([packed & 15, packed >> 4], 1).flatten()[:33:3].tolist() == [level] * 11


def test_gradients_replace_own_weights() -> None:
    sender, _ = ends(TransformQuant(), SHAPE)
    observed(sender, uneven())
    payload = sender.encode(spread(2.5))
    weights = sender._geometry.layout.section(payload, "weights")
    assert torch.equal(weights, sender._memory.packed)
    backward, _ = ends(TransformQuant(step="message"), SHAPE)
    assert (backward._geometry.layout.section(backward.encode(spread(2.5)), "weights") == ONE * 17).all()
