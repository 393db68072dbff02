"""Where the error goes: weights follow what crosses the other way, and sinks are coded as finely as other tokens."""

import importlib.util
import math

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import Session, TransformQuant
from lowbit.codecs.transform_quant import cpu_fit, reference
from lowbit.codecs.transform_quant.memory import FELT, ONE, SEEN, factors, levels_of, packed, sampled, sinks
from lowbit.codecs.transform_quant.reference import FURTHEST_BELOW, MOST_LOWERED, lowered, transform_geometry
from tests.lowbit.codecs.transform_quant.messages import ends, same, tokens

SHAPE = (64, 33)


def gradient(scale: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * scale


def uneven() -> Tensor:
    """A third of the channels has gradients 4 times as large, another one 4 times as small."""
    return 1e-6 * 4.0 ** (torch.arange(SHAPE[1]) % 3 - 1)


def observed(session: Session, x: Tensor) -> Session:
    session.observe(x)
    session.end_step()
    return session


def weights_of(sender: Session, x: Tensor) -> Tensor:
    return sender._geometry.layout.section(sender.encode(x), "weights")


def error(sender: Session, receiver: Session, x: Tensor) -> Tensor:
    """Mean square by channel."""
    return (receiver.decode(sender.encode(x)) - x).square().mean(0)


@pytest.mark.parametrize("step", ["token", "message"])
def test_errors_fall_where_the_other_direction_is_small_at_the_same_bytes_and_state(step: str):
    """By roots of gradients' mean squares, and by fourth roots of activations': errors of 4 times the energy."""
    pairs = [ends(TransformQuant(bits=3.5, step=step), SHAPE) for _ in range(2)]
    for seed in range(4):
        observed(pairs[0][0], gradient(uneven() * (1 if step == "token" else 1e6)))
        weighted, plain = (error(*pair, tokens(SHAPE, seed=seed)) for pair in pairs)
    least, middle, most = (weighted[i::3].mean() for i in range(3))
    ratio, share = (4, 0.7) if step == "token" else (2, 0.9)
    assert least > ratio * middle > ratio**2 * most
    assert (uneven().square() @ weighted) < share * (uneven().square() @ plain)
    assert pairs[0][0].nbytes() == pairs[1][0].nbytes()
    state = pairs[0][0].state_dict()
    assert state.pop(FELT).any()
    same(pairs[0][1].state_dict(), state)  # a receiver needs no gradients


def test_weights_of_one_change_nothing():
    """Gradients that are alike in all channels, that are zeros, or that have NaN or Inf."""
    x = tokens(SHAPE, seed=0)
    expected = ends(shape=SHAPE)[0].encode(x)
    nothing = [torch.zeros(SHAPE), gradient(torch.tensor(torch.nan)), gradient(torch.tensor(torch.inf))]
    for given in (*nothing, torch.full(SHAPE, 1e-30)):
        session = observed(ends(shape=SHAPE)[0], given)
        assert torch.equal(session.encode(x), expected)
        assert (FELT in session.state_dict()) == (given[0, 0] == torch.tensor(1e-30))


def with_sink(factor: float = 100.0, row: int = 5) -> Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    x[row] *= factor
    return x


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
    sender = pairs[0][0]
    assert not sender._geometry.layout.section(sender.encode(x), "gains").any(), "a note is of one message"


@pytest.mark.parametrize(("sequences", "length"), [(128, 64), (64, 64), (8, 1024), (1, 2048), (127, 96)])
def test_no_place_of_the_sequences_is_looked_at_more_than_others(sequences: int, length: int):
    """A regular stride would see the sinks of all sequences, and nothing else."""
    places = sampled(sequences * length, SEEN, torch.device("cpu")) % length
    assert len(places.unique()) > min(length, len(places)) / 2
    assert (places == 0).sum() <= 2 + 3 * len(places) / length
    assert sampled(SEEN, SEEN, torch.device("cpu")).tolist() == list(range(SEEN))
    assert sampled(1, SEEN, torch.device("cpu")).tolist() == [0]


def test_which_tokens_are_sinks():
    most = with_sink(1.0)
    most[:33] *= 2.0**10
    nan, inf = with_sink(), with_sink()
    nan[7, 2], inf[7, 2] = math.nan, math.inf
    wrong = []
    for x, expected in (
        (with_sink(3.0), {}), (torch.zeros(SHAPE), {}), (torch.ones(1, 5), {}), (with_sink(math.nan), {}), (most, {}),
        (with_sink(1e4), {5: 15}), (with_sink(), {5: 13}), (nan, {5: 13}), (inf, {5: 13}),
    ):  # fmt: skip
        levels, relative = sinks(x)
        found = {int(i): int(levels[i]) for i in levels.nonzero()}
        if found != expected or not relative.isfinite().all():
            wrong.append((found, expected, relative))
    assert not wrong
    torch.testing.assert_close(sinks(with_sink(1e4))[1].norm(dim=1), torch.ones(SHAPE[0]))
    levels, relative = sinks(torch.ones(1200, 3))
    assert len(levels) == 1200
    assert SEEN / 2 < len(relative) <= SEEN


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backends_write_the_same_weights_and_read_the_same_tokens(dtype: torch.dtype):
    payloads, weights, read = [], [], []
    for backend in ("reference", "cpu"):
        with kernels.backend(backend):
            sender, receiver = ends(TransformQuant(bits=4), SHAPE, dtype)
            observed(sender, gradient(uneven()))
            payloads.append(sender.encode(tokens(SHAPE, seed=0).to(dtype)))
            weights.append(sender._geometry.layout.section(payloads[-1], "weights"))
            read.append(receiver.decode(payloads[0]))
    assert torch.equal(*weights)
    torch.testing.assert_close(*read, rtol=1e-2, atol=1e-3)


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
    observed(sender, gradient(uneven()))
    assert torch.equal(weights_of(sender, spread(2.5)), sender._memory.packed), "gradients replace own weights"


@pytest.mark.parametrize(
    ("x", "step"),
    [(spread(0.9), "token"), (spread(2.5)[:7], "token"), (torch.cat([spread(2.5)[:7], torch.zeros(40, 33)]), "token"),
     (spread(2.5) * torch.nan, "token"), (spread(2.5), "message")],
    ids=["like SmolLM2", "few tokens", "padded", "NaN", "gradients"],
)  # fmt: skip
def test_otherwise_channels_are_alike(x: Tensor, step: str) -> None:
    assert (weights_of(ends(TransformQuant(step=step), tuple(x.shape))[0], x) == ONE * 17).all()


def test_channels_of_zeros_count_as_if_in_the_middle() -> None:
    x = spread(2.3)
    x[:, 1] = 0
    packed = weights_of(ends(shape=SHAPE)[0], x)
    levels = torch.stack([packed & 15, packed >> 4], 1).flatten()[:33:3]
    assert levels.tolist() == [ONE + 4] * 11  # 2.3 * 1.22 * 3 / 4 octaves, in halves


ROWS, CHANNELS = 48, 40


def on_cpu(z: Tensor, geo: reference.TransformGeometry) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Levels, tokens and norms that the CPU's kernels write to a payload, the largest scale, and the largest norm."""
    payload = torch.zeros(geo.layout.nbytes, dtype=torch.uint8)
    fit = cpu_fit.fitted(z, payload, geo)
    levels, tokens, norms = (geo.layout.section(payload, name) for name in ("levels", "tokens", "norms"))
    return levels, tokens, norms, fit.highest, fit.largest


def signs(times: dict[int, float], seed: int = 0) -> Tensor:
    """Tokens of norms that are no matter of rounding; some of them this many times as large."""
    x = torch.randn(ROWS, CHANNELS, generator=torch.Generator().manual_seed(seed)).sign()
    for row, factor in times.items():
        x[row] *= factor
    return x


MESSAGES: dict[str, tuple[Tensor, dict[int, int]]] = {
    "none": (signs({}), {}),
    "one": (signs({0: 128}), {0: 28}),
    "several": (signs({0: 64, 17: 32, 40: 64}), {0: 16, 17: 16, 40: 16}),  # of 68, which is more than 48
    "4 times": (signs({0: 4, 1: 4.8}), {1: 9}),
    "further than steps reach": (signs({5: 2.0**60}), {5: MOST_LOWERED}),
    "NaN in a sink": (signs({0: math.nan, 1: 64}), {1: 24}),
    "Inf in a sink": (signs({0: math.inf, 1: 64}), {1: 24}),
    "zeros in most of the message": (signs(dict.fromkeys(range(8, ROWS), 0) | {0: 2}), {}),
    "zeros, and a sink": (signs(dict.fromkeys(range(24, ROWS), 0) | {0: 64}), {0: 24}),
    "zeros alone": (torch.zeros(ROWS, CHANNELS), {}),
    "the smaller half is the median's": (signs(dict.fromkeys(range(24), 16.0)), dict.fromkeys(range(24), 2)),
    "most are large": (signs(dict.fromkeys(range(25), 16.0)), {}),
    **{f"{rows} alike": (1000 * signs({})[:1].repeat(rows, 1), {}) for rows in (1, 2, 9)},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_backend_lowers_the_norms_that_are_meant(name: str) -> None:
    x, expected = MESSAGES[name]
    geo = transform_geometry(*x.shape, True, None, 3.0)
    fits = [reference.fitted(x, geo), on_cpu(x, geo)]
    if importlib.util.find_spec("triton"):
        gpu = importlib.import_module("lowbit.codecs.transform_quant.gpu")
        there, plan = gpu.planned(x, geo)
        numbers = [int(plan[i.value]) for i in (gpu.LEVEL, gpu.NORM)]
        fits.append((there.levels, there.tokens, there.norms, *numbers))
    own = (4 * x.double().square().mean(1).sqrt().log2()).round()
    for levels, tokens_, norms, highest, largest in fits:
        coded = tokens_ < reference.NAN
        assert torch.equal(coded, x.isfinite().all(1) & x.any(1))
        assert (norms[~coded] == FURTHEST_BELOW).all()
        low = own - (largest - norms.double())
        assert {r: int(low[r]) for r in range(len(x)) if coded[r] and low[r]} == expected
        # What steps are relative to is less, and scales, which are in its units, are more: their product is as before.
        scale = highest - levels.min().double() - tokens_.double() - 4
        near = (scale + largest - norms.double() - own)[coded]
        assert (near.abs() <= 4).all(), near


@pytest.mark.parametrize("seed", range(20))
def test_norms_are_lowered_to_the_last_quarter_alike(seed: int) -> None:
    """The reference's plain search against the CPU's sums, at any mixture of norms."""
    g = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, ROWS + 1, (1,), generator=g))
    exponent = (torch.randn(ROWS, generator=g) * seed).round()
    x = signs({}, seed) * torch.exp2(exponent)[:, None]
    x[count:] = 0
    norm = 4 * exponent.int() - 4 * int(exponent[:count].amax())
    usable = torch.arange(ROWS) < count
    less = lowered(norm, usable)
    assert torch.equal(less[~usable], norm[~usable])
    median, taken = norm[usable].sort().values[(count - 1) // 2], norm - less
    assert ((taken == 0) | (norm - median > reference.OUTLYING)).all()
    assert int(taken.sum()) <= count
    assert int(taken.max()) <= MOST_LOWERED
    below = on_cpu(x, transform_geometry(ROWS, CHANNELS, True, None, 3.0))[2][:count]
    expected = (int(less[usable].max()) - less[usable]).clamp(max=FURTHEST_BELOW)
    assert torch.equal(below.int(), expected.int())


@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float32), ("cpu", torch.float32), ("cpu", torch.bfloat16)]
)
def test_a_sink_is_as_exact_as_the_others_and_they_lose_little(backend: str, dtype: torch.dtype) -> None:
    shape, found = (4, 64, 64), []
    with kernels.backend(backend):
        for sink in (0, 1000):
            sender, receiver = ends(TransformQuant(bits=6), shape, dtype)
            for seed in range(3):
                x = tokens(shape, seed=seed)
                x[:, 0, 7] += sink
                x = x.to(dtype)
                y = receiver.decode(sender.encode(x))
            found.append((x.double() - y.double()).square().mean(-1).sqrt())
    plain, sunk = found
    # bfloat16 alone rounds numbers of this size by more than the step.
    assert sunk[:, 0].mean() < (2 if dtype == torch.float32 else 40) * plain.mean()
    assert sunk[:, 1:].mean() < 1.25 * plain[:, 1:].mean()
