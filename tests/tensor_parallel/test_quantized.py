"""Row-wise layers with quantized weights on real ranks: found by what they return, calibrated, coded and counted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lowbit.tensor_parallel import calibrate, emulate_tensor_parallel_
from tests.processes import Ranks
from tests.tensor_parallel.models import WIDTH, ids, llama, on_a_rank, sequences


def config(name: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int8 and activations": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
        "int4": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(16)
        ),
        "fp8": lambda: quantization.Float8WeightOnlyConfig(),
    }[name]()


def quantized(name: str) -> Any:
    """A Llama as Transformers loads it with a `TorchAoConfig`: each rank quantizes its part of a weight."""
    quantize_ = pytest.importorskip("torchao.quantization").quantize_
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama().requires_grad_(False)
    model.config.intermediate_size, model.config.num_key_value_heads = 96, 4
    model = type(model)(model.config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
    for key, module in model.named_modules():
        if isinstance(module, nn.Linear) and key != "lm_head":
            module.weight = nn.Parameter(module.weight.to_local().clone(), requires_grad=False)
            quantize_(module, config(name))
            module._hf_quantized_needs_local_tp = True
    return model


def on_real_ranks(name: str) -> dict[str, Any]:
    model = quantized(name)
    calibration = calibrate(model, sequences())
    return on_a_rank(model, calibration) | {"fingerprint": calibration.fingerprint()}


@pytest.mark.parametrize(
    ("name", "count"), [("int8", 2), ("int8", 4), ("int8 and activations", 2), ("int4", 2), ("fp8", 2)]
)
def test_quantized_layers_are_coded_and_counted(ranks: Ranks, name: str, count: int):
    config(name)
    results = ranks.run(on_real_ranks, name, ranks=count)
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")]
    for real in results:
        assert list(real["errors"]) == layers
        assert max(real["errors"].values()) <= 1, real["errors"]
        assert real["fingerprint"] == results[0]["fingerprint"]
        assert torch.equal(real["coded"], results[0]["coded"])
        assert not torch.equal(real["coded"], real["engine"])
        assert torch.equal(real["again"], real["engine"])
        values = ids().numel() * WIDTH
        assert (real["traffic"].coded, real["traffic"].plain) == (len(layers) * values, values)


def test_quantized_weights_in_one_process_are_refused_by_name():
    quantization = pytest.importorskip("torchao.quantization")
    model = llama()
    quantization.quantize_(model.model.layers[1], config("int8"))
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_proj has quantized weights \(Int8Tensor\)"):
        emulate_tensor_parallel_(model, 2)
