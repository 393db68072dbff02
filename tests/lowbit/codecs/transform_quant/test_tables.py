"""The tables of the entropy coder and the bytes of a stream: the same on every machine."""

import hashlib
import math

import numpy as np
import pytest
import torch

from lowbit.codecs.transform_quant import reference as tables
from lowbit.codecs.transform_quant.reference import codes_of, stream_of

TABLES = "a72d4de28abd114a3606638e714f7a0c702aa0a8cd47e96a18c872922133f7b5"
STREAM = "b18bdf02ba8ea19f3d59c14f5c20d7f2e4606646b0407bbb559a9538449046bb"


def symbols(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, contexts and numbers of lowest bits of everything there is, from integers alone."""
    n = torch.arange(count, dtype=torch.int64) * 2654435761 % 4294967296
    raw = torch.where(n % 7 == 0, n // 7 % 21, 0)
    code = (n >> 5) % 15 - 7
    code = torch.where(n % 31 == 0, (n >> 8) % 60000 - 30000, code) << raw
    return (code | (n >> 3) % (1 << raw)).to(torch.int32), (n >> 9) % tables.CONTEXTS, raw


@pytest.mark.parametrize("count", [1, 31, 32, 33, 5000])
def test_tables_and_streams_are_the_same_everywhere_and_codes_come_back(count: int) -> None:
    assert hashlib.sha256(tables.limits().astype("<u2").tobytes()).hexdigest() == TABLES
    code, context, raw = symbols(count)
    entry, body = stream_of(code, context, raw)
    assert count < 5000 or hashlib.sha256(body.numpy().tobytes()).hexdigest() == STREAM
    assert len(body) == 128 + 2 * entry[0] + 2 * entry[1] + entry[2]
    found, whole = codes_of(body, list(entry), context, raw)
    assert whole
    assert torch.equal(found, code)


def test_the_tables_are_those_of_the_distribution() -> None:
    """A logistic distribution of the scale's deviation, rounded down after the dither, and 16 symbols of 1 at least."""
    share = np.diff(tables.limits()[:, : tables.SYMBOLS + 1].astype(np.float64), axis=1) / tables.TOTAL
    for scale in range(tables.LOWEST, tables.LOWEST + tables.SCALES, 5):
        for dither in (0, 3, 100, 255):
            row = share[(scale - tables.LOWEST) * tables.DITHERS + tables.dither_classes()[dither]]
            same = np.flatnonzero(tables.dither_classes() == tables.dither_classes()[dither])
            for code in (-2, 0, 1):
                t = math.pi / math.sqrt(3) / 2 ** (scale / 4)
                at = [np.tanh((code + i - (same + 0.5) / 256) * t / 2) / 2 for i in (0, 1)]
                expected = (at[1] - at[0]).mean() * (tables.TOTAL - tables.SYMBOLS) / tables.TOTAL
                # Half a unit of rounding; at least 1; and the likeliest symbol takes what is left.
                slack = tables.SYMBOLS if row[code + tables.MIDDLE] == row.max() else 1
                assert abs(row[code + tables.MIDDLE] - expected) <= slack / tables.TOTAL


def test_shares_are_the_best_linear_estimates() -> None:
    """Of numbers of a scale's deviation from what they are beside noise that is uniform in a step."""
    g, shares = np.random.default_rng(0), tables.shares()
    noise, number = g.uniform(-0.5, 0.5, 1 << 18), g.standard_normal(1 << 18)
    for scale in range(tables.LOWEST, 13, 4):
        z = number * 2 ** (scale / 4)
        y = z + noise
        assert abs(shares[scale - tables.LOWEST] - (z * y).sum() / (y * y).sum()) < 0.01
    assert (shares[-1], shares.dtype) == (1, np.float32)


def test_costs_grow_with_the_scale() -> None:
    costs = tables.costs()
    assert len(costs) == tables.HIGHEST - tables.LOWEST + 1
    assert (np.diff(costs) > 0).all()
    # The logistic distribution's entropy given the dither is within 0.1 bit of a Gaussian's of 1 to 2 steps.
    gaussian = np.arange(4) / 4 + math.log2(2 * math.pi * math.e) / 2
    for bits in (0, 1, 20):  # that travel as they are
        assert costs[4 * bits - tables.LOWEST :][:4] == pytest.approx(bits + gaussian, abs=0.1)
