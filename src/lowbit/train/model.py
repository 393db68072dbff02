"""Hugging Face causal language models, whole, and cut into the modules that pipeline stages run.

A stage's module is the model's own decoder with the layers of other stages taken out: Hugging Face's `forward` makes
masks, positions and rotary embeddings exactly as it does for the whole model. Where a stage has no embedding it is fed
activations instead of token ids, and where it has no final norm the identity stands in for it.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.train.config import FAMILIES, ModelConfig
from lowbit.train.section import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """What an architecture calls its parts, inside its decoder."""

    layers: str = "layers"
    norm: str = "norm"
    embedding: str = "embed_tokens"
    positions: str = ""
    dropout: str = ""


_ANATOMY = {family: Anatomy() for family in FAMILIES} | {
    "gpt2": Anatomy(layers="h", norm="ln_f", embedding="wte", positions="wpe", dropout="drop")
}


def count_layers(model: ModelConfig) -> int:
    """Decoder layers of the model, without loading it.

    Raises:
        ConfigError: `model.pretrained` is no folder with a supported model.
    """
    if not model.pretrained:
        return model.layers
    values = _pretrained_config(model.pretrained)
    return int(values.get("num_hidden_layers", values.get("n_layer", 0)))


def vocabulary(model: ModelConfig, tokenizer_size: int) -> int:
    """Entries of the embedding.

    Raises:
        ConfigError: fewer than the tokenizer has.
    """
    wanted = model.vocab or tokenizer_size
    if model.pretrained:
        wanted = int(_pretrained_config(model.pretrained)["vocab_size"])
    if wanted < tokenizer_size:
        raise ConfigError(
            f"the model's vocabulary has {wanted} entries, the tokenizer {tokenizer_size}; "
            "allowed: at least as many as the tokenizer"
        )
    return wanted


def longest_sequence(model: ModelConfig) -> int | None:
    """Positions that a pretrained model knows; None: as many as this run wants."""
    if not model.pretrained:
        return None
    values = _pretrained_config(model.pretrained)
    return values.get("max_position_embeddings", values.get("n_positions"))


def hidden_size(model: ModelConfig) -> int | None:
    """Elements of an activation of a token; None: a pretrained model does not tell before it is loaded."""
    if not model.pretrained:
        return model.dim
    values = _pretrained_config(model.pretrained)
    return values.get("hidden_size", values.get("n_embd"))


def architecture(model: ModelConfig, *, vocab: int) -> dict[str, Any]:
    """The sizes that a configuration comes to, by the names of `ModelConfig`, without loading the model."""
    if not model.pretrained:
        usual = 4 * model.dim if model.family == "gpt2" else _gated_width(model.dim)
        return {
            "family": model.family, "dim": model.dim, "layers": model.layers, "heads": model.heads,
            "kv_heads": (0 if model.family == "gpt2" else model.kv_heads) or model.heads,
            "ffn": model.ffn or usual, "vocab": vocab,
            "tied": model.family == "gpt2" if model.tied is None else model.tied,
        }  # fmt: skip
    values = _pretrained_config(model.pretrained)
    names = {
        "family": ("model_type",), "dim": ("hidden_size", "n_embd"), "layers": ("num_hidden_layers", "n_layer"),
        "heads": ("num_attention_heads", "n_head"), "kv_heads": ("num_key_value_heads",),
        "ffn": ("intermediate_size", "n_inner"), "vocab": ("vocab_size",), "tied": ("tie_word_embeddings",),
    }  # fmt: skip
    return {key: next((values[n] for n in each if n in values), None) for key, each in names.items()}


def build_model(model: ModelConfig, *, vocab: int, sequence: int, seed: int) -> PreTrainedModel:
    """The whole model in float32 on the CPU: pretrained weights, or random ones that depend on `seed` alone.

    Raises:
        ConfigError: a folder that Hugging Face cannot load.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    config = hugging_face_config(model, vocab=vocab, sequence=sequence)
    torch.manual_seed(seed)
    if not model.pretrained:
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            model.pretrained, config=config, dtype=torch.float32, attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.pretrained {model.pretrained!r} cannot be loaded: {reason}") from error


def hugging_face_config(model: ModelConfig, *, vocab: int, sequence: int) -> PretrainedConfig:
    """The architecture as Hugging Face writes it into `config.json`."""
    from transformers import AutoConfig

    if model.pretrained:
        config = AutoConfig.from_pretrained(model.pretrained)
        for key, value in _dropouts(config.model_type, model.dropout).items():
            setattr(config, key, value)
        return config
    values: dict[str, Any] = {
        "vocab_size": vocab, "max_position_embeddings": sequence, "hidden_size": model.dim,
        "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "use_cache": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if model.tied is not None:
        values["tie_word_embeddings"] = model.tied
    if model.family == "gpt2":
        values["n_inner"] = model.ffn or 4 * model.dim
    else:
        values["intermediate_size"] = model.ffn or _gated_width(model.dim)
        values["num_key_value_heads"] = model.kv_heads or model.heads
        values["head_dim"] = model.dim // model.heads
    return AutoConfig.for_model(model.family, **values, **_dropouts(model.family, model.dropout))


def next_token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in float32. logits: (batch, sequence, vocab); targets: int64 (batch, sequence)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


class StageModule(nn.Module):
    """What one pipeline stage computes: token ids or activations in, activations or logits out.

    Args:
        model: the whole model; its layers are shared with it, not copied.
        layers: which decoder layers are this stage's.
        first, last: whether the stage has the embedding, and the final norm with the output matrix.
        autocast: dtype of matrix products inside; None: as the weights.
        wire: dtype of the activations that cross boundaries.

    Attributes:
        names: of this stage's parameters in the whole model.
        aliases: of those that are copies, the name of what they are a copy of.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layers: range,
        first: bool,
        last: bool,
        autocast: torch.dtype | None = None,
        wire: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.first, self.last, self.autocast, self.wire = first, last, autocast, wire
        self.width, self.vocab = model.config.hidden_size, model.config.vocab_size
        self.names: dict[nn.Parameter, str] = {p: name for name, p in model.named_parameters()}
        self.aliases: dict[str, str] = {}
        self.decoder = _cut(model, layers, first=first, last=last)
        self.head = self._output_matrix(model) if last else None
        mine = set(self.parameters())
        self.names = {p: name for p, name in self.names.items() if p in mine}

    def forward(self, x: Tensor) -> Tensor:
        """One micro-batch.

        Args:
            x: on the first stage token ids, int64 (batch, sequence); elsewhere activations (batch, sequence, dim).

        Returns:
            Activations in the wire's dtype; on the last stage logits (batch, sequence, vocab).
        """
        with torch.autocast(x.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            inputs = {"input_ids": x} if self.first else {"inputs_embeds": x.float()}
            hidden = self.decoder(**inputs, use_cache=False).last_hidden_state
            if self.head is not None:
                return self.head(hidden)
            hidden = hidden.to(self.wire)
            # Zero-bubble schedules detach outputs in place, which views do not allow.
            return hidden.clone() if hidden._is_view() else hidden

    def _output_matrix(self, model: PreTrainedModel) -> nn.Module:
        """The output matrix; a copy of its own where the embedding that it is tied to lives on another stage."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert isinstance(head, nn.Linear)
        if not self.first and head.weight is embedding.weight:
            tied_to = next(name for weight, name in self.names.items() if weight is head.weight)
            self.aliases = {"lm_head.weight": tied_to}
            head = copy.deepcopy(head)
            self.names |= dict.fromkeys(head.parameters(), "lm_head.weight")
        return head


def _cut(model: PreTrainedModel, layers: range, *, first: bool, last: bool) -> nn.Module:
    """The decoder with these layers only. The modules that stay are shared with `model`."""
    anatomy = _ANATOMY[model.config.model_type]
    decoder = copy.copy(model.base_model)
    decoder._modules = dict(decoder._modules)
    config: Any = copy.copy(decoder.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    decoder.config = config
    every = getattr(decoder, anatomy.layers)
    setattr(decoder, anatomy.layers, nn.ModuleList([every[i] for i in layers]))
    if not first:
        setattr(decoder, anatomy.embedding, None)
        if anatomy.positions:
            setattr(decoder, anatomy.positions, _Zero())
            setattr(decoder, anatomy.dropout, nn.Identity())
    if not last:
        setattr(decoder, anatomy.norm, nn.Identity())
    return decoder


class _Zero(nn.Module):
    """Stands in for position embeddings that the first stage has added already."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


def _pretrained_config(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.pretrained is {folder!r}; {path}: {error.strerror}; allowed: a folder with a saved model"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.pretrained is {folder!r}; {path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"model.pretrained is {folder!r}; {path} holds no JSON object")
    if values.get("model_type") not in FAMILIES:
        raise ConfigError(
            f"model.pretrained is {folder!r}, a model of type {values.get('model_type')!r}; "
            f"allowed: {', '.join(FAMILIES)}"
        )
    return values


def _gated_width(dim: int) -> int:
    """Llama's usual feed-forward width: 8/3 of the model's, rounded up to a multiple of 64."""
    return -(-(8 * dim // 3) // 64) * 64


def _dropouts(family: str, value: float) -> dict[str, float]:
    if family == "gpt2":
        return dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), value)
    return {"attention_dropout": value}
