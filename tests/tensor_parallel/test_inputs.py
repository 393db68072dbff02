"""Layers that send their inputs instead of their partial sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowbit.codecs import Cast, GroupInt, TAHQuant
from lowbit.tensor_parallel import (
    LowBitRowwiseParallel,
    SumSettings,
    emulate_tensor_parallel_,
    low_bit_,
    tensor_parallel_,
)
from lowbit.tensor_parallel.inputs import Slices, slices_for
from tests.processes import Ranks
from tests.tensor_parallel.models import Toy, calibrated, ids, logits

INT8 = GroupInt(bits=8, group=32, symmetric=True)
EXACT = SumSettings(small=0, inputs=Cast(dtype=torch.float32))
SETTINGS = SumSettings(small=0, inputs=INT8)


def sums_of(settings: SumSettings, codec: Any = None) -> dict[str, list[Any]]:
    """By layer: the emulated ranks' partial sums and their sum."""
    seen: dict[str, list[Any]] = {}
    model = Toy()

    def watch(layer: str, partials: Any, total: Any) -> None:
        seen.setdefault(layer, [torch.stack(list(partials)).sum(0), total])

    with emulate_tensor_parallel_(model, 2, codec or calibrated(), settings=settings, watch=watch):
        logits(model, ids())
    return seen


def test_only_layers_that_are_not_wider_inside_send_inputs_and_their_error_is_a_tenth():
    coded, sent = sums_of(SumSettings(small=0)), sums_of(SETTINGS)
    for layer in ("layers.0.attn.o", "layers.0.mlp.down"):
        (exact, by_sums), (_, by_inputs) = coded[layer], sent[layer]
        errors = [float((total - exact).norm() / exact.norm()) for total in (by_sums, by_inputs)]
        if layer.endswith("attn.o"):
            assert errors[1] < errors[0] / 10, errors
        else:
            assert errors[1] > 0.01, errors  # it has 101 inputs: its sums are coded
    assert list(sent) == list(coded)


def test_exact_inputs_give_the_exact_sum():
    exact, total = sums_of(EXACT, Cast(dtype=torch.float32))["layers.0.attn.o"]
    torch.testing.assert_close(total, exact, rtol=1e-5, atol=1e-6)


def test_traffic_counts_the_bytes_of_inputs():
    model, calibration = Toy(), calibrated()
    with emulate_tensor_parallel_(model, 2, calibration, settings=SETTINGS) as emulation:
        logits(model, ids())
    tokens = ids().numel()
    down = calibration.codec("layers.0.mlp.down").nbytes((tokens, 64))
    assert emulation.traffic.coded_bytes == 2 * (INT8.nbytes((tokens * 32,)) + down)


def test_which_layers_send_inputs():
    square, narrow = nn.Linear(64, 64), nn.Linear(128, 64)
    assert slices_for(square, 2, INT8, GroupInt(bits=4, group=64)) is not None
    assert slices_for(narrow, 2, INT8, GroupInt(bits=8, group=64)) is None  # more products than the sum saves
    assert slices_for(square, 2, Cast(dtype=torch.bfloat16), GroupInt(bits=4, group=64)) is None  # more bytes
    assert slices_for(square, 4, Cast(dtype=torch.bfloat16), GroupInt(bits=4, group=64)) is not None
    assert slices_for(square, 3, INT8, GroupInt(bits=8, group=64)) is None  # does not divide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_slices_put_side_by_side_what_the_ranks_hold(dtype: torch.dtype, world: int):
    codec = Slices(codec=Cast(dtype=torch.float32), width=16, world=world)
    whole = torch.randn(5, 16).to(dtype)
    parts = torch.zeros(world, 5, 16, dtype=dtype)
    for rank, part in enumerate(parts):
        size = 16 // world
        part[:, rank * size : (rank + 1) * size] = whole[:, rank * size : (rank + 1) * size]
    payloads = [codec.part(rank).encode(part.view(-1)) for rank, part in enumerate(parts)]
    assert {payload.numel() for payload in payloads} == {4 * 5 * 16 // world}
    out = torch.full((80,), torch.nan, dtype=dtype)
    assert torch.equal(codec.sum(payloads, out=out), whole.view(-1))
    assert torch.equal(codec.part(world - 1).decode(payloads[-1], shape=(80,), dtype=dtype), parts[-1].view(-1))
    assert len({codec.part(rank).identity() for rank in range(world)}) == 1


def test_bad_formats_get_one_clear_line():
    for wrong in (calibrated().codec("layers.0.attn.o"), "int8", TAHQuant()):
        with pytest.raises(ValueError, match=r"inputs is .*; allowed: None, or a format for any number of elements"):
            SumSettings(inputs=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="width is 10; allowed: a multiple of the 4 ranks"):
        Slices(codec=INT8, width=10, world=4)
    with pytest.raises(ValueError, match=r"settings.inputs is .*; allowed here: None"):
        LowBitRowwiseParallel(INT8, settings=SETTINGS)


def test_it_is_said_that_no_layer_sends_inputs(caplog: pytest.LogCaptureFixture):
    settings = SumSettings(small=0, inputs=Cast(dtype=torch.float32))
    emulate_tensor_parallel_(Toy(), 2, calibrated(), settings=settings).remove()
    assert "no layer sends its inputs in Cast" in caplog.text


def compiled_on_ranks() -> dict[str, Any]:
    model = tensor_parallel_(Toy())
    whole = logits(model, ids())
    with low_bit_(model, INT8, settings=SETTINGS):
        eager = logits(model, ids())
        graph = logits(torch.compile(model, fullgraph=True), ids())
        with pytest.raises(RuntimeError, match="for inference only"):
            model(ids())
    return {"eager": eager, "graph": graph, "whole": whole, "after": logits(model, ids())}


def test_ranks_compile_without_a_break_and_leave_no_trace(ranks: Ranks):
    results = ranks.run(compiled_on_ranks, ranks=2)
    for result in results:
        assert torch.equal(result["eager"], results[0]["eager"])
        torch.testing.assert_close(result["graph"], result["eager"], rtol=1e-4, atol=1e-4)
        assert torch.equal(result["whole"], result["after"])
        assert not torch.equal(result["whole"], result["eager"])
