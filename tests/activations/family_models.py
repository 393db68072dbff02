"""Small models of the families that people train, with random weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.activations.models import causal_model

Family = Literal[
    "llama", "qwen3", "gemma3", "phi3", "glm4", "cohere", "opt", "gpt-neox", "falcon", "gpt2", "megatron",
    "bloom", "gemma2-eager", "lora", "lora-dropout",
]  # fmt: skip
FAMILIES: tuple[Family, ...] = get_args(Family)
NAMES = {"gemma3": "gemma3_text", "gpt-neox": "gpt_neox", "gemma2-eager": "gemma2"}
WIDE = {"opt": "ffn_dim", "gpt-neox": "intermediate_size", "falcon": "ffn_hidden_size", "gpt2": "n_inner"}
"""Families whose feed-forward block has two matrices, four times as wide as the model, and their setting for it."""


def family_model(family: Family, *, dim: int, layers: int, vocab: int, sequence: int) -> Any:
    """Make a causal language model in training mode, float32; with LoRA, bfloat16 and float32 adapters.

    It has a head for every 32 channels, and its configuration's default dropout, except in attention, which has none.
    """
    torch.manual_seed(0)
    if family == "megatron":
        return _Megatron(dim, layers, vocab, sequence).train()
    if family.startswith("lora"):
        model = family_model("llama", dim=dim, layers=layers, vocab=vocab, sequence=sequence)
        dropout = 0.1 if family == "lora-dropout" else 0.0
        return _with_adapters(model.bfloat16(), dropout)
    heads = max(1, dim // 32)
    sizes: dict[str, Any] = {
        "vocab_size": vocab, "max_position_embeddings": sequence, "hidden_size": dim, "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }  # fmt: skip
    if family in WIDE:
        sizes |= {WIDE[family]: 4 * dim} | dict.fromkeys(("attention_dropout", "attn_pdrop"), 0.0)
        sizes |= {"word_embed_proj_dim": dim} if family == "opt" else {}
    elif family == "bloom":
        sizes |= {"n_head": sizes.pop("num_attention_heads"), "n_layer": sizes.pop("num_hidden_layers")}
    else:
        sizes |= {"intermediate_size": 11 * dim // 4, "num_key_value_heads": max(1, heads // 2), "head_dim": 32}
    attention = "eager" if family in ("bloom", "gemma2-eager") else "sdpa"
    return causal_model(NAMES.get(family, family), attention, **sizes)


def _with_adapters(model: Any, dropout: float) -> Any:
    """Add LoRA of rank 8 to all linear layers. The second matrices are random: zeros would make most gradients 0."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear")
    model = get_peft_model(model, config)  # it casts adapters to float32
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


class _Block(nn.Module):
    """A decoder layer in Megatron's layout: one matrix for q, k and v, and one for gate and up."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads, ffn = max(1, dim // 32), 11 * dim // 4
        self.input_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * ffn), nn.Linear(ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.input_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        gate, up = torch.chunk(self.fc1(self.mlp_norm(x)), 2, -1)
        return x + self.fc2(functional.silu(gate) * up)


class _Megatron(nn.Module):
    def __init__(self, dim: int, layers: int, vocab: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(sequence, dim)
        self.layers = nn.ModuleList(_Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.head(self.norm(x)))
