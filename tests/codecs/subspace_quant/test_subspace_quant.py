"""Directions that both ends learn from the messages between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lowbit.codecs import GroupInt, SubspaceQuant, parse
from lowbit.codecs.basis.memory import Headers
from lowbit.codecs.basis.reference import ITERATIONS, Renewal, find_renewal, gram_inverse, renewed_products
from lowbit.codecs.sessions import Session
from lowbit.codecs.subspace_quant.fit import best_directions
from lowbit.codecs.subspace_quant.layout import subspace_geometry
from tests.codecs.basis import messages
from tests.codecs.basis.messages import crossed, decibels

SHAPE = (2, 40, 70)


def ends(codec: SubspaceQuant, shape: tuple[int, ...] = SHAPE) -> tuple[Session, Session]:
    return messages.ends(codec, shape)


def tokens(shape: tuple[int, ...] = SHAPE, *, seed: int, directions: int = 6) -> Tensor:
    return messages.tokens(shape, seed=seed, directions=directions)


def project(x: Tensor, basis: Tensor) -> Tensor:
    """Coefficients whose combination of the directions comes nearest to each token."""
    return x @ basis.t() @ gram_inverse(basis)


def renewed(x: Tensor, basis: Tensor, count: int) -> Renewal:
    return find_renewal(x, basis, count, x @ basis.t(), gram_inverse(basis))


def test_the_basis_is_learned_and_the_remainder_closes_the_loop() -> None:
    codec = SubspaceQuant(directions=8, bits=3, group=32, refresh=4)
    sender, receiver = ends(codec)
    found = [decibels(x, crossed(sender, receiver, x)) for x in (tokens(seed=s) for s in range(8))]
    plain = decibels(tokens(seed=9), GroupInt(bits=3, group=32).round_trip(tokens(seed=9)))
    assert found[0] > plain - 3
    assert min(found[4:]) > plain + 15, "noise of a tenth in 64 of 70 channels is all that is left to 3 bits"
    # Uniform noise of a group's largest magnitude / 2^3, which is 3 deviations of the noise.
    x, y = tokens(seed=9), crossed(sender, receiver, tokens(seed=9))
    assert float((x - y).std()) < 0.1 * 3 / 2**3 / math.sqrt(3) * 1.2
    assert torch.equal(sender.state_dict()["directions"], receiver.state_dict()["directions"])


def test_a_stale_or_useless_basis_costs_precision_but_not_correctness() -> None:
    sender, receiver = ends(SubspaceQuant(directions=8, bits=4, refresh=4))
    for seed in range(4):
        crossed(sender, receiver, tokens(seed=seed))
    x = 1e3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) - 5
    assert decibels(x, crossed(sender, receiver, x)) > 18, "4 bits of noise that has no directions"
    x = tokens(seed=5)
    x[0, 0] *= 1e5  # a massive activation
    y = crossed(sender, receiver, x)
    assert decibels(x[0, 0], y[0, 0]) > 20
    assert decibels(x[0, 1:], y[0, 1:]) > 20, "its neighbours keep their precision"


def test_one_message_can_bring_the_whole_basis() -> None:
    sender, receiver = ends(SubspaceQuant(directions=7, bits=3, refresh=1))
    x = tokens(seed=0)
    assert decibels(x, crossed(sender, receiver, x)) > 35


def test_renewed_directions_are_the_principal_ones_of_what_the_others_leave() -> None:
    x = tokens(seed=0).view(-1, 70)
    kept = torch.nn.functional.normalize(torch.randn(2, 70, generator=torch.Generator().manual_seed(1)))
    basis = torch.cat([kept, torch.zeros(3, 70)])
    new = renewed(x, basis, 3)
    assert sorted(new.slots_M.tolist()) == [2, 3, 4]
    rest = x - project(x, kept) @ kept
    principal = torch.linalg.svd(rest, full_matrices=False).Vh[:3]
    left = x - project(x, new.applied(basis)) @ new.applied(basis)
    best = rest - rest @ principal.t() @ principal
    assert left.norm() < 1.05 * best.norm()


def test_every_byte_is_counted_and_sizes_do_not_depend_on_data() -> None:
    codec = SubspaceQuant(directions=32, bits=2, group=64, refresh=8)
    shape = (4, 128, 512)
    rows = 4 * 128
    parts = (16, 2 * 4 + 8, 4 * 4, 4 * 512, 2 * 32, 2 * rows, 32 * rows, rows, 8 * rows, 128 * rows)
    assert codec.nbytes(shape) == sum(parts)
    assert codec.nbytes((0, 5, 64)) == 0
    pair = codec.bits_per_element(shape) + SubspaceQuant(directions=32, bits=4, group=64).bits_per_element(shape)
    assert pair < 7.5, "forward and backward, at 512 channels"
    assert parse("subspace").nbytes(shape) == replace(codec, bits=3).nbytes(shape)
    sender, _ = ends(codec, (3, 64))
    before = sender.state_bytes()
    sender.encode(torch.randn(3, 64))
    assert sender.state_bytes() == before == 4 * 64 * 32 + 16


def test_a_slow_refresh_brings_new_directions_in_every_few_messages_only() -> None:
    sender, receiver = ends(SubspaceQuant(directions=4, refresh=12))
    brought, reached = [], []
    for seed in range(10):
        x = tokens(seed=seed)
        payload = sender.encode(x)
        reached.append(decibels(x, receiver.decode(payload)))
        brought.append(int(payload[16:18].view(torch.int16)) >= 0)  # the one slot

    # All directions there are come first.
    assert brought == [True] * 4 + [False, False, True, False, False, True]
    assert min(reached[4:]) > reached[0] + 3
    assert torch.equal(sender.state_dict()["directions"], receiver.state_dict()["directions"])


@pytest.mark.parametrize("training", [True, False])
def test_every_changed_byte_that_would_stay_is_an_error_at_once(training: bool) -> None:
    sender, receiver = ends(SubspaceQuant(directions=4, refresh=2))
    for seed in range(2):
        crossed(sender, receiver, tokens(seed=seed))
    payload, before = sender.encode(tokens(seed=2), training=training), receiver.state_dict()
    out = torch.full(SHAPE, 7.0)
    at = sender._geometry.layout.offsets
    starts = [("header", 16), ("slots", 4), ("lengths", 8), ("directions", 2 * 70)]
    for i in (at[name] + byte for name, size in starts for byte in range(size)):
        for bit in (0, 7):
            payload[i] ^= 1 << bit
            with pytest.raises(ValueError, match="payload is .* this end expects"):
                receiver.decode(payload, out=out, training=training)
            payload[i] ^= 1 << bit
    after = receiver.state_dict()
    assert torch.equal(after.pop("directions"), before.pop("directions"))
    assert after == before
    assert (out == 7).all()
    payload[at["factors"] + 1 :: 7] ^= 1  # concerns this message alone
    receiver.decode(payload, training=training)
    if training:
        receiver.load_state_dict(sender.state_dict())
    crossed(sender, receiver, tokens(seed=3))


@pytest.mark.parametrize(
    ("slot", "length"),
    [(4, 0.0), (1, 0.0), (32767, 0.0), (-2, 0.0), (0, math.nan), (0, math.inf), (0, -1.0), (0, 1e30)],
)
@pytest.mark.parametrize("late", [False, True])
def test_directions_that_cannot_be_are_refused(
    slot: int, length: float, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a sender that does not keep to the format: its digest is right."""
    sender, receiver = ends(SubspaceQuant(directions=4, refresh=2))
    payload = sender.encode(tokens(seed=0))
    at = sender._geometry.layout.offsets
    parts = (("slots", torch.int16, 4), ("lengths", torch.float32, 8), ("directions", torch.int8, 140))
    slots, lengths, codes = (payload[at[n] : at[n] + size].view(t) for n, t, size in parts)
    slots[0] = slot
    lengths[0] = length
    payload[12:16].view(torch.int32).copy_(Renewal(slots, lengths, codes.view(2, 70)).digest())
    if late:
        check = Headers.check
        monkeypatch.setattr(Headers, "check", lambda self, wait=False: check(self) if wait else None)
        assert receiver.decode(payload).isnan().all()
        assert not receiver._memory.directions.any()
    with pytest.raises(ValueError, match="expects training message 0 .* with new ones beyond the"):
        receiver.state_dict() if late else receiver.decode(payload)


def test_the_header_and_the_digest_are_as_documented() -> None:
    sender, _ = ends(SubspaceQuant(directions=4, refresh=2))
    new = Renewal(
        torch.tensor([3, 1], dtype=torch.int16),
        torch.tensor([1.0, 0.5]),
        torch.tensor([[1, -2, 3], [-4, 5, -127]], dtype=torch.int8),
    )
    values = (3, 1, 0, 0x3F80, 0, 0x3F00, 1, -2, 3, -4, 5, -127)
    total = 0x9E3779B1 * sum(v * i for i, v in enumerate(values, 1))
    assert int(new.digest()) == total % 2**31
    digest = 0
    for number in range(3):
        header = sender.encode(tokens(seed=number))[:16].view(torch.int32).tolist()
        assert header[:3] == [number, digest, 1]
        digest = (31 * digest + header[3]) % 2**31
    header = sender.encode(tokens(seed=3), training=False)[:16].view(torch.int32).tolist()
    assert header[:3] == [3, digest, 0]
    assert sender.state_dict()["digest"] == digest


def test_products_and_inverses_that_are_kept_give_what_the_directions_alone_give() -> None:
    x, basis = tokens(seed=0).view(-1, 70), torch.zeros(6, 70)
    for seed in range(4):
        products, new = x @ basis.t(), renewed(x, basis, 2)
        # The remainder that the new ones are found in, by least squares with the others alone.
        kept = basis.index_fill(0, new.slots_M.long(), 0.0)
        rest = x - project(x, kept) @ kept
        v = torch.randn(70, 2, generator=torch.Generator().manual_seed(0))
        for _ in range(ITERATIONS):
            v = torch.linalg.qr(rest.t() @ (rest @ v)).Q
        made = torch.nn.functional.normalize(new.codes_MC.float())
        assert (made.t() - v @ (v.t() @ made.t())).norm() < 0.02, "but for 8 bits"
        basis = new.applied(basis)
        found = renewed_products(x, products, new, basis) @ gram_inverse(basis)
        expected = torch.linalg.lstsq(basis.t(), x.t()).solution.t() if seed > 1 else project(x, basis)
        assert (found - expected).norm() < 1e-3 * expected.norm()
        x = tokens(seed=seed + 1).view(-1, 70)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_a_number_travels_and_leaves_the_basis_alone(bad: float) -> None:
    codec = SubspaceQuant(directions=8, bits=3, group=8, refresh=2)
    sender, receiver = ends(codec)
    for seed in range(3):
        crossed(sender, receiver, tokens(seed=seed))
    before = sender.state_dict()["directions"]
    x = tokens(seed=4)
    x[1, 3, 20] = bad
    y = crossed(sender, receiver, x)
    assert torch.equal(sender.state_dict()["directions"], before)
    assert renewed(x.view(-1, 70), before, 4).lengths_M.isfinite().all(), "bytes are defined"
    bad_group = torch.zeros(SHAPE, dtype=torch.bool)
    bad_group[1, 3, 16:24] = True
    if math.isfinite(bad):
        assert y.isfinite().all()
    else:
        assert y[bad_group].isnan().all()
        assert y[~bad_group].isfinite().all()
    others = torch.ones(SHAPE, dtype=torch.bool)
    others[1, 3] = False
    assert decibels(x[others], y[others]) > 25
    x = tokens(seed=5)
    assert decibels(x, crossed(sender, receiver, x)) > 25, "and the next message is coded as ever"


@pytest.mark.parametrize("case", ["zeros", "constant", "one token", "one direction", "one channel"])
def test_tokens_of_few_dimensions(case: str) -> None:
    shape = {"one token": (1, 70), "one channel": (9, 1)}.get(case, (9, 70))
    codec = SubspaceQuant() if case == "one channel" else SubspaceQuant(directions=12, refresh=3)
    sender, receiver = ends(codec, shape)
    for seed in range(4):
        x = tokens(shape, seed=seed, directions=1)
        if case == "zeros":
            x = torch.zeros(shape)
        if case == "constant":
            x = torch.full(shape, -3.5)
        if case == "one direction":
            x = torch.randn(9, 1) @ torch.linspace(-1, 1, 70)[None]
        y = crossed(sender, receiver, x)
        assert y.isfinite().all()
        if case == "zeros":
            assert torch.equal(y, x), "zeros are exact"
        else:
            assert decibels(x, y) > 30


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-37])
def test_next_to_nothing_is_finite_and_leaves_the_basis_usable(size: float) -> None:
    """The reciprocal of denormal numbers is Inf."""
    sender, receiver = ends(SubspaceQuant(directions=8, refresh=2))
    for seed in range(3):
        crossed(sender, receiver, tokens(seed=seed))
    y = crossed(sender, receiver, tokens(seed=3) * size)
    assert y.isfinite().all()
    assert y.abs().max() <= (max(20 * size, 2.0**-126) if size else 0), "steps are normal numbers"
    x = tokens(seed=4)
    assert decibels(x, crossed(sender, receiver, x)) > 25


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12])
def test_scale_free(size: float) -> None:
    """Tiny gradients survive, whose squares would underflow."""
    codec = SubspaceQuant(directions=8, refresh=2)
    found = []
    for factor in (1.0, size):
        pair = ends(codec)
        for seed in range(3):
            y = crossed(*pair, tokens(seed=seed) * factor)
        found.append(decibels(tokens(seed=2), y * (1 / factor)))
    assert found[1] == pytest.approx(found[0], abs=0.3)


def test_finite_in_finite_out_in_every_dtype() -> None:
    extreme = torch.tensor([3.4e38, -3.4e38, 1e38, 0.0, -0.0, 1e-45, 1e-38, 65504.0] * 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.where(extreme.to(dtype).isfinite(), extreme.to(dtype), torch.finfo(dtype).max)
        x = x.view(2, 64)
        sender, receiver = (SubspaceQuant(directions=4).open(shape=x.shape, dtype=dtype) for _ in "ab")
        for _ in range(2):
            assert crossed(sender, receiver, x).isfinite().all()


def test_a_rank_is_chosen_by_the_spectrum() -> None:
    shape = (512, 256)
    for directions in (3, 12):
        x = tokens(shape, seed=1, directions=directions)
        codec = SubspaceQuant.fitted(x, bits=2, refresh=4)
        assert codec.directions in range(directions, directions + 3), "and one for the mean"
        assert (codec.bits, codec.group, codec.refresh) == (2, 64, 4)
        assert SubspaceQuant.fitted(x.bfloat16() * 1e-30, bits=2, refresh=4).directions == codec.directions
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert SubspaceQuant.fitted(noise).directions == 1, "nothing to be had"
    assert SubspaceQuant.fitted(torch.randn(3, 8)).directions in (1, 2, 3)
    for bad in (torch.zeros(4, 8), torch.full((4, 8), math.nan), torch.empty(0, 8)):
        with pytest.raises(ValueError, match="x has shape .* allowed: finite"):
            SubspaceQuant.fitted(bad)
    with pytest.raises(TypeError, match="float64"):
        SubspaceQuant.fitted(noise.double())


def test_a_rank_is_that_of_the_whole_spectrum_where_only_its_start_is_looked_at() -> None:
    """Beyond 256 tokens and channels the power method sees the largest directions alone."""
    generator = torch.Generator().manual_seed(0)
    turned = torch.linalg.qr(torch.randn(300, 300, generator=generator)).Q
    for slope in (0.6, 1.0, 1.6):
        fall = torch.arange(1, 301).float() ** -slope
        x = torch.randn(400, 300, generator=generator) * fall @ turned
        energy = torch.linalg.svdvals(x.double()).square()
        share = energy.cumsum(0) / energy.sum()
        k = torch.arange(1, 301)
        noise = (1 - share) / 4**3 + share / 4**8
        cost = noise.log2() / 2 + 8 * k / 300 + 8 * k.div(5).ceil() / 400
        found = best_directions(x, bits=3, refresh=5)
        assert cost[found - 1] < cost.min() + 0.005, slope
        assert found == best_directions(x, bits=3, refresh=5)
    flat = torch.eye(600).repeat(80, 1)  # each direction is as good as the next, and cheap
    assert best_directions(flat, bits=8, refresh=60000) <= 256


def test_a_rank_that_is_left_open_is_asked_for() -> None:
    auto = parse("SubspaceQuant(directions='auto', bits=4, refresh=3)")
    assert auto == SubspaceQuant(directions="auto", bits=4, refresh=3)
    assert (auto.settled, SubspaceQuant().settled) == (False, True)
    for use in (auto.nbytes, lambda shape: auto.open(shape=shape, dtype=torch.float32)):
        with pytest.raises(ValueError, match=r"directions is 'auto': .* warm-up.*; allowed here: an int"):
            use((4, 64))
    x = tokens(seed=1)
    codec = auto.settle(auto.choose(x))
    assert codec == SubspaceQuant.fitted(x, bits=4, refresh=3)
    assert codec.settle(5) is codec
    with pytest.raises(ValueError, match="directions is 0"):
        auto.settle(0)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_message_that_tells_nothing_gives_a_rank_nevertheless(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    auto = SubspaceQuant(directions="auto")
    for shape, rank in (((4, 70), 8), ((2, 3, 12), 1), ((0, 5), 1)):
        assert auto.choose(torch.full(shape, bad)) == rank
    assert "8 directions" in caplog.messages[0]
    assert len(caplog.messages) == 3


def test_fewer_channels_than_directions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"directions is 32, .* is 16; allowed: 1 to 16"):
        SubspaceQuant(directions=32).open(shape=(4, 16), dtype=torch.float32)


def test_digests_notice_every_byte_and_its_place() -> None:
    codes = torch.arange(-20, 20, dtype=torch.int8).view(2, 20)
    new = Renewal(torch.tensor([1, 0], dtype=torch.int16), torch.tensor([0.5, 0.25]), codes)
    seen = {int(new.digest())}
    for part, value in zip(new, (7, 0.75, 99), strict=True):
        for i in range(part.numel()):
            changed = part.clone()
            changed.view(-1)[i] = value
            seen.add(int(Renewal(*(changed if p is part else p for p in new)).digest()))
    seen.add(int(Renewal(new[0], new[1], codes.flip(0)).digest()))
    assert len(seen) == 1 + 2 + 2 + 40 + 1


def test_layout_sizes() -> None:
    geo = subspace_geometry(5, 70, 6, 3, 32, 4)
    assert (geo.groups, geo.renewed, geo.row_bytes) == (3, 2, (64 + 8) * 3 // 8)
    assert geo.layout.sizes["codes"] == 5 * 27


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_beside_payload_and_output_is_as_documented(dtype: torch.dtype) -> None:
    shape = (1, 512, 1024)
    sender, receiver = (SubspaceQuant(directions=8).open(shape=shape, dtype=dtype) for _ in range(2))
    x, out, whole = tokens(shape, seed=0).to(dtype), torch.empty(shape, dtype=dtype), 4 * 512 * 1024
    receiver.decode(sender.encode(x), out=out)
    payload = sender.encode(x)
    copies = 0 if dtype == torch.float32 else 1
    assert peak(lambda: sender.encode(x)) < copies * whole + len(payload) + 0.2 * whole
    assert peak(lambda: receiver.decode(payload, out=out)) < 0.2 * whole


def peak(operation: Callable[[], object]) -> int:
    """The most bytes that an operation holds at a time beside what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        operation()
    held = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert most, "the profiler tells no memory"
    return most
