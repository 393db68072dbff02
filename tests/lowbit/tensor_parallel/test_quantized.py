"""Row-wise layers with quantized weights on real ranks: found by what they return, calibrated, coded and counted."""

from typing import Any

import pytest
import torch
from torch import nn

from lowbit.tensor_parallel import calibrate, emulate_tensor_parallel_
from tests.lowbit.tensor_parallel.models import WIDTH, ids, llama, on_a_rank, randomized, sequences
from tests.lowbit.tensor_parallel.moe import cut
from tests.processes import Ranks


def quantize(module: nn.Module, name: str) -> None:
    """Quantize a layer's weights, or all layers', in place, by torchao's configuration of this name."""
    torchao = pytest.importorskip("torchao.quantization")
    int4 = {"weight_dtype": torch.int4, "granularity": torchao.PerGroup(16)}
    torchao.quantize_(module, getattr(torchao, f"{name}Config")(**int4 if name.startswith("Intx") else {}))


def on_real_ranks(name: str) -> dict[str, Any]:
    """With a Llama as Transformers loads it with a `TorchAoConfig`: each rank quantizes its part of a weight."""
    model = cut(randomized(llama(inner=96, key_value_heads=4)))
    for key, module in model.named_modules():
        if isinstance(module, nn.Linear) and key != "lm_head":
            module.weight = nn.Parameter(module.weight.to_local().clone(), requires_grad=False)
            quantize(module, name)
            module._hf_quantized_needs_local_tp = True
    calibration = calibrate(model, sequences())
    return on_a_rank(model, calibration) | {"fingerprint": calibration.fingerprint()}


INT8 = "Int8WeightOnly"


@pytest.mark.parametrize(
    ("name", "count"),
    [(INT8, 2), (INT8, 4), ("Int8DynamicActivationInt8Weight", 2), ("IntxWeightOnly", 2), ("Float8WeightOnly", 2)],
)
def test_quantized_layers_are_coded_and_counted(ranks: Ranks, name: str, count: int):
    pytest.importorskip("torchao.quantization")
    results = ranks.run(on_real_ranks, name, ranks=count)
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")]
    for real in results:
        assert list(real["errors"]) == layers
        assert max(real["errors"].values()) <= 1, real["errors"]
        assert real["fingerprint"] == results[0]["fingerprint"]
        assert torch.equal(real["coded"], results[0]["coded"])
        values = ids().numel() * WIDTH
        assert (real["traffic"].coded, real["traffic"].plain) == (len(layers) * values, values)


def test_quantized_weights_in_one_process_are_refused_by_name():
    model = llama()
    quantize(model.model.layers[1], INT8)
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_proj has quantized weights \(Int8Tensor\)"):
        emulate_tensor_parallel_(model, 2)
