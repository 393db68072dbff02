"""Tensor-parallel plans for encoders, which Hugging Face brings without one."""

from __future__ import annotations

from typing import Any

from torch import nn

_BERT = {
    **{f"*encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
    "*encoder.layer.*.intermediate.dense": "colwise",
    "*encoder.layer.*.output.dense": "rowwise",  # of attention and of the feed-forward layer
}
_MPNET = {
    **{f"*encoder.layer.*.attention.attn.{name}": "colwise" for name in "qkv"},
    "*encoder.layer.*.attention.attn.o": "rowwise",
    "*encoder.layer.*.intermediate.dense": "colwise",
    "*encoder.layer.*.output.dense": "rowwise",
}
_DISTILBERT = {
    **{f"*transformer.layer.*.attention.{name}_lin": "colwise" for name in "qkv"},
    "*transformer.layer.*.attention.out_lin": "rowwise",
    "*transformer.layer.*.ffn.lin1": "colwise",
    "*transformer.layer.*.ffn.lin2": "rowwise",
}
_NOMIC = {
    **{f"*layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "*layers.*.self_attn.o_proj": "rowwise",
    **{f"*layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "*layers.*.mlp.down_proj": "rowwise",
}
ENCODERS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _BERT),
    "mpnet": _MPNET,
    "distilbert": _DISTILBERT,
    "nomic_bert": _NOMIC,
}
"""Plans by `model_type`. The embeddings, the pooler and the head of the masked language model stay whole."""
EMULATED_ONLY = ("mpnet",)
"""Models whose attention adds a bias for all heads, which a rank with some of them cannot."""


def encoder_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan for an encoder; an empty one for other models."""
    config: Any = getattr(model, "config", None)
    return ENCODERS.get(getattr(config, "model_type", ""), {})


def check_real_ranks(model: nn.Module) -> None:
    """Raise ValueError for an encoder that real ranks cannot share."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in EMULATED_ONLY:
        raise ValueError(
            f"{type(model).__name__} adds a bias for all heads to attention; allowed: emulated ranks "
            "(emulate_tensor_parallel_)"
        )
