"""Floors for the families that people train, with random weights: bytes that are kept, and the error of gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import compress_saved_, counted
from lowbit.plan.measure import gradients, relative_error
from tests.activations.models import causal_model

SIZES = {"vocab_size": 32, "max_position_embeddings": 128, "hidden_size": 64}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
GATED = SIZES | LAYERS | {"intermediate_size": 176, "num_key_value_heads": 1, "head_dim": 32}
PLAIN = SIZES | LAYERS | dict.fromkeys(("attention_dropout", "attn_pdrop"), 0.0)
"""Families whose feed-forward block has two matrices."""
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("llama", "qwen3", "gemma3_text", "phi3", "glm4", "cohere", "gemma2", "lora", "lora-dropout"), GATED
    ),
    "opt": PLAIN | {"ffn_dim": 256, "word_embed_proj_dim": 64},
    "gpt_neox": PLAIN | {"intermediate_size": 256},
    "falcon": PLAIN | {"ffn_hidden_size": 256},
    "gpt2": PLAIN | {"n_inner": 256},
    "bloom": SIZES | {"n_head": 2, "n_layer": 2},
}


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
    adapted = family.startswith("lora")
    attention = "eager" if family in ("bloom", "gemma2") else "sdpa"
    plain = causal_model("llama" if adapted else family, attention, **FAMILIES[family])
    if adapted:
        plain = with_adapters(plain.bfloat16(), 0.1 if family == "lora-dropout" else 0.0)
    ours = copy.deepcopy(plain)
    compress_saved_(ours)
    ids = torch.randint(32, (2, 128), generator=torch.Generator().manual_seed(5))

    def loss_of(model: nn.Module) -> Tensor:
        torch.manual_seed(1)  # dropout
        with torch.autocast("cpu", torch.bfloat16, enabled=not adapted):
            logits = model(input_ids=ids, use_cache=False).logits
            return functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())

    kept, losses, grads = [], [], []
    for model in (plain, ours):
        grads.append(gradients(model, lambda model=model: loss_of(model)))
        with counted(model) as saved:
            losses.append(loss_of(model))
        kept.append(saved.total)
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-4, atol=0)
    assert kept[1] < 0.3 * kept[0]
    assert relative_error(grads[1], grads[0]) < 0.03
