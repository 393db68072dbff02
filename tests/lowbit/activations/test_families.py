"""Floors for the families that people train, with random weights: bytes that are kept, and the error of gradients."""

import copy
import importlib
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_, counted
from lowbit.activations.experts import experts_like
from tests.lowbit.activations.models import causal_model, distance, gradients, loss_of

SIZES = {"vocab_size": 32, "max_position_embeddings": 128, "hidden_size": 64}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
GATED = SIZES | LAYERS | {"intermediate_size": 176, "num_key_value_heads": 1, "head_dim": 32}
PLAIN = SIZES | LAYERS | dict.fromkeys(("attention_dropout", "attn_pdrop"), 0.0)
"""Families whose feed-forward block has two matrices."""
EXPERTS = GATED | {"num_experts_per_tok": 2, "num_local_experts": 8, "experts": "grouped_mm"}
LATENT = {"n_routed_experts": 8, "n_group": 2, "topk_group": 2, "kv_lora_rank": 32, "q_lora_rank": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("llama", "qwen3", "gemma3_text", "olmo2", "phi3", "glm4", "cohere", "gemma2", "lora", "lora-dropout"), GATED
    ),
    "nemotron": GATED,
    "opt": PLAIN | {"ffn_dim": 256, "word_embed_proj_dim": 64},
    "gpt_neox": PLAIN | {"intermediate_size": 256},
    "falcon": PLAIN | {"ffn_hidden_size": 256},
    "gpt2": PLAIN | {"n_inner": 256},
    "bloom": SIZES | {"n_head": 2, "n_layer": 2},
    **{f"mixtral {way}": EXPERTS | {"experts": way} for way in ("eager", "batched_mm", "grouped_mm")},
    "gpt_oss": EXPERTS,
    "qwen3_moe": EXPERTS | {"num_experts": 8, "moe_intermediate_size": 112},
    "deepseek_v3": SIZES | LAYERS | LATENT | {
        "num_experts_per_tok": 2, "experts": "grouped_mm", "num_key_value_heads": 2, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 24, "moe_intermediate_size": 112, "first_k_dense_replace": 0,
    },
}  # fmt: skip
MOST = {"gpt_oss": 0.4}
"""Share of PyTorch's bytes, if not 0.3. Most of GPT-OSS's is its attention, which is written out and left as it is."""


def with_adapters(model: Any, dropout: float) -> Any:
    """Add LoRA of rank 8 to all linear layers. The second matrices are random: zeros would make most gradients 0."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear")
    model = get_peft_model(model, config)  # it casts adapters to float32
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_keep_little(family: str):
    logging.getLogger("transformers").setLevel(logging.ERROR)  # about rotary embeddings as short as these
    adapted, sizes = family.startswith("lora"), FAMILIES[family]
    attention = "eager" if family in ("bloom", "gemma2", "gpt_oss") else "sdpa"
    plain = causal_model("llama" if adapted else family.split()[0], attention, **sizes)
    if adapted:
        plain = with_adapters(plain.bfloat16(), 0.1 if family == "lora-dropout" else 0.0)
    exact, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    compress_saved_(exact, LayerAware(bits=16))
    done = compress_saved_(ours)
    assert any(name.endswith("experts") for name in done.bits) == ("experts" in sizes)
    ids = torch.randint(32, (2, 128), generator=torch.Generator().manual_seed(5))

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not adapted):
            return loss_of(model, ids)

    kept, losses, grads = [], [], []
    for model in (plain, ours, exact):
        with counted(model) as saved:
            losses.append(loss(model))
        kept.append(saved.total)
        grads.append(gradients(model, losses[-1]))
    for other, most in ((1, 0.03), (2, 1e-2)):
        torch.testing.assert_close(losses[other], losses[0], rtol=2e-4, atol=0)
        assert distance(grads[other], grads[0]) < most
    assert kept[1] < MOST.get(family, 0.3) * kept[0], kept


@pytest.mark.parametrize(
    ("family", "name", "activation", "sizes"),
    [
        ("nemotron_h", "NemotronHExperts", None, {"n_routed_experts": 4, "moe_intermediate_size": 16}),
        ("deepseek_v4", "DeepseekV4Experts", None, {}),
        ("olmoe", "OlmoeExperts", "silu", {"num_experts": 4}),
        ("gemma4_text", "Gemma4TextExperts", "gelu_tanh", {"num_experts": 4, "moe_intermediate_size": 16}),
    ],
)
def test_experts_of_other_families_are_recognized(family: str, name: str, activation: Any, sizes: dict[str, Any]):
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **sizes)
    config._experts_implementation = "eager"
    folder = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    with torch.device("meta"):
        experts = getattr(module, name)(config)
    found = experts_like(experts)
    assert found is not None
    assert found.gate.activation == activation
