"""Layers that send their inputs instead of their partial sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.codecs import Cast, TAHQuant
from lowbit.tensor_parallel import Calibration, calibrate, emulate_tensor_parallel_, model_sums
from lowbit.tensor_parallel.inputs import Slices, layers_with_inputs
from tests.tensor_parallel.models import INT8, Toy, calibrated, ids, logits, sequences
from tests.tensor_parallel.models import ONE as CODED

ATTENTION = ["layers.0.attn.o", "layers.1.attn.o"]


def made(inputs: Any, **options: Any) -> Calibration:
    return calibrate(Toy(), sequences(), ranks=2, inputs=inputs, **options)


def sums_of(calibration: Calibration) -> dict[str, list[Any]]:
    """By layer: the sum of the emulated ranks' partial sums, and what they take for it."""
    seen: dict[str, list[Any]] = {}
    model = Toy()

    def watch(layer: str, partials: Any, total: Any) -> None:
        seen.setdefault(layer, [torch.stack(list(partials)).sum(0), total])

    with emulate_tensor_parallel_(model, 2, calibration, settings=CODED, watch=watch):
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
    with emulate_tensor_parallel_(model, 2, calibration, settings=CODED) as emulation:
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
