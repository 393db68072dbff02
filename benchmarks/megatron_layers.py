"""Bytes that layers of Megatron-Core keep for backward, and errors of gradients, compared with `nn.Linear`.

    torchrun --nproc-per-node 2 -m benchmarks.megatron_layers

It needs Megatron-Core but no GPU: the CPU takes the place of Megatron's GPU. The second model has PyTorch's linear
layers, of this rank's sizes and with the same weights, and no fused gate.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import LayerAware, compress_saved_, counted

VOCABULARY, LENGTH, ROWS = 512, 128, 2
POLICIES = {"ours": LayerAware(), "published": LayerAware.published()}


def core(name: str) -> Any:
    """Import a module of Megatron-Core."""
    return importlib.import_module(f"megatron.core.{name}")


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Replace the GPU that Megatron's layers need by the CPU, and ignore the states of its random numbers."""
    layers, seeds = core("tensor_parallel"), core("tensor_parallel.random")
    tracker = mock.Mock(fork=contextlib.nullcontext)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(layers, "get_cuda_rng_tracker", return_value=tracker),
        mock.patch.object(seeds, "_get_all_rng_states", return_value=()),
        mock.patch.object(seeds, "_set_all_rng_states"),
        mock.patch.object(seeds, "_fork_rng", contextlib.nullcontext),
    ):
        yield


def gpt(*, linear: bool = False, **changes: Any) -> Any:
    """Make a Llama of Megatron's local layers, split over the tensor-parallel group; `linear`: PyTorch's linear."""
    tensor = core("parallel_state").get_tensor_model_parallel_world_size()
    settings: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 352, "num_attention_heads": 4,
        "tensor_model_parallel_size": tensor, "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "masked_softmax_fusion": False, "add_bias_linear": False,
        "bias_dropout_fusion": False, "gated_linear_unit": True, "activation_func": functional.silu,
        "normalization": "RMSNorm", "moe_token_dispatcher_type": "alltoall",
    }  # fmt: skip
    config = core("transformer.transformer_config").TransformerConfig(**settings | changes)
    spec = core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(normalization=config.normalization)
    norm = _norm(getattr(nn, config.normalization))  # PyTorch's, which Megatron's wrapper refuses for sequences
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    if linear:
        attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
        attention.linear_qkv = mlp.linear_fc1 = _column(tensor)
        attention.linear_proj = mlp.linear_fc2 = _row(tensor)
    block = core("transformer.transformer_block").TransformerBlockSubmodules(
        layer_specs=[spec] * config.num_layers, layer_norm=norm
    )
    torch.manual_seed(0)
    model = core("models.gpt").GPTModel(config, block, VOCABULARY, LENGTH, position_embedding_type="rope")
    if linear:
        model.output_layer = _column(tensor)(config.hidden_size, VOCABULARY)
    return model.train()


def _norm(kind: Any) -> Any:
    class MegatronNorm(kind):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
            super().__init__(hidden_size, eps=eps)
            for parameter in self.parameters():
                parameter.sequence_parallel = config.sequence_parallel

    return MegatronNorm


def _column(tensor: int) -> Any:
    enter = core("tensor_parallel").copy_to_tensor_model_parallel_region

    class ColumnLinear(nn.Linear):
        def __init__(self, inner: int, outer: int, **_: Any) -> None:
            super().__init__(inner, outer // tensor, bias=False)

        def forward(self, input: Tensor, **_: Any) -> Any:
            return super().forward(enter(input)), None

    return ColumnLinear


def _row(tensor: int) -> Any:
    leave = core("tensor_parallel").reduce_from_tensor_model_parallel_region

    class RowLinear(nn.Linear):
        def __init__(self, inner: int, outer: int, **_: Any) -> None:
            super().__init__(inner // tensor, outer, bias=False)

        def forward(self, input: Tensor) -> Any:
            return leave(super().forward(input)), None

    return RowLinear


def passes(model: Any) -> tuple[int, float]:
    """Run two passes; return the second one's bytes kept, without those of the loss, and its loss."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    given = (tokens, torch.arange(LENGTH).expand(ROWS, -1), mask)
    size, loss = 0, torch.zeros(())
    for _ in range(2):
        model.zero_grad()
        with counted(model) as kept:
            logits = model(*given)
        size = kept.total
        loss = core("tensor_parallel").vocab_parallel_cross_entropy(logits.float(), tokens).mean()
        loss.backward()
    return size, loss.item()


def step(model: Any) -> tuple[int, float, Tensor]:
    """Train a step; return bytes kept, the loss, and this rank's gradients."""
    return *passes(model), torch.cat([p.grad.flatten() for p in model.parameters()])


def measured(**changes: Any) -> dict[str, dict[str, tuple[int, int, float]]]:
    """Return bytes kept, plain bytes, and the gradients' error, by policy and linear layers ("megatron", "torch")."""
    with without_cuda():
        first, losses = gpt(**changes), []
        weights = {name: x for name, x in first.state_dict().items() if x is not None}
        like = changes | {"bias_activation_fusion": False, "sequence_parallel": False}
        found: dict[str, dict[str, tuple[int, int, float]]] = {policy: {} for policy in POLICIES}
        for name, make in (("megatron", partial(gpt, **changes)), ("torch", partial(gpt, linear=True, **like))):
            plain = make()
            plain.load_state_dict(weights, strict=False)
            size, loss, expected = step(plain)
            for policy, bits in POLICIES.items():
                model = make()
                model.load_state_dict(weights, strict=False)
                compress_saved_(model, bits)
                kept, same, gradients = step(model)
                losses += [loss, same]
                found[policy][name] = kept, size, float((gradients - expected).norm() / expected.norm())
        assert max(losses) - min(losses) < 1e-5, losses
        return found


def _distance(row: dict[str, tuple[int, int, float]]) -> float:
    return abs(row["megatron"][2] / row["torch"][2] - 1)


def _text(item: tuple[str, tuple[int, int, float]]) -> str:
    name, (kept, size, error) = item
    return f"| {name} {size / 1e6:.3f} MB, {kept / 1e6:.3f} kept ({kept / size:.1%}), error {error:.5f}"


def main() -> None:
    """Print a line for each layout and policy, for the rank whose error is furthest from that of PyTorch's layers."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    core("parallel_state").initialize_model_parallel(tensor_model_parallel_size=world)
    layouts: list[dict[str, Any]] = [{}, {"bias_activation_fusion": True}]
    layouts += [{"sequence_parallel": True}] if world > 1 else []
    for changes in layouts:
        of_ranks: list[Any] = [None] * world
        dist.all_gather_object(of_ranks, measured(**changes))
        for policy in POLICIES:
            row = max((found[policy] for found in of_ranks), key=_distance)
            if not dist.get_rank():
                line = " ".join((f"TP {world} {' '.join(changes):22} {policy:10}", *map(_text, row.items())))
                sys.stdout.write(f"{line}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
