"""Saved activations and stored gradients of Megatron-Core's own layers, without CUDA."""

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

pytest.importorskip("megatron.core")

from benchmarks.megatron_layers import core, gpt, measured, passes, step, without_cuda
from lowbit.activations import LayerAware, compress_saved_, follow
from lowbit.gradients import GradientStorage
from tests.processes import Ranks, on_ranks

GELU = {"add_bias_linear": True, "gated_linear_unit": False, "activation_func": functional.gelu}
GELU |= {"normalization": "LayerNorm", "bias_activation_fusion": True}
FUSED = {"bias_activation_fusion": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes of this module alone."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@contextlib.contextmanager
def parallel(tensor: int) -> Iterator[Any]:
    """Megatron's groups, of `tensor` ranks each, and no CUDA."""
    state = core("parallel_state")
    state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    try:
        with without_cuda():
            yield state
    finally:
        state.destroy_model_parallel()


def alike(changes: dict[str, Any]) -> None:
    """Layers of Megatron and of PyTorch keep as much and err alike, with both policies."""
    with parallel(dist.get_world_size()):
        for layers in measured(**changes).values():
            (kept, size, error), (kept_alike, size_alike, error_alike) = layers["megatron"], layers["torch"]
            assert kept <= 1.01 * kept_alike
            assert size < size_alike or kept / size < 1.05 * kept_alike / size_alike
            assert 0.95 < error / error_alike < 1.05


@pytest.mark.parametrize(
    ("tensor", "changes"), [(1, {}), (1, FUSED), (2, {}), (2, FUSED), (2, {"sequence_parallel": True})]
)
def test_layers_keep_and_err_as_those_of_torch(ranks: Ranks, tensor: int, changes: dict[str, Any]):
    ranks.run(alike, changes, ranks=tensor)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        (FUSED, 0.6), (FUSED | {"add_bias_linear": True}, 0.6), (GELU, 0.6), (GELU | {"sequence_parallel": True}, 0.6),
        (FUSED | {"activation_func": functional.gelu}, 0.6), ({"num_query_groups": 2}, 0.6), (RECOMPUTED, 1.0),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, 0.7),
        (FUSED | {"activation_func": functional.gelu, "add_bias_linear": True}, 0.6),
    ],
)  # fmt: skip
@on_ranks
def test_gradients_are_exact_without_rounding(changes: dict[str, Any], share: float):
    """16 bits, and once undone."""
    with parallel(2):
        plain, ours = gpt(**changes), gpt(**changes)
        size, loss, expected = step(plain)
        compressed = compress_saved_(ours, LayerAware(bits=16))
        kept, same, gradients = step(ours)
        assert abs(loss - same) < 1e-5
        assert kept < share * size
        assert (gradients - expected).abs().max() < 1e-5 * expected.abs().max()
        compressed.remove()
        assert step(ours)[0] == size


@on_ranks
def test_fused_sums_of_gradients_get_the_rebuilt_input() -> None:
    """Megatron's fused sum of gradients into `main_grad`, whose kernel is for GPUs."""

    def kernel(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        main_grad += grad.t() @ x

    layers = core("tensor_parallel.layers")
    fused = SimpleNamespace(wgrad_gemm_accum_fp32=kernel)
    own = {"_grad_accum_fusion_available": True, "fused_weight_gradient_mlp_cuda": fused}
    with parallel(2), mock.patch.multiple(layers, create=True, **own):
        sums = []
        for bits in (None, 8):
            model = gpt(gradient_accumulation_fusion=True)
            for p in model.parameters():
                p.main_grad = torch.zeros_like(p)
            if bits:
                compress_saved_(model, LayerAware(bits=bits))
            passes(model)
            sums.append([p.main_grad for p in model.parameters() if p.grad is None])
        assert len(sums[0]) == 9
        for ours, expected in zip(*reversed(sums), strict=True):
            assert 0 < (ours - expected).norm() < 0.03 * expected.norm()
            with pytest.raises(TypeError, match=r"has a main_grad, .*; allowed: a model without that wrapper"):
                GradientStorage(model)


@on_ranks
def test_gates_that_megatron_compresses_and_frozen_weights_are_left_to_it() -> None:
    lines: list[str] = []
    follow.say_once.cache_clear()
    with parallel(2), mock.patch.object(logging.getLogger("lowbit.activations.follow"), "warning", lines.append):
        model = gpt(**FUSED, activation_func_fp8_input_store=True)
        for name, p in model.named_parameters():
            p.requires_grad_("linear_proj" not in name)
        compress_saved_(model)
        kept, _ = passes(model)
    assert model.decoder.layers[0].self_attention.linear_proj.weight.grad is None
    assert "gates that Megatron saves in FP8 or moves to the CPU are left to it" in lines
    assert kept > 0
