"""Tensor parallelism in one process; that it is what real ranks do is in `test_ranks`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowbit.codecs import Cast, GroupInt
from lowbit.tensor_parallel import (
    SumSettings,
    Traffic,
    emulate_tensor_parallel_,
    model_sums,
)
from tests.tensor_parallel.models import LAYERS, VOCAB, WIDTH, Toy, calibrated, ids, logits


def test_row_wise_layers_are_those_of_the_plan():
    assert list(model_sums(Toy())) == LAYERS
    assert list(model_sums(Toy(), {"layers.1.attn.o": "rowwise"})) == ["layers.1.attn.o"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_sums_that_are_not_coded_differ_by_roundings_only(ranks: int):
    model = Toy()
    full = logits(model, ids())
    with emulate_tensor_parallel_(model, ranks) as emulation:
        torch.testing.assert_close(logits(model, ids()), full, rtol=1e-5, atol=1e-5)
    assert emulation.ranks == ranks
    assert torch.equal(logits(model, ids()), full)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_with_low_bit_sums_is_not_copied():
    """A copy would compute with the original's weights."""
    model = Toy()
    message = r"cannot be copied; allowed: a copy before, or after remove\(\)"
    with emulate_tensor_parallel_(model, 2), pytest.raises(RuntimeError, match=message):
        copy.deepcopy(model)
    assert torch.equal(logits(copy.deepcopy(model), ids()), logits(model, ids()))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_sums_are_coded_as_defined(algorithm: Any):
    """Against plain tensor arithmetic: each rank's part coded, added up, and for two_shot coded again."""
    model = Toy()
    calibration = calibrated()
    name = "layers.0.mlp.down"
    codec, seen = calibration.codec(name), {}

    def watch(layer: str, partials: Any, total: Any) -> None:
        seen.setdefault(layer, ([p.clone() for p in partials], total))

    settings = SumSettings(small=0, algorithm=algorithm)
    with emulate_tensor_parallel_(model, 2, calibration, settings=settings, watch=watch):
        logits(model, ids())
    partials, summed = seen[name]
    total = sum(codec.part(rank).round_trip(partial) for rank, partial in enumerate(partials))
    assert 0.02 < (total - sum(partials)).norm() / total.norm() < 0.2
    if algorithm == "two_shot":
        total = codec.whole().round_trip(total)
    torch.testing.assert_close(summed, total, rtol=1e-6, atol=1e-7)


def test_small_sums_stay_in_the_dtype_and_any_codec_will_do():
    model = Toy()
    with emulate_tensor_parallel_(model, 2):
        full = logits(model, ids())
    size = ids().numel() * WIDTH
    codec, values = GroupInt(bits=4), size * len(LAYERS)
    bits = (codec.bits_per_element((size,)) * len(LAYERS) + 32) / (len(LAYERS) + 1)
    for settings, equal in ((SumSettings(small=size + 1), True), (SumSettings(small=size), False)):
        with emulate_tensor_parallel_(model, 2, codec, settings=settings) as emulation:
            assert torch.equal(logits(model, ids()), full) == equal
            traffic = emulation.traffic
            assert (traffic.plain, traffic.coded) == (
                (values + size, 0) if equal else (size, values)  # and the embedding's
            )
            assert traffic.bits_per_value == pytest.approx(32 if equal else bits)
            assert traffic.other_bytes == ids().numel() * VOCAB * 4 // 2  # of the gathered logits
    logits(model, ids())  # no longer watched
    assert (traffic.coded, traffic.share_coded) == (values, len(LAYERS) / (len(LAYERS) + 1))
    traffic.reset()
    assert traffic == Traffic()
    with emulate_tensor_parallel_(model, 2, Cast(dtype=torch.float32), settings=SumSettings(small=0)):
        assert torch.equal(logits(model, ids()), full)

    def taken(ranks: int, rows: int) -> str:
        return SumSettings(small=0).choice(torch.empty(rows, WIDTH), ranks, GroupInt(bits=4))

    assert taken(2, 1 << 15) == taken(4, 1 << 4) == "one_shot"
    assert taken(4, 1 << 15) == "two_shot"
    assert SumSettings().choice(torch.empty(1, WIDTH), 4, GroupInt(bits=4)) == "plain"


def test_weights_may_change_meanwhile():
    model = Toy()
    with emulate_tensor_parallel_(model, 2):
        logits(model, ids())
        with torch.no_grad():
            model.layers[0].mlp.down.weight.mul_(2)
        results = logits(model, ids())
    torch.testing.assert_close(results, logits(model, ids()), rtol=1e-5, atol=1e-5)


def test_nan_shows_in_the_logits():
    model = Toy()
    calibration = calibrated()
    tokens = ids() % (VOCAB - 1)
    tokens[0, 3] = VOCAB - 1
    with emulate_tensor_parallel_(model, 2, calibration, settings=SumSettings(small=0)):
        with torch.no_grad():
            model.embed.weight[VOCAB - 1] = torch.nan
        results = logits(model, tokens)
    assert results[0, 3:].isnan().all()
    assert not results[1].isnan().any()


class Split(nn.Module):
    """A module whose row-wise part is fed the whole input, as Phi-3's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.both, self.down = nn.Linear(8, 12), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def test_row_wise_modules_may_be_fed_the_whole_input():
    model, x = Split(), torch.randn(3, 8)
    plan = {"both": "colwise_gather_output", "down": "rowwise_split_input"}
    with torch.no_grad():
        full = model(x)
        with emulate_tensor_parallel_(model, 2, plan=plan):
            torch.testing.assert_close(model(x), full)


class Config:
    num_attention_heads, num_key_value_heads = 4, 2


def test_bad_input():
    model: Any = Toy()
    with pytest.raises(ValueError, match=r"Split has no tensor-parallel plan; allowed: .*Llama"):
        emulate_tensor_parallel_(Split(), 2)
    with pytest.raises(ValueError, match="no module of Toy is row-wise parallel"):
        emulate_tensor_parallel_(model, 2, plan={"head": "colwise"})
    with pytest.raises(ValueError, match="head has the style 'sequence_parallel'; allowed: colwise"):
        emulate_tensor_parallel_(model, 2, plan={"head": "sequence_parallel"})
    with pytest.raises(ValueError, match="head has the style 'moe_tp_experts' and is a Linear; allowed: colwise"):
        emulate_tensor_parallel_(model, 2, plan={"head": "moe_tp_experts"})
    with pytest.raises(ValueError, match=r"layers.0.first is LayerNorm; allowed .*nn.Linear"):
        emulate_tensor_parallel_(model, 2, plan={"layers.*.first": "rowwise"})
    with pytest.raises(ValueError, match="ranks is 0"):
        emulate_tensor_parallel_(model, 0)
    calibration = calibrated()
    with pytest.raises(ValueError, match="for 2 ranks, this is a group of 4"):
        emulate_tensor_parallel_(model, 4, calibration)
    with pytest.raises(ValueError, match="codec is for 2 ranks and 64 features; layers.0.attn.o has 4 ranks"):
        emulate_tensor_parallel_(model, 4, calibration.codec(LAYERS[0]))
    model.config = Config()
    with pytest.raises(ValueError, match="ranks is 4 and the model has num_key_value_heads 2"):
        emulate_tensor_parallel_(model, 4)
    del model.config
    with emulate_tensor_parallel_(model, 2), pytest.raises(RuntimeError, match="inference only"):
        model(ids())
    assert not any("forward" in vars(module) for module in model.modules())
