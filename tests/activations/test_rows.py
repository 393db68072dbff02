"""`WithRows`, and norms of models whose sinks it keeps exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.activations.formats import WithRows, count_of, finer, outliers_and_rest
from lowbit.activations.policy import _error_of_groups
from lowbit.codecs import GroupInt
from tests.activations.models import gradients, saved_bytes

CHANNELS = 128
INT8 = GroupInt(bits=8)


def with_sinks(*places: int, rows: int = 256) -> Tensor:
    x = torch.randn(2, rows // 2, CHANNELS, generator=torch.Generator().manual_seed(0))
    for place in places:
        x.view(-1, CHANNELS)[place, 5] = 3000.0
    return x


@pytest.mark.parametrize("inner", [INT8, finer(INT8)], ids=["int8", "finer"])
@pytest.mark.parametrize("places", [(0,), (3, 200), (255,)])
def test_outlier_tokens_are_exact_wherever_they_stand(inner: Any, places: tuple[int, ...]):
    codec, x = WithRows(inner=inner), with_sinks(*places)
    y = codec.decode(codec.encode(x), shape=x.shape)
    for place in places:
        assert torch.equal(y.view(-1, CHANNELS)[place], x.view(-1, CHANNELS)[place])
    assert float((y - x).abs().max()) < 0.03
    total = codec.decode(codec.encode(x), shape=x.shape, out=x.clone(), accumulate=True)
    torch.testing.assert_close(total, x + y)


def test_bytes_follow_from_the_shape_alone():
    codec = WithRows(inner=INT8)
    assert [count_of((rows, 8)) for rows in (0, 1, 15, 16, 128, 129)] == [0, 0, 0, 1, 1, 2]
    assert count_of((1000,)) == 0
    for x in (
        with_sinks(),
        with_sinks(1, 2, 3),
        torch.zeros(2, 128, CHANNELS),
        torch.full((2, 128, CHANNELS), torch.nan),
    ):
        assert len(codec.encode(x)) == codec.nbytes(x.shape) == INT8.nbytes(x.shape) + 16 + 2 * 4 * CHANNELS


def test_nan_in_a_token_stays_in_it():
    x = with_sinks(0)
    x[1, 7, 9] = torch.nan
    y = WithRows(inner=INT8).round_trip(x)
    assert y.isnan().sum() == 1
    assert bool(y[1, 7, 9].isnan())


def test_outliers_are_found_by_their_norm():
    assert outliers_and_rest(with_sinks(100))[0]
    assert len(outliers_and_rest(with_sinks(100))[1]) == 254
    for none in (with_sinks(), with_sinks(0)[:1, :1], torch.ones(2, 64, CHANNELS), torch.full((64, 8), torch.nan)):
        assert not outliers_and_rest(none)[0]


def test_kernels_write_the_payload_of_the_format():
    codec, x = WithRows(inner=INT8), with_sinks(0, 130)
    payload = torch.full((codec.nbytes(x.shape),), 7, dtype=torch.uint8)
    INT8.encode(x, out=codec.inner_of(payload, x.shape))
    codec.keep(x, payload)
    assert torch.equal(payload, codec.encode(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_gradients_of_a_norm_with_a_sink(norm: Any, dtype: torch.dtype):
    """The fused kernels, and apart from them the tokens that are kept: as by PyTorch at the rounded input."""
    torch.manual_seed(1)
    model = nn.Sequential(norm(CHANNELS), nn.Linear(CHANNELS, 24)).to(dtype)
    with torch.no_grad():
        model[0].weight.normal_()
    ours, x = copy.deepcopy(model), with_sinks(0, 130).to(dtype).requires_grad_()
    compress_saved_(ours, LayerAware(outliers=True))
    weights = torch.randn(2, 128, 24, generator=torch.Generator().manual_seed(3))
    with saved_bytes(ours) as saved:
        ours(x)
    codec = WithRows(inner=INT8)
    assert saved[torch.uint8] == codec.nbytes(x.shape)
    found, expected, rounded = {}, {}, codec.round_trip(x.detach().float()).to(dtype).requires_grad_()
    for module, given, grads in ((ours, x, found), (model, rounded, expected)):
        grads |= gradients(module, (module(given) * weights).float().sum()) | {"x": given.grad}
    for name, grad in expected.items():
        apart = float((found[name] - grad).float().norm() / grad.float().norm())
        assert apart < (1e-5 if dtype == torch.float32 else 0.03), name


def test_a_sink_spoils_neither_the_bits_nor_the_weight_of_a_norm():
    x = with_sinks(0)
    assert _error_of_groups(x, 64) > 0.1  # it would take 12.75 bits for all tokens
    policy = LayerAware()
    assert policy.for_outliers("norm", INT8, x) == WithRows(inner=INT8)
    assert policy.for_outliers("norm", INT8, with_sinks()) == INT8
    assert policy.for_outliers("norm", GroupInt(bits=8, group=48), x[..., :100]) == GroupInt(bits=8, group=48)
    many = with_sinks()
    many[..., 5] = 300.0
    assert policy.for_outliers("norm", INT8, many) == finer(INT8)
