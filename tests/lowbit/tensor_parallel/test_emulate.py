"""Tensor parallelism in one process; that it is what real ranks do is in `test_ranks`. Encoders, and layers that send
their inputs instead of their partial sums.
"""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.codecs import Cast, GroupInt, TAHQuant
from lowbit.tensor_parallel import (
    Calibration,
    Drift,
    SumSettings,
    emulate_tensor_parallel_,
    low_bit_,
    model_sums,
    tensor_parallel_,
)
from lowbit.tensor_parallel.inputs import Slices, layers_with_inputs
from lowbit.tensor_parallel.plan import ENCODERS, is_row, plan_of
from tests.lowbit.tensor_parallel.models import (
    INT8,
    LAYERS,
    ONE,
    VOCAB,
    WIDTH,
    Toy,
    calibrated,
    ids,
    logits,
    randomized,
    sums_of,
)
from tests.processes import on_ranks
from tests.refused import refused


def encoder(kind: str) -> Any:
    """A tiny encoder with random weights."""
    from transformers import AutoConfig, AutoModel

    sizes = {
        "vocab_size": 61, "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "hidden_dim": 64, "embedding_size": 32,
    }  # fmt: skip
    return randomized(AutoModel.from_config(AutoConfig.for_model(kind, **sizes)))


@torch.no_grad()
def hidden(model: nn.Module) -> torch.Tensor:
    return model(torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))).last_hidden_state


@pytest.mark.parametrize("kind", ENCODERS)
@on_ranks
def test_an_encoder_computes_the_same_whole_and_on_emulated_and_real_ranks(kind: str) -> None:
    model = encoder(kind)
    whole = hidden(model)
    assert len(model_sums(model)) == 4
    columns = [name for name, (_, style) in plan_of(model).items() if not is_row(style)]
    assert len(columns) == (10 if kind == "nomic_bert" else 8)
    with emulate_tensor_parallel_(model, 4):
        torch.testing.assert_close(hidden(model), whole, rtol=1e-4, atol=1e-5)
    with emulate_tensor_parallel_(model, 2):
        emulated = hidden(model)
    assert torch.equal(hidden(tensor_parallel_(model)), emulated)


def test_row_wise_layers_are_those_of_the_plan():
    assert list(model_sums(Toy())) == LAYERS
    assert list(model_sums(Toy(), {"layers.1.attn.o": "rowwise"})) == ["layers.1.attn.o"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_sums_that_are_not_coded_differ_by_roundings_only_and_their_model_is_not_copied(ranks: int):
    """A copy would compute with the original's weights."""
    model = Toy()
    full = logits(model, ids())
    with emulate_tensor_parallel_(model, ranks):
        torch.testing.assert_close(logits(model, ids()), full, rtol=1e-5, atol=1e-5)
        with pytest.raises(RuntimeError, match=r"cannot be copied; allowed: a copy before, or after remove\(\)"):
            copy.deepcopy(model)
    assert torch.equal(logits(model, ids()), full)
    assert torch.equal(logits(copy.deepcopy(model), ids()), full)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_sums_are_coded_as_defined(algorithm: Any):
    """Against plain tensor arithmetic: each rank's part coded, added up, and for two_shot coded again."""
    settings = SumSettings(small=0, algorithm=algorithm)
    name, partials, summed = sums_of(calibrated(), ids(), settings=settings)[1]
    codec = calibrated().codec(name)
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
    for small, coded, bits in ((size + 1, 0, 32), (size, values, (codec.bits_per_element((size,)) * 4 + 32) / 5)):
        with emulate_tensor_parallel_(model, 2, codec, settings=SumSettings(small=small)) as emulation:
            assert torch.equal(logits(model, ids()), full) == (not coded)
        logits(model, ids())  # no longer watched
        traffic = emulation.traffic
        assert (traffic.coded, traffic.plain) == (coded, size + values - coded)  # the embedding's is never coded
        assert traffic.bits_per_value == pytest.approx(bits)
        assert traffic.share_coded == coded / (size + values)
        assert traffic.other_bytes == ids().numel() * VOCAB * 4 // 2  # of the gathered logits
    with emulate_tensor_parallel_(model, 2, Cast(dtype=torch.float32), settings=ONE):
        assert torch.equal(logits(model, ids()), full)

    def taken(ranks: int, rows: int) -> str:
        return SumSettings(small=0).choice(torch.empty(rows, WIDTH), ranks, GroupInt(bits=4))

    assert taken(2, 1 << 15) == taken(4, 1 << 4) == "one_shot"
    assert taken(4, 1 << 15) == "two_shot"
    assert SumSettings().choice(torch.empty(1, WIDTH), 4, GroupInt(bits=4)) == "plain"


def test_weights_may_change_meanwhile():
    model = Toy().requires_grad_(False)
    with emulate_tensor_parallel_(model, 2):
        logits(model, ids())
        model.get_parameter("layers.0.mlp.down.weight").mul_(2)
        results = logits(model, ids())
    torch.testing.assert_close(results, logits(model, ids()), rtol=1e-5, atol=1e-5)


def test_nan_shows_in_the_logits():
    model, tokens = Toy().requires_grad_(False), ids() % (VOCAB - 1)
    tokens[0, 3] = VOCAB - 1
    with emulate_tensor_parallel_(model, 2, calibrated(), settings=ONE):
        model.embed.weight[VOCAB - 1] = torch.nan
        results = logits(model, tokens)
    assert results[0, 3:].isnan().all()
    assert not results[1].isnan().any()


def test_row_wise_modules_may_be_fed_the_whole_input():
    """As Phi-3's, whose gate and up are one matrix."""
    model, x = nn.Sequential(nn.Linear(8, 12), nn.GLU(), nn.Linear(6, 8)), torch.randn(3, 8)
    plan = {"0": "colwise_gather_output", "2": "rowwise_split_input"}
    with torch.no_grad():
        full = model(x)
        with emulate_tensor_parallel_(model, 2, plan=plan):
            torch.testing.assert_close(model(x), full)


def test_what_does_not_fit_is_refused():
    """Also settings of sums, of drift, and of the codec of inputs."""
    never: Any = "never"
    model, shared, calibration = Toy(), Toy(), calibrated()
    formats = calibration.codec(LAYERS[0]), "int8", TAHQuant()
    vars(shared)["config"] = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)

    def emulated(ranks: int = 2, *args: Any, model: nn.Module = model, **options: Any) -> Any:
        return lambda: emulate_tensor_parallel_(model, ranks, *args, **options)

    def planned(**plan: str) -> Any:
        return emulated(plan={name.replace("__", "."): style for name, style in plan.items()})

    refused(
        (emulated(model=nn.GLU()), ValueError, "GLU has no tensor-parallel plan; allowed: .*Llama"),
        (planned(head="colwise"), ValueError, "no module of Toy is row-wise parallel"),
        (planned(head="sequence_parallel"), ValueError, "head has the style 'sequence_parallel'; allowed: colwise"),
        (planned(head="moe_tp_experts"), ValueError, "head has the style 'moe_tp_experts' and is a Linear"),
        (emulated(plan={"layers.*.first": "rowwise"}), ValueError, "layers.0.first is LayerNorm; allowed .*nn.Linear"),
        (emulated(0), ValueError, "ranks is 0"),
        (emulated(4, calibration), ValueError, "for 2 ranks, this is a group of 4"),
        (emulated(4, formats[0]), ValueError, "for 2 ranks and 64 .*; layers.0.attn.o has 4 ranks"),
        (emulated(4, model=shared), ValueError, "ranks is 4 and the model has num_key_value_heads 2"),
        (emulated(3, model=encoder("bert")), ValueError, "ranks is 3 and the model has num_attention_heads 4"),
        (emulated(2, GroupInt(bits=4), drift=Drift()), TypeError, "codec is GroupInt.*; allowed: a FeatureInt"),
        (lambda: Drift(threshold=0.5), ValueError, "threshold is 0.5; allowed: a number of at least 1"),
        (lambda: Drift(every=0), ValueError, "every is 0"),
        (lambda: SumSettings(small=never), ValueError, "small is 'never'; allowed: 'auto'"),
        (lambda: Slices(codec=INT8, width=10, world=4), ValueError, "width is 10; allowed: a multiple of the 4 ranks"),
        (lambda: low_bit_(Toy(), INT8), ValueError, "no module of Toy adds up partial sums of real ranks"),
        (lambda: calibration.within(5.0), ValueError, "were not measured; allowed: a calibration made for a budget"),
        *(
            (partial(calibrated, inputs=x), ValueError, "inputs is .*; allowed: 'auto', None, GroupInt")
            for x in formats
        ),
    )
    with emulate_tensor_parallel_(model, 2), pytest.raises(RuntimeError, match="inference only"):
        model(ids())
    assert not any("forward" in vars(module) for module in model.modules())


ATTENTION = ["layers.0.attn.o", "layers.1.attn.o"]


def test_layers_send_inputs_with_a_tenth_of_the_error():
    coded, sent = (
        {layer: float((total - parts.sum(0)).norm() / parts.sum(0).norm()) for layer, parts, total in sums_of(c, ids())}
        for c in (calibrated(), calibrated(inputs=INT8))
    )
    assert list(sent) == list(coded) == LAYERS
    for layer, error in sent.items():
        if layer in ATTENTION:
            assert error < coded[layer] / 10, (layer, sent, coded)
        else:
            assert error > 0.01, (layer, sent)  # it has more inputs than outputs: its sums are coded


def test_traffic_bits_and_budgets_are_those_of_inputs(tmp_path: Path):
    model, calibration = Toy(), calibrated(inputs=INT8)
    with emulate_tensor_parallel_(model, 2, calibration, settings=ONE) as emulation:
        logits(model, ids())
    tokens, down = ids().numel(), calibration.codec("layers.0.mlp.down")
    assert emulation.traffic.coded_bytes == 2 * (INT8.nbytes((tokens * 32,)) + down.nbytes((tokens, 64)))
    assert calibration.bits_per_value(*ATTENTION) == INT8.bits_per_element((64 * 32,)) / 2
    calibration.save(tmp_path / "file")
    loaded = Calibration.load(tmp_path / "file")
    assert loaded.fingerprint() == calibration.fingerprint() != calibrated().fingerprint()
    assert list(loaded.inputs_codecs().items()) == [(name, INT8) for name in ATTENTION]
    budget = calibrated(inputs=INT8, bits=4.6)
    assert budget.bits_per_value() <= 4.6
    assert set(budget.effects) == set(budget.features) - set(ATTENTION)


def test_which_layers_may_send_inputs(caplog: pytest.LogCaptureFixture):
    sums = model_sums(Toy())
    assert list(layers_with_inputs(sums, 2, INT8, 4.3)) == ATTENTION  # MLPs have more inputs than outputs
    assert not layers_with_inputs(sums, 2, INT8, 4.1)  # more bits
    assert not layers_with_inputs(sums, 3, INT8, 8)  # 64 inputs cannot be divided
    assert list(layers_with_inputs(sums, 4, Cast(dtype=torch.bfloat16), 4.2)) == ATTENTION
    assert not calibrated(inputs=Cast(dtype=torch.bfloat16)).inputs
    assert "no layer sends its inputs in Cast" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_slices_put_side_by_side_what_the_ranks_hold(dtype: torch.dtype, world: int):
    codec = Slices(codec=Cast(dtype=torch.float32), width=16, world=world)
    whole = torch.randn(5, 16).to(dtype)
    own = torch.eye(world, dtype=torch.bool).repeat_interleave(16 // world, 1)
    parts = torch.where(own[:, None], whole, 0)
    payloads = [codec.part(rank).encode(part.view(-1)) for rank, part in enumerate(parts)]
    assert {payload.numel() for payload in payloads} == {4 * 5 * 16 // world}
    out = torch.full((80,), torch.nan, dtype=dtype)
    assert torch.equal(codec.sum(payloads, out=out), whole.view(-1))
    assert torch.equal(codec.part(world - 1).decode(payloads[-1], shape=(80,), dtype=dtype), parts[-1].view(-1))
    assert len({codec.part(rank).identity() for rank in range(world)}) == 1
