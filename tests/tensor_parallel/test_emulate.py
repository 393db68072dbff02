"""Tensor parallelism in one process; that it is what real ranks do is in `test_ranks`. Encoders, and layers that send
their inputs instead of their partial sums.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowbit.codecs import Cast, GroupInt, TAHQuant
from lowbit.tensor_parallel import (
    Calibration,
    Drift,
    SumSettings,
    calibrate,
    emulate_tensor_parallel_,
    low_bit_,
    model_sums,
    tensor_parallel_,
)
from lowbit.tensor_parallel.inputs import Slices, layers_with_inputs
from lowbit.tensor_parallel.plan import ENCODERS, is_row, plan_of
from tests.processes import Ranks
from tests.refused import refused
from tests.tensor_parallel.models import INT8, LAYERS, ONE, VOCAB, WIDTH, Toy, calibrated, ids, logits, sequences


def encoder(kind: str, heads: int = 4) -> Any:
    """A tiny encoder with random weights."""
    from transformers import AutoConfig, AutoModel

    sizes = {"vocab_size": 61, "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    if kind == "distilbert":
        sizes |= {"dim": 32, "n_layers": 2, "n_heads": heads, "hidden_dim": 64}
    else:
        sizes |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": heads, "intermediate_size": 64}
    if kind == "electra":
        sizes["embedding_size"] = 32
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).eval()


@torch.no_grad()
def hidden(model: nn.Module) -> torch.Tensor:
    return model(torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))).last_hidden_state


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_on_emulated_ranks_computes_what_it_does_whole(kind: str):
    model = encoder(kind)
    whole = hidden(model)
    assert len(model_sums(model)) == 4
    columns = [name for name, (_, style) in plan_of(model).items() if not is_row(style)]
    assert len(columns) == (10 if kind == "nomic_bert" else 8)
    with emulate_tensor_parallel_(model, 4):
        torch.testing.assert_close(hidden(model), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_real_ranks_give_the_bits_of_emulated_ones(kind: str, ranks: Ranks):
    model = encoder(kind)
    with emulate_tensor_parallel_(model, 2):
        expected = hidden(model)
    for got in ranks.run(encoded, kind, ranks=2, timeout=60):
        assert torch.equal(torch.tensor(got), expected)


def encoded(kind: str) -> Any:
    return hidden(tensor_parallel_(encoder(kind))).tolist()


def test_row_wise_layers_are_those_of_the_plan():
    assert list(model_sums(Toy())) == LAYERS
    assert list(model_sums(Toy(), {"layers.1.attn.o": "rowwise"})) == ["layers.1.attn.o"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_sums_that_are_not_coded_differ_by_roundings_only(ranks: int):
    model = Toy()
    full = logits(model, ids())
    with emulate_tensor_parallel_(model, ranks):
        torch.testing.assert_close(logits(model, ids()), full, rtol=1e-5, atol=1e-5)
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
            found = traffic.plain - size, traffic.coded  # without the embedding's
            assert found == ((values, 0) if equal else (0, values))
            assert traffic.bits_per_value == pytest.approx(32 if equal else bits)
            assert traffic.other_bytes == ids().numel() * VOCAB * 4 // 2  # of the gathered logits
    logits(model, ids())  # no longer watched
    assert (traffic.coded, traffic.share_coded) == (values, len(LAYERS) / (len(LAYERS) + 1))
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


def test_what_does_not_fit_is_refused():
    """Also settings of sums, of drift, and of the codec of inputs."""
    never: Any = "never"
    model, shared, calibration = Toy(), Toy(), calibrated()
    shared.config = Config()  # pyright: ignore[reportAttributeAccessIssue]

    def emulated(ranks: int = 2, *args: Any, model: nn.Module = model, **options: Any) -> Any:
        return lambda: emulate_tensor_parallel_(model, ranks, *args, **options)

    def planned(**plan: str) -> Any:
        return emulated(plan={name.replace("__", "."): style for name, style in plan.items()})

    refused(
        (emulated(model=Split()), ValueError, "Split has no tensor-parallel plan; allowed: .*Llama"),
        (planned(head="colwise"), ValueError, "no module of Toy is row-wise parallel"),
        (planned(head="sequence_parallel"), ValueError, "head has the style 'sequence_parallel'; allowed: colwise"),
        (planned(head="moe_tp_experts"), ValueError, "head has the style 'moe_tp_experts' and is a Linear"),
        (emulated(plan={"layers.*.first": "rowwise"}), ValueError, "layers.0.first is LayerNorm; allowed .*nn.Linear"),
        (emulated(0), ValueError, "ranks is 0"),
        (emulated(4, calibration), ValueError, "for 2 ranks, this is a group of 4"),
        (emulated(4, calibration.codec(LAYERS[0])), ValueError, "for 2 ranks and 64 .*; layers.0.attn.o has 4 ranks"),
        (emulated(4, model=shared), ValueError, "ranks is 4 and the model has num_key_value_heads 2"),
        (emulated(3, model=encoder("bert")), ValueError, "ranks is 3 and the model has num_attention_heads 4"),
        (emulated(2, GroupInt(bits=4), drift=Drift()), TypeError, "codec is GroupInt.*; allowed: a FeatureInt"),
        (lambda: Drift(threshold=0.5), ValueError, "threshold is 0.5; allowed: a number of at least 1"),
        (lambda: Drift(every=0), ValueError, "every is 0"),
        (lambda: SumSettings(small=never), ValueError, "small is 'never'; allowed: 'auto'"),
        (lambda: Slices(codec=INT8, width=10, world=4), ValueError, "width is 10; allowed: a multiple of the 4 ranks"),
        (lambda: low_bit_(Toy(), INT8), ValueError, "no module of Toy adds up partial sums of real ranks"),
    )
    with emulate_tensor_parallel_(model, 2), pytest.raises(RuntimeError, match="inference only"):
        model(ids())
    assert not any("forward" in vars(module) for module in model.modules())


ATTENTION = ["layers.0.attn.o", "layers.1.attn.o"]


def made(inputs: Any, **options: Any) -> Calibration:
    return calibrate(Toy(), sequences(), ranks=2, inputs=inputs, **options)


def sums_of(calibration: Calibration) -> dict[str, list[Any]]:
    """By layer: the sum of the emulated ranks' partial sums, and what they take for it."""
    seen: dict[str, list[Any]] = {}
    model = Toy()

    def watch(layer: str, partials: Any, total: Any) -> None:
        seen.setdefault(layer, [torch.stack(list(partials)).sum(0), total])

    with emulate_tensor_parallel_(model, 2, calibration, settings=ONE, watch=watch):
        logits(model, ids())
    return seen


def test_layers_send_inputs_with_a_tenth_of_the_error():
    coded, sent = sums_of(calibrated()), sums_of(made(INT8))
    for layer in coded:
        errors = [float((total - exact).norm() / exact.norm()) for exact, total in (coded[layer], sent[layer])]
        if layer in ATTENTION:
            assert errors[1] < errors[0] / 10, (layer, errors)
        else:
            assert errors[1] > 0.01, (layer, errors)  # it has more inputs than outputs: its sums are coded
    assert list(sent) == list(coded)


def test_traffic_and_bits_are_those_of_inputs(tmp_path: Path):
    model, calibration = Toy(), made(INT8)
    with emulate_tensor_parallel_(model, 2, calibration, settings=ONE) as emulation:
        logits(model, ids())
    tokens, down = ids().numel(), calibration.codec("layers.0.mlp.down")
    assert emulation.traffic.coded_bytes == 2 * (INT8.nbytes((tokens * 32,)) + down.nbytes((tokens, 64)))
    assert calibration.bits_per_value(*ATTENTION) == INT8.bits_per_element((64 * 32,)) / 2
    calibration.save(tmp_path / "file")
    loaded = Calibration.load(tmp_path / "file")
    assert loaded.fingerprint() == calibration.fingerprint() != made(None).fingerprint()
    assert list(loaded.inputs_codecs().items()) == [(name, INT8) for name in ATTENTION]


def test_which_layers_may_send_inputs(caplog: pytest.LogCaptureFixture):
    sums = model_sums(Toy())
    assert list(layers_with_inputs(sums, 2, INT8, 4.3)) == ATTENTION  # MLPs have more inputs than outputs
    assert not layers_with_inputs(sums, 2, INT8, 4.1)  # more bits
    assert not layers_with_inputs(sums, 3, INT8, 8)  # 64 inputs cannot be divided
    assert list(layers_with_inputs(sums, 4, Cast(dtype=torch.bfloat16), 4.2)) == ATTENTION
    assert not made(Cast(dtype=torch.bfloat16)).inputs
    assert "no layer sends its inputs in Cast" in caplog.text


def test_a_budget_counts_inputs_and_needs_measured_effects():
    with_inputs = made(INT8, bits=4.6)
    assert with_inputs.bits_per_value() <= 4.6
    assert set(with_inputs.effects) == set(with_inputs.features) - set(ATTENTION)
    with pytest.raises(ValueError, match="were not measured; allowed: a calibration made for a budget"):
        made(None).within(5.0)


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
        with pytest.raises(ValueError, match=r"inputs is .*; allowed: None, GroupInt"):
            made(wrong)
