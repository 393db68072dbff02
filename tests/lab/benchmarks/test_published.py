import dataclasses

import pytest
import torch

from benchmarks.codecs import COMMAND, PublishedProcedure
from lowbit import kernels
from lowbit.codecs import TAHQuant
from lowbit.report import run
from lowbit_lab.bench.codecs import relative_error
from lowbit_lab.bench.samples import drawn

SHAPE = (2, 64, 1280)


def test_every_bit_is_counted():
    # 64 tiles a token, of which floor(0.2 * 64) = 12 have 3 bits; scale and zero; width flag; pivot flag and position.
    expected = 4 - 12 / 64 + 32 / 64 + 1 / 64 + 7 / 64
    assert PublishedProcedure().bits_per_element((1, 1024, 4096)) == expected
    # 204 of 1024 tokens, and one flag for 4096 elements.
    expected = 4 - 204 / 1024 + 32 / 64 + 1 / 4096 + 7 / 64
    assert PublishedProcedure(allocation="token").bits_per_element((1, 1024, 4096)) == expected


@pytest.mark.parametrize("allocation", ["tile", "token"])
@pytest.mark.parametrize("data", ["gaussian", "student-t", "outliers"])
def test_ours_at_the_same_settings_loses_no_more_and_sends_no_more(allocation: str, data: str):
    x = drawn(data, SHAPE)
    theirs = PublishedProcedure(allocation=allocation)
    ours = dataclasses.replace(TAHQuant.published(), allocation=allocation)
    with kernels.backend("reference"):
        error = relative_error(x, ours.round_trip(x))
    assert error < relative_error(x, theirs.round_trip(x))
    assert ours.bits_per_element(SHAPE) < theirs.bits_per_element(SHAPE)


def test_tiles_and_tokens_of_low_entropy_have_eight_levels():
    x = torch.rand(1, 1, 640) + 1
    x[..., 64:192] *= torch.linspace(0.01, 1, 64).repeat(2)  # unequal magnitudes: the two tiles of least entropy
    tiles = PublishedProcedure().round_trip(x)[0, 0].split(64)
    tokens = PublishedProcedure(allocation="token").round_trip(x.view(1, 10, 64))[0]
    for parts in (tiles, tokens):
        assert [len(part.unique()) <= 8 for part in parts] == [i in (1, 2) for i in range(10)]


def test_a_pivot_does_not_coarsen_its_neighbours():
    x = drawn("gaussian", (1, 1, 64))
    x[0, 0, 40] = 100
    with_pivot = PublishedProcedure().round_trip(x)
    without = PublishedProcedure(pivot_ratio=1e9).round_trip(x)
    others = torch.arange(64) != 40
    assert relative_error(x[..., others], with_pivot[..., others]) < 0.3
    assert relative_error(x[..., others], without[..., others]) > 0.9


def test_the_receiver_has_rounded_scales():
    x = torch.linspace(0, 10, 64).view(1, 1, 64)
    assert PublishedProcedure().round_trip(x).max() == 15 * torch.tensor(10 / 15).half().float()


def test_edge_values_survive():
    for value in (0.0, 3.0):
        x = torch.full((1, 2, 64), value)
        assert torch.equal(PublishedProcedure().round_trip(x), x)


def test_what_it_cannot_code_is_refused():
    with pytest.raises(ValueError, match=r"channels is 100; allowed: multiples of the tile, 64"):
        PublishedProcedure().round_trip(torch.zeros(1, 2, 100))
    with pytest.raises(ValueError, match="allocation is 'range'"):
        PublishedProcedure(allocation="range")


def test_the_benchmark_measures_its_errors_and_not_its_speed():
    settings = COMMAND.settings(
        codecs=("published-procedure",), dtypes=("float32",), data=("gaussian",), threads=(1,), shape=(1, 4, 64)
    )
    (row,) = run(COMMAND, settings).rows
    assert 0 < row["relative_error"] < 0.2
    assert "encode_gb_s" not in row
