"""Tokens in a basis that both ends hold, one step with dither, entropy-coded to a rate."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import Session, TransformQuant
from lowbit.codecs.transform_quant import reference
from lowbit.codecs.transform_quant.basis import Transform, coefficients
from lowbit.codecs.transform_quant.reference import LARGEST, decode, dither, steps, suited
from tests.lowbit.codecs.transform_quant.messages import crossed, decibels, ends, same, tokens

STEPS = ("token", "message")
BACKENDS = ("reference", "cpu")
FORMS = [
    (40, 64), (37, 77), (3, 300), (1, 600), (300, 1), (64,), (2, 5, 7), (1, 1), (9, 31), (5, 33), (2, 3, 4, 8),
    (200, 12), (7, 600),
]  # fmt: skip
"""One token, one channel, one element, C that is no multiple of 32, more directions than tokens, several streams."""


def coded(sender: Session, payload: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients in a payload, which all backends decode alike, and each token's step."""
    geo, found = sender._geometry, []
    header = geo.layout.section(payload, "header", torch.int32)
    for name in BACKENDS:
        with kernels.backend(name):
            z = torch.empty(geo.rows, geo.channels)
            assert kernels.implementation(decode, z.device)(payload, header, z, geo)
            found.append(z)
    same(*found)
    section = geo.layout.section
    _, norm, step, _ = section(payload, "scalars", torch.int32).tolist()
    token = section(payload, "tokens").int()
    norms = section(payload, "norms").int() if geo.by_token else torch.zeros_like(token)
    return found[0], steps(token, norms, norm, step, geo)


@pytest.mark.parametrize(("source", "step"), product(BACKENDS, STEPS))
@pytest.mark.parametrize("shape", FORMS, ids=str)
def test_backends_decode_each_others_messages_alike(
    shape: tuple[int, ...], source: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "STREAM", 1 << 9)
    codec = TransformQuant(step=step)
    sender, *receivers = (codec.open(shape=shape, dtype=torch.float32) for _ in range(3))
    if codec.sized(shape)[1]:
        return  # goes as it is
    several = sender._geometry.streams > 3
    assert several == (shape in ((40, 64), (37, 77), (200, 12), (7, 600)))
    for seed in range(2):
        x = tokens(shape, seed=seed)
        with kernels.backend(source):
            payload = sender.encode(x)
        assert len(payload) == codec.nbytes(shape) == sender.nbytes()
        z, step_R = coded(sender, payload)
        found = []
        for name, receiver in zip(BACKENDS, receivers, strict=True):
            with kernels.backend(name):
                found.append(receiver.decode(payload))
            same(receiver.state_dict(), sender.state_dict())
        assert torch.allclose(*found, rtol=0, atol=1e-5 * float(x.abs().max()))
        assert step == "message" or not several or decibels(x, found[0]) > 8
        own = coefficients(x.view(z.shape), sender._memory.directions)
        error = (z - own).abs() / step_R[:, None]
        most = 0.501 if step == "message" else 1.001  # middles are drawn towards 0 by half a step at most
        assert error.max() <= most + 1e-5 * float((own.abs().amax(1) / step_R).max())


@pytest.mark.parametrize("bits", [2.5, 3, 4.25, 8, 16])
@pytest.mark.parametrize("step", STEPS)
def test_every_byte_of_a_rate_is_used_and_no_more(bits: float, step: str) -> None:
    shape = (128, 96)
    codec, numel = TransformQuant(bits=bits, step=step), math.prod(shape)
    assert int(numel * bits / 8) - 2 < codec.nbytes(shape) <= int(numel * bits / 8)
    sender, receiver = ends(codec, shape)
    for seed in range(3):
        receiver.decode(payload := sender.encode(tokens(shape, seed=seed)))
    geo = sender._geometry
    table = geo.layout.section(payload, "streams").view(torch.int16)[:6].view(torch.int32)
    used = 12 + 128 + int(table[0]) * 2 + int(table[1]) * 2 + int(table[2])
    assert 0 <= geo.layout.sizes["streams"] - used < 0.05 * len(payload) + 64


CONTENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda x: x,
    "zeros": torch.zeros_like,
    "constant": lambda x: torch.full_like(x, -3.5),
    "heavy tails": lambda x: x**7,
    "one outlier": lambda x: x.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1e30)),
    "massive channel": lambda x: torch.cat([x[:, :1] * 1e20, x[:, 1:]], 1),
    "massive token": lambda x: torch.cat([x[:1] * 1e25, x[1:]]),
    "channels of all sizes": lambda x: x * torch.logspace(-20, 0, x.shape[1]),
    "tokens of all sizes": lambda x: x * torch.logspace(-37, 30, len(x))[:, None],
    "denormal": lambda x: x * 1e-40,
    "next to denormal": lambda x: x * 1e-37,
    "large": lambda x: x * 1e32,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.filterwarnings("error")
def test_whatever_a_message_holds_it_fits_and_is_finite(name: str, backend: str, step: str) -> None:
    x = CONTENTS[name](torch.randn(40, 48, generator=torch.Generator().manual_seed(0)))
    with kernels.backend(backend):
        sender, receiver = ends(TransformQuant(step=step), x.shape)
        for _ in range(2):
            y = crossed(sender, receiver, x)
            assert y.isfinite().all()
            if name == "zeros":
                assert torch.equal(x, y)
            elif name == "denormal":
                assert not y.any(), "steps are normal numbers"
            else:
                # Gaussian numbers have 6 dB a bit, less the space between cells and spheres, and what tables cost.
                assert decibels(x, y) > 7
        same(sender.state_dict(), receiver.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = tokens(seed=0).to(dtype)
    for backend in BACKENDS:
        with kernels.backend(backend):
            pair = ends(TransformQuant(bits=6), dtype=dtype)
            y = crossed(*pair, x)
            assert y.dtype == dtype
            assert decibels(x.float(), y.float()) > 25
    most = torch.finfo(torch.float16).max
    x = (torch.randn(40, 48, generator=torch.Generator().manual_seed(0)).sign() * most).half()
    assert crossed(*ends(TransformQuant(), x.shape, torch.float16), x).isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", STEPS)
def test_tokens_that_are_no_numbers_are_nan_and_no_others(backend: str, step: str) -> None:
    with kernels.backend(backend):
        sender, receiver = ends(TransformQuant(step=step), (40, 48), after=2)
        before = sender.state_dict()["directions"]
        x = tokens((40, 48), seed=3)
        x[3, 5], x[7, 0], x[9, 1], x[11] = math.nan, math.inf, -math.inf, 2 * LARGEST
        payload = sender.encode(x)
        coded(sender, payload)
        y = receiver.decode(payload)
        bad = torch.isin(torch.arange(40), torch.tensor([3, 7, 9, 11]))
        assert y[bad].isnan().all(), "and so is what is too large for any step"
        assert y[~bad].isfinite().all()
        assert decibels(x[~bad], y[~bad]) > 10
        assert torch.equal(sender.state_dict()["directions"], before)
        assert crossed(sender, receiver, torch.full_like(x, math.nan)).isnan().all()
        x = tokens((40, 48), seed=4)
        assert decibels(x, crossed(sender, receiver, x)) > 10, "and the next message is coded as ever"


def error_in_steps(sender: Session, receiver: Session, x: Tensor) -> Tensor:
    payload = sender.encode(x)
    _, step_R = coded(sender, payload)
    return (receiver.decode(payload) - x) / step_R[:, None]


def test_errors_of_one_step_are_white_and_unbiased() -> None:
    """Also in directions in which there is no signal, and of tokens of very different norms."""
    rows, channels, count = 60, 16, 48
    g = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(channels, channels, generator=g))[0]
    x = torch.randn(rows, 2, generator=g) @ axes[:2] * torch.exp(torch.randn(rows, 1, generator=g))
    pair = ends(TransformQuant(step="message"), (rows, channels))
    error = torch.stack([error_in_steps(*pair, x) for _ in range(count)])
    # Uniform in a cell: variance 1/12. A mean of n such numbers is off by 6 deviations in none of the cases here.
    assert (error.mean(0).abs() < 6 / math.sqrt(12 * count)).all()
    along = error.view(-1, channels) @ axes.t()  # 2 with signal, 14 without
    n = len(along)
    assert (along.mean(0).abs() < 5 / math.sqrt(12 * n)).all()
    variance = 12 * along.square().mean(0)
    assert ((variance - 1).abs() < 5 * math.sqrt(2 / n)).all(), variance
    covariance = 12 * (along.t() @ along) / n
    assert ((covariance - covariance.diagonal().diag()).abs() < 5 / math.sqrt(n)).all()
    size = x.norm(dim=1)
    by_token = 12 * error.square().mean((0, 2))
    weak, strong = by_token[size < size.median()].mean(), by_token[size >= size.median()].mean()
    assert abs(float(weak - strong)) < 5 * math.sqrt(2 * 2 / (n * channels / 2))


def test_steps_by_token_leave_little_error_where_there_is_no_signal() -> None:
    g = torch.Generator().manual_seed(0)
    signs = [[(-1) ** (i & j).bit_count() for j in range(32)] for i in range(32)]
    axes = torch.tensor(signs) / math.sqrt(32)  # as much in each channel: weights of 1
    pair = ends(TransformQuant(bits=2.5), (128, 32))
    along = [error_in_steps(*pair, torch.randn(128, 2, generator=g) @ axes[:2]) @ axes.t() for _ in range(20)]
    variance = 12 * torch.cat(along[4:]).square().mean(0)
    assert (variance[:2] < 1.3).all()
    assert variance[2:].mean() < 0.2


def test_dither_depends_on_the_message_and_is_uniform() -> None:
    header = torch.tensor([3, 12345, 1, 678], dtype=torch.int32)
    first = dither(header, torch.Size((256, 256)))
    assert torch.bincount(first.view(-1), minlength=256).sub(256).abs().max() < 6 * 16
    for i in range(4):
        other = header.clone()
        other[i] ^= 1
        alike = (dither(other, torch.Size((256, 256))) == first).float().mean()
        assert abs(float(alike) - 1 / 256) < 6 * math.sqrt(1 / 256 / 65536)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: None,
        lambda d: d[0, 0].zero_(),  # a tie between the signs of the first reflection
        lambda d: d[0].copy_(torch.eye(d.shape[1])[0]),  # nothing is left to reflect
        lambda d: d[9:].zero_(),
        lambda d: d[4].zero_(),  # this and what follows takes the reference's path
        lambda d: d[7].copy_(d[2] + 0.01 * d[3]),
        lambda d: d[5].mul_(1e-20),
    ],
)
def test_both_backends_have_the_same_transform(change: Callable[[Tensor], object]) -> None:
    """Also after a change of some directions, in float64: a sign that differed would change whole coordinates."""
    g = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(80, 20, generator=g))[0].t().contiguous()
    change(directions)
    x = torch.randn(30, 80, generator=g)
    with kernels.backend("reference"):
        expected = coefficients(x, directions)
    slots = torch.tensor([2, -1, 11], dtype=torch.int16)
    before = directions.clone()
    before[slots[slots >= 0].long()] = torch.randn(2, 80, generator=g)
    with kernels.backend("cpu"):
        make = kernels.implementation(Transform, x.device)
        for transform in (make(directions), make(directions, make(before), slots)):
            assert torch.allclose(transform.coefficients(x), expected, rtol=0, atol=2e-5)
            assert torch.allclose(transform.coefficients(x, x @ directions.t()), expected, rtol=0, atol=2e-5)
            y = torch.empty_like(x)
            transform.tokens(expected, y)
            assert torch.allclose(y, x, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("channels", "filled"), [(48, 12), (48, 5), (48, 0), (1, 1), (7, 1), (130, 32)])
def test_the_transform_is_orthonormal_and_begins_with_the_directions(backend: str, channels: int, filled: int) -> None:
    count = suited(64, channels, by_token=True)[0]
    g = torch.Generator().manual_seed(channels)
    directions = torch.zeros(count, channels)
    directions[:filled] = torch.nn.functional.normalize(torch.randn(filled, channels, generator=g))
    x = torch.randn(30, channels, generator=g)
    with kernels.backend(backend):
        z, y = coefficients(x, directions), torch.empty_like(x)
        transform = kernels.implementation(Transform, x.device)(directions)
        transform.tokens(z, y)
        inside = coefficients(directions[:filled].contiguous(), directions)
        half = torch.empty(30, channels, dtype=torch.bfloat16)
        transform.tokens(z, half)
    assert torch.allclose(z.norm(dim=1), x.norm(dim=1), rtol=1e-5)
    assert torch.allclose(y, x, atol=1e-5)
    assert torch.equal(half, y.bfloat16()) or torch.allclose(half.float(), y, rtol=2**-8, atol=1e-6)
    assert (inside[:, filled:].abs() < 1e-5).all()


@pytest.mark.parametrize("step", STEPS)
def test_the_basis_is_learned_and_a_useless_one_costs_little(step: str) -> None:
    shape = (128, 64)
    pair, fresh = (ends(TransformQuant(bits=4.5, step=step), shape) for _ in range(2))
    found = [decibels(x, crossed(*pair, x)) for x in (tokens(shape, seed=seed) for seed in range(12))]
    assert min(found[8:]) > found[0] + 6
    same(*(end.state_dict() for end in pair))
    x = 1e3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)) - 5
    less = decibels(x, crossed(*fresh, x)) - decibels(x, crossed(*pair, x))
    assert less < 1.5, "noise has no directions to lose"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_in_one_direction_are_nearly_exact(backend: str, step: str) -> None:
    """The other coordinates hold rounding errors alone, which must not decide the scales of tokens."""
    number = torch.randn(128, 1, generator=torch.Generator().manual_seed(0))
    wide = [number.expand(128, channels).contiguous() for channels in (256, 1024)]
    for x in (*wide, *(torch.eye(1, channels) * number for channels in (4, 96))):
        with kernels.backend(backend):
            pair = ends(TransformQuant(step=step), x.shape)
            assert min(decibels(x, crossed(*pair, x)) for _ in range(3)) > (80 if x.shape[1] > 4 else 25)


def test_the_least_rate_is_enough() -> None:
    """Of nothing but dead symbols, whatever the tokens are."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) ** 5
    least = TransformQuant().geometry(x.shape).least()
    codec = TransformQuant(bits=8 * (least + 2) / x.numel())
    for backend in BACKENDS:
        with kernels.backend(backend):
            assert crossed(*ends(codec, x.shape), x).isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_rate_and_values(data: st.DataObject) -> None:
    rows, channels = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 90))
    step, seed = data.draw(st.sampled_from(STEPS)), data.draw(st.integers(0, 99))
    bits = data.draw(st.none() | st.floats(0.5, 16))
    codec, g = TransformQuant(bits=bits, step=step), torch.Generator().manual_seed(seed)
    sizes = [torch.exp(data.draw(st.floats(0, 12)) * torch.randn(n, generator=g)) for n in (rows, channels)]
    x = torch.randn(rows, channels, generator=g) * sizes[0][:, None] * sizes[1]
    bad = data.draw(st.sampled_from([None, 0.0, math.nan, math.inf, 1e-42]))
    if bad is not None:
        x[seed % rows, seed % channels :] = bad
    with kernels.backend("cpu"):
        least = TransformQuant(step=step).geometry(x.shape).least()
        if bits is not None and int(bits * x.numel() / 8) // 2 * 2 < least:
            with pytest.raises(ValueError, match="bits is .* allowed: at least"):
                ends(codec, x.shape)
            return
        sender, receiver = ends(codec, x.shape)
        for _ in range(2):
            y = crossed(sender, receiver, x)
            fine = x.isfinite().all(1)
            if codec.sized(x.shape)[1]:
                assert torch.equal(y.nan_to_num(), x.nan_to_num())
            else:
                assert y[fine & (x.abs().amax(1) < LARGEST / 100)].isfinite().all()
                assert y[~fine].isnan().all()
        same(sender.state_dict(), receiver.state_dict())
