"""The subspace operators: every backend gives the reference's bytes, and the reference does what it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowbit import kernels
from lowbit.codecs.subspace_quant.layout import subspace_geometry
from lowbit.codecs.subspace_quant.reference import coefficients_decode, coefficients_encode, rest_decode, rest_encode

DIRECTIONS, REFRESH = 5, 4


def inputs(rows: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Coefficients, units, tokens, shares of directions that are taken from them, and directions.

    They are of all sizes, with everything that is special; but sums of directions are exact in any order.
    """
    g = torch.Generator().manual_seed(0)

    def octaves(count: int, most: int) -> Tensor:
        return torch.exp2(torch.randint(-most, most, (rows, count), generator=g).float())

    c = torch.randn(rows, DIRECTIONS, generator=g) * octaves(1, 9)
    unit = (torch.rand(DIRECTIONS, generator=g) * 3).bfloat16().float()
    sizes = octaves(channels // 8 + 1, 14 if dtype == torch.float16 else 20)
    x = torch.randn(rows, channels, generator=g) * sizes.repeat_interleave(8, 1)[:, :channels]
    share = torch.randint(-4, 5, (rows, DIRECTIONS), generator=g).float()
    directions = torch.randint(-8, 9, (DIRECTIONS, channels), generator=g) / 64
    unit[1] = 0
    c[3], c[4, 0], c[5, 1], c[6] = 0, math.nan, math.inf, 1e35
    c[7] *= 1e-30
    x = x.to(dtype)
    share[:, 0], share[0], share[0, 0], share[4:6], directions[0] = 0, 0, 1, 0, x[0].float()
    x[1, 3], x[2, -1], x[3, :8], x[4, 2], x[5] = (math.nan, -math.inf, torch.finfo(dtype).max, 1e-38, 0)
    return c, unit, x, share, directions


def run(
    name: str, dtype: torch.dtype, rows: int, channels: int, bits: int, group: int, device: str = "cpu"
) -> list[Tensor]:
    c, unit, x, share, directions = (t.to(device) for t in inputs(rows, channels, dtype))
    geo = subspace_geometry(rows, channels, DIRECTIONS, bits, group, REFRESH)
    payload = torch.zeros(geo.layout.nbytes, dtype=torch.uint8, device=device)
    out, again = torch.empty_like(c), torch.empty_like(c)
    y = torch.ones(rows, channels, dtype=dtype, device=device)
    with kernels.backend(name):
        for function, *arguments in (
            (coefficients_encode, c, unit, payload, out, geo),
            (coefficients_decode, payload, unit, again, geo),
            (rest_encode, x, share, directions, payload, geo),
            (rest_decode, payload, share, directions, y, geo),
        ):
            kernels.implementation(function, y.device)(*arguments)
    assert torch.equal(out, again)
    return [payload, out, y]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("near", [0, 1 << 18], ids=["engine", "kernel"])
def test_kernels_give_the_references_bytes(dtype: torch.dtype, near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.codecs.subspace_quant.cpu.NEAR", near)  # who sums up directions
    for bits in (2, 3, 4, 6, 8):
        for rows, channels, group in ((9, 256, 64), (9, 70, 32), (8, 100, 8), (40, 1024, 32)):
            expected, found = (run(n, dtype, rows, channels, bits, group) for n in ("reference", "cpu"))
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a.isnan(), b.isnan())
                assert torch.equal(a.nan_to_num(5), b.nan_to_num(5)), (bits, rows, channels, group)


@pytest.mark.parametrize(
    ("dtype", "rows", "channels", "bits", "group"),
    [
        (torch.float32, 9, 70, 3, 32),
        (torch.bfloat16, 9, 256, 2, 64),
        (torch.float16, 8, 100, 4, 8),
        (torch.float32, 9, 70, 6, 24),
        (torch.bfloat16, 40, 30, 8, 1000),  # several programs, and a group that no token fills
        (torch.float16, 520, 8, 5, 8),
        (torch.float32, 12, 1024, 5, 32),
    ],
)
def test_gpu_kernels_give_the_references_bytes(
    dtype: torch.dtype, rows: int, channels: int, bits: int, group: int
) -> None:
    """On a GPU where there is one, else in Triton's interpreter."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected, found = (run(n, dtype, rows, channels, bits, group, device) for n in ("reference", "gpu"))
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(a.isnan(), b.isnan()), i
        assert torch.equal(a.nan_to_num(5), b.nan_to_num(5)), i


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_errors_are_within_half_a_step(bits: int) -> None:
    _, out, y = run("reference", torch.float32, 9, 256, bits, 64)
    c, unit, x, share, directions = inputs(9, 256, torch.float32)
    rest = (x - share @ directions).view(9, 4, 64)
    fine = rest.isfinite().all(-1)
    assert torch.equal(fine, y.view(9, 4, 64).isfinite().all(-1))
    assert y.view(9, 4, 64)[~fine].isnan().all()
    most = rest.abs().amax(-1).clamp(max=2.0**126)
    # Half a cell of [-most, most] in 2^bits cells; what rounding the step to sixteenths of an octave widens or cuts
    # off; and what a step at least 2^-16 of the token's largest leaves of smaller groups.
    bound = most * (2.0**-bits * 1.07 + (2.0**-5 if bits < 6 else 0))
    bound += torch.where(fine, most, 0).amax(1, keepdim=True) * 2.0**-16
    small = fine & (most < 2.0**100)
    error = (y - x).view(9, 4, 64).abs().amax(-1)
    assert (error[small] <= bound[small]).all()
    assert torch.equal(y[0], x[0]), "nothing is left: zeros are exact"
    used = [0, 1, 2, 7, 8]
    largest = (c / unit)[used][:, [0, 2, 3, 4]].abs().amax(1, keepdim=True)
    step = largest * 1.01 / 127 * unit
    wrong = (out - c).abs()[used]
    wrong[:, 1] = 0
    assert (wrong <= step / 2 * 1.001).all()
    assert not out[3:7].any(), "coefficients that are no numbers, or too large, are not coded"
