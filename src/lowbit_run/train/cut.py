"""Cut a causal language model of Transformers into pipeline stages.

A stage is the model itself with identities in place of the layers, embedding, norm and output matrix of other stages,
so every layer keeps its number and every weight its name, and Hugging Face's own `forward` makes masks, positions and
rotary embeddings as for the whole model.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit_run.config import ConfigError

# fmt: off
CUT = frozenset((
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere", "cohere2",
    "cohere2_moe", "cohere_compass_text", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "doge", "dots1",
    "dots3_note_text", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "gpt2", "gpt_neox", "gpt_oss", "granite", "granite_swa", "helium", "hy_v3", "hyperclovax", "inkling_text",
    "internlm3", "iquestcoder", "jais2", "kimi_linear", "kolibri1", "laguna", "llama", "longcat_flash", "mellum",
    "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral",
    "mixtral", "olmo", "olmo2", "olmo3", "olmo_hybrid", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "starcoder2",
    "vaultgemma", "youtu",
))
"""Types of models whose stages compute what the whole model does (`tests/lowbit_run/train/test_families.py`)."""

NOT_CUT = {
    "deepseek_v4": "its layers hand on several streams of hidden states, and some need the token ids",
    "gemma3n_text": "its layers hand on several streams of hidden states, and need inputs made from the token ids",
    "hrm_text": "it runs the same layers several times",
    "hy_v4": "its layers hand on several streams of hidden states",
    "phi4_multimodal": "it has encoders of images and sound",
}
"""Types that Transformers has a plan of stages for, and that cannot be cut, with the reason."""

MIXES_SAMPLES = frozenset((
    "afmoe", "bailing_hybrid", "gpt_oss", "inkling_text", "kimi_linear", "minimax", "minimax_m3_vl_text", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
))
"""Types in which samples in the same window affect each other, whatever the positions of their tokens."""
# fmt: on

_ONCE = {"embedding_multiplier": 1.0, "embedding_dropout": 0.0}
_ONCE_CONFIG = {"mup_enabled": False}
"""What a decoder, or its configuration, does to its input outside the embedding, with the value that does nothing."""


class Elsewhere(nn.Module):
    """Stands for a module of another stage: returns its first argument, with what layers may hand on besides."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (x, kwargs["prev_topk_indices"]) if "prev_topk_indices" in kwargs else x


class _NoPositions(nn.Module):  # in place of learned position embeddings, which the first stage has already added
    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a model that one stage, or all stages of one rank, have.

    Attributes:
        layers: numbers of decoder layers. first: the embedding. last: the final norm and the output matrix.
    """

    layers: frozenset[int]
    first: bool
    last: bool


def parts_of(config: Any) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the names of a decoder's modules before its layers, of the layers, and of the modules after them.

    Raises:
        ConfigError: a model of this configuration cannot be cut.
    """
    if config.model_type == "gpt2":
        return ("wte", "wpe", "drop"), "h", ("ln_f",)
    plan: list[str] = list(getattr(config, "base_model_pp_plan", None) or ())
    if "layers" not in plan:
        raise ConfigError(
            f"a model of type {config.model_type!r} cannot be cut: Transformers has no plan for its stages"
        )
    if width := getattr(config, "hidden_size_per_layer_input", 0):
        raise ConfigError(
            f"hidden_size_per_layer_input is {width}: layers of this {config.model_type} model need inputs made from "
            "token ids, so it cannot be cut into stages; allowed: 0"
        )
    place = plan.index("layers")
    return tuple(plan[:place]), "layers", tuple(plan[place + 1 :])


def cut_(model: Any, share: Share, *, tied: bool) -> None:
    """Replace in place what does not belong to `share`; a tied embedding stays on the last stage."""
    decoder, (before, layers, after) = model.base_model, parts_of(model.config)
    every = getattr(decoder, layers)
    setattr(decoder, layers, nn.ModuleList([x if i in share.layers else Elsewhere() for i, x in enumerate(every)]))
    if not share.first:
        for name in before[share.last and tied :]:
            setattr(decoder, name, _NoPositions() if name == "wpe" else Elsewhere())
        for name in _ONCE.keys() & vars(decoder).keys():
            setattr(decoder, name, _ONCE[name])
        for name in _ONCE_CONFIG.keys() & vars(model.config).keys():
            decoder.config = copy.copy(decoder.config)
            setattr(decoder.config, name, _ONCE_CONFIG[name])
    if not share.last:
        for name in after:
            setattr(decoder, name, Elsewhere())
        head = model.get_output_embeddings()
        setattr(model, next(name for name, module in model.named_children() if module is head), Elsewhere())
        model.all_tied_weights_keys = {}


def stage_of(model: Any, share: Share) -> Any:
    """Return a stage that shares its modules with `model`, which may be cut itself.

    A tied output matrix on another stage than the embedding's is a copy.
    """
    stage, decoder = copy.copy(model), copy.copy(model.base_model)
    stage._modules, decoder._modules = dict(model._modules), dict(decoder._modules)
    setattr(stage, model.base_model_prefix, decoder)
    cut_(stage, share, tied=False)
    head = stage.get_output_embeddings()
    if share.last and not share.first and is_tied(model):
        name = next(name for name, module in model.named_children() if module is head)
        setattr(stage, name, copy.deepcopy(head))
    return stage


def layer_count(config: Any) -> int:
    """Return the number of decoder layers of Transformers' `config`."""
    return config.num_layers if config.model_type == "longcat_flash" else config.num_hidden_layers


def joined(config: Any) -> dict[int, str]:
    """Return the layers that cannot be the first of a stage, with what they need of the layers before."""
    if getattr(config, "num_kv_shared_layers", 0):
        shared = range(config.kv_sharing_modes.index("store") + 1, config.num_hidden_layers)
        return dict.fromkeys(shared, "keys and values")
    kinds = getattr(config, "indexer_types", None) or ()
    return {layer: "the selected tokens" for layer, kind in enumerate(kinds) if kind == "shared"}


def check_decoder(model: Any) -> None:
    """Check that a decoder without layers hands on exactly what it gets, as a stage in the middle must.

    Args:
        model: on the meta device.

    Raises:
        ConfigError: it has other weights, or does something else to its input.
    """
    layers = parts_of(model.config)[1]
    if not hasattr(model.base_model, layers):
        raise ConfigError(f"its decoder has no {layers}")
    decoder = stage_of(model, Share(layers=frozenset(), first=False, last=False)).base_model.train()
    if strange := next((name for name, _ in decoder.named_parameters()), None):
        raise ConfigError(f"its decoder has {strange} outside its layers")
    decoder.to_empty(device="cpu")  # tables of positions, which nothing uses
    x = torch.linspace(-3, 3, 2 * model.config.hidden_size).view(1, 2, -1)
    with torch.no_grad():
        y = decoder(inputs_embeds=x, use_cache=False).last_hidden_state
    if not torch.equal(x, y):
        raise ConfigError("its decoder changes its input outside its layers")


@contextlib.contextmanager
def uncut(model: Any) -> Iterator[None]:
    """Put layers without data in place of other stages' layers for the `with` block."""
    name = parts_of(model.config)[1]
    cut = getattr(model.base_model, name)
    with torch.device("meta"):
        every = getattr(whole_class(model.config)(model.config).base_model, name)
    layers = [meta if isinstance(layer, Elsewhere) else layer for layer, meta in zip(cut, every, strict=True)]
    setattr(model.base_model, name, nn.ModuleList(layers))
    try:
        yield
    finally:
        setattr(model.base_model, name, cut)


def is_tied(model: Any) -> bool:
    """Whether the output matrix is the embedding."""
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    return embedding is not None and model.get_output_embeddings().weight is embedding


def attention_of(config: Any) -> str:
    """Return the fastest attention of a model that needs no other package."""
    return "sdpa" if whole_class(config)._supports_sdpa else "eager"


def whole_class(config: Any) -> Any:
    """Return Transformers' class of causal language models for `config`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(config)]


def class_for(config: Any, share: Share) -> Any:
    """Return a class like Transformers' whose instances are cut, so that `from_pretrained` loads only the share."""
    whole = whole_class(config)

    class Cut(whole):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            cut_(self, share, tied=bool(getattr(config, "tie_word_embeddings", False)))

    Cut.__name__, Cut.__qualname__, Cut.__module__ = whole.__name__, whole.__qualname__, whole.__module__
    return Cut
