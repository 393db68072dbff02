"""Tokens of far larger norms than the others are coded as finely as these."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs import TransformQuant
from lowbit.codecs.transform_quant import cpu_fit, reference
from lowbit.codecs.transform_quant.reference import (
    FURTHEST_BELOW,
    MOST_LOWERED,
    OUTLYING,
    TransformGeometry,
    lowered,
    transform_geometry,
)
from tests.codecs.transform_quant.test_transform_quant import ends, tokens

ROWS, CHANNELS = 48, 40
GEOMETRY = transform_geometry(ROWS, CHANNELS, True, None, 3.0)


def on_cpu(z: Tensor, geo: TransformGeometry) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Levels, tokens and norms that the CPU's kernels write to a payload, the largest scale, and the largest norm."""
    payload = torch.zeros(geo.layout.nbytes, dtype=torch.uint8)
    fit = cpu_fit.fitted(z, payload, geo)
    levels, tokens, norms = (geo.layout.section(payload, name) for name in ("levels", "tokens", "norms"))
    return levels, tokens, norms, fit.highest, fit.largest


def signs(seed: int = 0) -> Tensor:
    """Tokens of norms that are no matter of rounding."""
    return torch.randn(ROWS, CHANNELS, generator=torch.Generator().manual_seed(seed)).sign()


def sinks(at: dict[int, float], x: Tensor | None = None) -> Tensor:
    x = signs() if x is None else x
    for row, factor in at.items():
        x[row] *= factor
    return x


MESSAGES: dict[str, tuple[Tensor, dict[int, int]]] = {
    "none": (signs(), {}),
    "one": (sinks({0: 128}), {0: 28}),
    "several": (sinks({0: 64, 17: 32, 40: 64}), {0: 16, 17: 16, 40: 16}),  # of 68, which is more than 48
    "4 times": (sinks({0: 4, 1: 4.8}), {1: 9}),
    "further than steps reach": (sinks({5: 2.0**60}), {5: MOST_LOWERED}),
    "NaN in a sink": (sinks({0: math.nan, 1: 64}), {1: 24}),
    "Inf in a sink": (sinks({0: math.inf, 1: 64}), {1: 24}),
    "zeros in most of the message": (sinks(dict.fromkeys(range(8, ROWS), 0) | {0: 2}), {}),
    "zeros, and a sink": (sinks(dict.fromkeys(range(24, ROWS), 0) | {0: 64}), {0: 24}),
    "zeros alone": (torch.zeros(ROWS, CHANNELS), {}),
    "the smaller half is the median's": (sinks(dict.fromkeys(range(24), 16.0)), dict.fromkeys(range(24), 2)),
    "most are large": (sinks(dict.fromkeys(range(25), 16.0)), {}),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_backend_lowers_the_norms_that_are_meant(name: str) -> None:
    x, expected = MESSAGES[name]
    fits = [reference.fitted(x, GEOMETRY), on_cpu(x, GEOMETRY)]
    if importlib.util.find_spec("triton"):
        gpu = importlib.import_module("lowbit.codecs.transform_quant.gpu")
        there, plan = gpu.planned(x, GEOMETRY)
        numbers = [int(plan[i.value]) for i in (gpu.LEVEL, gpu.NORM)]
        fits.append((there.levels, there.tokens, there.norms, *numbers))
    own = (4 * x.double().square().mean(1).sqrt().log2()).round()
    for levels, tokens_, norms, highest, largest in fits:
        coded = tokens_ < reference.NAN
        assert torch.equal(coded, x.isfinite().all(1) & x.any(1))
        assert (norms[~coded] == FURTHEST_BELOW).all()
        low = own - (largest - norms.double())
        assert {r: int(low[r]) for r in range(ROWS) if coded[r] and low[r]} == expected
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
    x = signs(seed) * torch.exp2(exponent)[:, None]
    x[count:] = 0
    norm = 4 * exponent.int() - 4 * int(exponent[:count].amax())
    usable = torch.arange(ROWS) < count
    less = lowered(norm, usable)
    assert torch.equal(less[~usable], norm[~usable])
    median, taken = norm[usable].sort().values[(count - 1) // 2], norm - less
    assert ((taken == 0) | (norm - median > OUTLYING)).all()
    assert int(taken.sum()) <= count
    assert int(taken.max()) <= MOST_LOWERED
    below = on_cpu(x, GEOMETRY)[2][:count]
    expected = (int(less[usable].max()) - less[usable]).clamp(max=FURTHEST_BELOW)
    assert torch.equal(below.int(), expected.int())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sink_is_as_exact_as_the_others_and_they_lose_little(dtype: torch.dtype, backend: str) -> None:
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


def test_one_token_and_tokens_all_alike_have_no_sink() -> None:
    for rows in (1, 2, 9):
        z, geo = 1000 * signs()[:1].repeat(rows, 1), transform_geometry(rows, CHANNELS, True, None, 3.0)
        _, _, norm, _, largest = reference.fitted(z, geo)
        *_, found, _, most = on_cpu(z, geo)
        assert not norm.any()
        assert not found.any()
        assert most == largest == 40  # 1000 is 9.97 octaves
