"""Build Hugging Face causal language models, add LoRA adapters, cut them into pipeline stages, and save them.

A stage's module is the model's own decoder without the layers of other stages. Hugging Face's `forward` makes masks,
positions and rotary embeddings exactly as for the whole model. A stage without the embedding takes activations instead
of token ids; in a stage without the final norm, the identity replaces it.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit_run.config import ConfigError
from lowbit_run.train.config import ModelConfig, TrainConfig
from lowbit_run.train.cut import (
    MIXES_SAMPLES,
    Share,
    attention_of,
    is_tied,
    joined,
    layer_count,
    parts_of,
    stage_of,
    uncut,
    whole_class,
)
from lowbit_run.train.pretrained import (
    GENERATION,
    MODEL_FILES,
    TOKENIZER_FILES,
    check_generation_config,
    check_weights,
    copy_files,
    load,
    load_tokenizer,
    read_config,
    transformers_config,
)  # fmt: skip

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel


log = logging.getLogger(__name__)

ALL = "all-linear"
_PIECE = 1 << 22  # logits
_DROPOUT = re.compile(r"(?!classifier|summary)\w*(dropout|_pdrop)")  # of a decoder, by its name in `config.json`


def count_layers(model: ModelConfig) -> int:
    """Return the number of decoder layers, without loading the model."""
    return int(_size(model, "num_hidden_layers", "n_layer", "num_layers") or 0) if model.pretrained else model.layers


def vocabulary(model: ModelConfig, tokenizer_size: int) -> int:
    """Return the number of entries of the embedding. Raises ConfigError: the tokenizer has more."""
    wanted = model.vocab or tokenizer_size
    if model.pretrained:
        wanted = int(read_config(model.pretrained)["vocab_size"])
    if wanted < tokenizer_size:
        raise ConfigError(
            f"the model's vocabulary has {wanted} entries, the tokenizer {tokenizer_size}; "
            "allowed: at least as many as the tokenizer"
        )
    return wanted


def vocabulary_of(model: ModelConfig, tokenizer: str) -> int:
    """Return the same without text: a pretrained model needs no tokenizer for it, unless `data.tokenizer` names one."""
    if model.pretrained and not tokenizer:
        return vocabulary(model, 0)
    return vocabulary(model, load_tokenizer(tokenizer or "bytes").size)


def hidden_size(model: ModelConfig) -> int | None:
    """Return the width of the model; None if a pretrained model's configuration lacks it."""
    return _size(model, "hidden_size", "n_embd") if model.pretrained else model.dim


def architecture(model: ModelConfig, *, vocab: int) -> dict[str, Any]:
    """Return the sizes of the model, by the names of `ModelConfig`, without loading it."""
    if not model.pretrained:
        return {
            "family": model.family, "dim": model.dim, "layers": model.layers, "heads": model.heads,
            "kv_heads": (0 if model.family == "gpt2" else model.kv_heads) or model.heads,
            "ffn": _ffn(model), "vocab": vocab,
            "tied": model.family == "gpt2" if model.tied is None else model.tied,
        }  # fmt: skip
    names = {
        "family": ("model_type",), "dim": ("hidden_size", "n_embd"), "layers": ("num_hidden_layers", "n_layer"),
        "heads": ("num_attention_heads", "n_head"), "kv_heads": ("num_key_value_heads",),
        "ffn": ("intermediate_size", "n_inner"), "vocab": ("vocab_size",), "tied": ("tie_word_embeddings",),
    }  # fmt: skip
    return {key: _size(model, *paths) for key, paths in names.items()}


def build_model(model: ModelConfig, *, vocab: int, sequence: int, seed: int) -> PreTrainedModel:
    """Build the whole model in float32 on the CPU, with pretrained weights or random ones from `seed` alone."""
    from transformers import AutoModelForCausalLM

    config = hugging_face_config(model, vocab=vocab, sequence=sequence)
    torch.manual_seed(seed)
    if not model.pretrained:
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", trust_remote_code=False).float()
    check_weights(model.pretrained, config)
    loaded, _ = load(
        AutoModelForCausalLM, model.pretrained, "model.pretrained",
        config=config, dtype=torch.float32, attn_implementation=attention_of(config),
    )  # fmt: skip
    # Whatever its configuration says, Transformers ties no weights that differ in the file.
    loaded.config.tie_word_embeddings = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    return loaded


def check_pretrained(model: ModelConfig, sequence: int) -> None:
    """Check a pretrained model, if there is one, as far as possible without loading it."""
    if not model.pretrained:
        return
    check_weights(model.pretrained, hugging_face_config(model, vocab=0, sequence=0))
    check_generation_config(model.pretrained)
    longest = _size(model, "max_position_embeddings", "n_positions")
    if longest is not None and sequence > longest:
        raise ConfigError(f"data.sequence is {sequence}; the model knows {longest} positions; allowed: at most as many")


def check_stages(config: TrainConfig, starts: Iterable[int]) -> None:
    """Check that a pretrained model can be cut before these layers, and that windows can hold several samples."""
    if not config.model.pretrained:
        return
    exact: Any = hugging_face_config(config.model, vocab=0, sequence=0)
    check_starts(exact, starts, "pipeline.layers")
    if config.data.format == "jsonl" and config.data.packing and exact.model_type in MIXES_SAMPLES:
        raise ConfigError(
            f"data.packing is true; in a {exact.model_type} model, samples in the same window affect each other; "
            "allowed: false"
        )


def check_starts(config: Any, starts: Iterable[int], key: str) -> None:
    """Check that stages of a model of Transformers' `config` can begin with these layers, which `key` chooses."""
    bound = joined(config)
    if refused := next((layer for layer in starts if layer in bound), None):
        free = [str(layer) for layer in range(1, layer_count(config)) if layer not in bound]
        allowed = f"{key} with stages that begin with layers {', '.join(free)}" if free else "a single stage"
        raise ConfigError(
            f"a stage would begin with layer {refused}, which needs {bound[refused]} of earlier layers; "
            f"allowed: {allowed}"
        )


def hugging_face_config(model: ModelConfig, *, vocab: int, sequence: int) -> PretrainedConfig:
    """Return the architecture as Hugging Face's class."""
    from transformers import AutoConfig

    if model.pretrained:
        read_config(model.pretrained)
        config = transformers_config(model.pretrained, "model.pretrained")
        parts_of(config)
        for key, value in vars(config).items():
            if _DROPOUT.fullmatch(key) and type(value) in (int, float):
                setattr(config, key, model.dropout)
        return config
    values: dict[str, Any] = {
        "vocab_size": vocab, "max_position_embeddings": sequence, "hidden_size": model.dim,
        "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "use_cache": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if model.tied is not None:
        values["tie_word_embeddings"] = model.tied
    if model.family == "gpt2":
        values["n_inner"] = _ffn(model)
    else:
        values["intermediate_size"] = _ffn(model)
        values["num_key_value_heads"] = model.kv_heads or model.heads
        values["head_dim"] = model.dim // model.heads
    return AutoConfig.for_model(model.family, **values, **_dropouts(model.family, model.dropout))


def next_token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in float32, ignoring targets of -100. logits: (batch, sequence, vocab); targets: int64.

    Of many logits, a piece at a time is float32, also in the backward pass, which computes it again: with the
    vocabularies of large models, nothing else in a step of few tokens takes as much memory.
    """
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if logits.numel() <= _PIECE:
        return F.cross_entropy(logits.float(), targets, reduction=reduction)
    losses: Tensor = _TokenLosses.apply(logits, targets)  # pyright: ignore[reportAssignmentType]
    return F.nll_loss(-losses[:, None], targets.clamp(max=0), reduction=reduction)  # sums as cross_entropy does


class _TokenLosses(torch.autograd.Function):
    """Loss of each token, from logits (tokens, vocab) of any dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return torch.cat([F.cross_entropy(x.float(), y, reduction="none") for x, y in _pieces(logits, targets)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, targets = ctx.saved_tensors
        result = torch.empty_like(logits)
        for x, y, gradient, out in _pieces(logits, targets, grads[0], result):
            with torch.enable_grad():
                piece = x.detach().requires_grad_()
                loss = F.cross_entropy(piece.float(), y, reduction="none")
            out.copy_(torch.autograd.grad(loss, piece, gradient)[0])
        return result, None


def _pieces(logits: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split tensors alike, with at most `_PIECE` logits in each."""
    rows = max(1, _PIECE // logits.shape[1])
    return zip(*(x.split(rows) for x in (logits, *others)), strict=True)


class StageModule(nn.Module):
    """One pipeline stage: token ids or activations in, activations or logits out.

    Args:
        model: the whole model, or the part of it that has these layers. Its modules are shared, not copied.
        layers: the decoder layers of this stage.
        first, last: whether the stage has the embedding, and the final norm with the output matrix.
        autocast: dtype of matrix products inside; None: that of the weights.
        boundary_dtype: of the activations that it hands to the next stage.

    Attributes:
        names: for each parameter of this stage, its name in the whole model.
        aliases: for parameters that are copies, the name of the original.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layers: range,
        first: bool,
        last: bool,
        autocast: torch.dtype | None = None,
        boundary_dtype: torch.dtype = torch.float32,
    ) -> None:
        from lowbit.pipeline.arguments import dtype_of  # brings stages, which slips in settings need not wait for

        super().__init__()
        self.first, self.last, self.autocast, self.boundary_dtype = first, last, autocast, boundary_dtype
        self.width, self.dtype = model.config.hidden_size, dtype_of(model)
        self.vocab = getattr(model.config, "unpadded_vocab_size", None) or model.config.vocab_size
        self.names: dict[nn.Parameter, str] = {p: name for name, p in model.named_parameters()}
        self.aliases: dict[str, str] = {}
        self.model: Any = stage_of(model, Share(layers=frozenset(layers), first=first, last=last))
        if last and not first and is_tied(model):
            self.aliases = {"lm_head.weight": self.names[model.get_input_embeddings().weight]}  # pyright: ignore
            self.names |= dict.fromkeys(self.head.parameters(), "lm_head.weight")
        mine = set(self.parameters())
        self.names = {p: name for p, name in self.names.items() if p in mine}

    @property
    def saved_buffers(self) -> dict[str, Tensor]:
        """Return what is not a parameter and yet saved, such as biases of routers, by name in the whole model."""
        saved = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    @property
    def decoder(self) -> Any:
        """The module with the decoder layers, those of other stages replaced by identities."""
        return self.model.base_model

    @property
    def head(self) -> Any:
        """The output matrix; on other stages than the last, an identity."""
        return self.model.get_output_embeddings()

    def as_stored(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return weights of a layer by the names, and in the layout, of files, which may store experts one by one."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, weights)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Compute activations in `boundary_dtype`; on the last stage logits (batch, sequence, vocab).

        Args:
            x: on the first stage token ids, int64 (batch, sequence); elsewhere activations (batch, sequence, dim).
            positions: of each token in its sample, int64 (batch, sequence), if windows hold several samples. Attention
                does not cross samples.
        """
        with torch.autocast(x.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            inputs = {"input_ids": x} if self.first else {"inputs_embeds": x.to(self.dtype)}
            if positions is not None:
                inputs["position_ids"] = positions
            if self.last:
                return self.model(**inputs, use_cache=False).logits.to(self.autocast or self.dtype)
            hidden = self.decoder(**inputs, use_cache=False).last_hidden_state.to(self.boundary_dtype)
            # Zero-bubble schedules detach outputs in place, which fails for views.
            return hidden.clone() if hidden._is_view() else hidden


def _size(model: ModelConfig, *names: str) -> Any:
    """Read a pretrained model's configuration under the first of these names that it has; None without any."""
    values = read_config(model.pretrained)
    return next((values[name] for name in names if name in values), None)


def _ffn(model: ModelConfig) -> int:
    """Return the feed-forward width; Llama's default is 8/3 of the model's, rounded up to a multiple of 64."""
    usual = 4 * model.dim if model.family == "gpt2" else -(-(8 * model.dim // 3) // 64) * 64
    return model.ffn or usual


def _dropouts(family: str, value: float) -> dict[str, float]:
    if family == "gpt2":
        return dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), value)
    return {"attention_dropout": value}


def check_lora(config: TrainConfig) -> None:
    """Check the adapters of a run, if it has any."""
    if not config.lora.rank:
        return
    _peft(config.lora.rank)
    targets_of(config)


@lru_cache(maxsize=4)
def targets_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the names, within a decoder layer, of the linear layers that get an adapter.

    Raises:
        ConfigError: no layer has the name of a target, or the folder has no supported model.
    """
    from transformers.pytorch_utils import Conv1D

    exact: Any = hugging_face_config(config.model, vocab=1, sequence=1)
    with torch.device("meta"):
        decoder = whole_class(exact)(exact).base_model
    modules = (pair for layer in getattr(decoder, parts_of(exact)[1]) for pair in layer.named_modules())
    names = list(dict.fromkeys(name for name, module in modules if isinstance(module, nn.Linear | Conv1D)))
    chosen: set[str] = set()
    for target in config.lora.targets:
        matches = {name for name in names if target == ALL or f".{name}".endswith(f".{target}")}
        if not matches:
            raise ConfigError(
                f"lora.targets has {target!r}, which no decoder layer has; allowed: {ALL}, {', '.join(names)}, "
                "or the last part of such a name"
            )
        chosen |= matches
    return tuple(name for name in names if name in chosen)


def add_adapters(model: PreTrainedModel, config: TrainConfig) -> None:
    """Add float32 adapters in place, initialized from `run.seed` alone, and freeze all other weights.

    A model that is cut gets the adapters that the whole model would have.
    """
    peft = _peft(config.lora.rank)
    torch.manual_seed(config.run.seed)
    with uncut(model):  # adapters are drawn layer by layer
        peft.inject_adapter_in_model(_peft_config(config), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def save_adapter_config(folder: Path, config: TrainConfig) -> None:
    """Write the adapters' configuration, with which `PeftModel.from_pretrained(model, folder)` loads them."""
    saved = _peft_config(config)
    saved.inference_mode = True
    saved.save_pretrained(str(folder))


def _peft_config(config: TrainConfig) -> Any:
    lora = config.lora
    pretrained, family = Path(config.model.pretrained), architecture(config.model, vocab=0)["family"]
    return _peft(lora.rank).LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(targets_of(config)),
        fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM", base_model_name_or_path=str(pretrained.resolve()),
    )  # fmt: skip


def _as_detail(record: logging.LogRecord) -> bool:
    """Say at debug level only that bitsandbytes does without a faster kernel, which it would download."""
    wanted = "kernels-community" not in str(record.msg)
    if not wanted:
        log.debug(record.getMessage())
    return wanted


logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_as_detail)  # PEFT imports it, whatever the weights


def _peft(rank: int) -> Any:  # PEFT, of an optional package
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"lora.rank is {rank}, which needs: pip install 'lowbit[frameworks]'") from error
    return peft


def save_config(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Write a model's configuration. dtype: of the saved weights."""
    saved: Any = copy.copy(config)
    saved.architectures, saved.dtype = [whole_class(config).__name__], dtype
    saved.save_pretrained(folder)


def save_companions(folder: Path, config: TrainConfig, generation: GenerationConfig) -> None:
    """Add what a saved model or its adapters need as well, from the folders that the run began with.

    That is how to generate text, the licence, and the tokenizer's files that Transformers does not write.

    Args:
        generation: of the model as it was loaded: older models have it in `config.json`, and no file of their own.
    """
    generation.to_json_file(folder / GENERATION)
    if config.model.pretrained:
        copy_files(config.model.pretrained, folder, MODEL_FILES)
    if config.tokenizer != "bytes":
        copy_files(config.tokenizer, folder, TOKENIZER_FILES)
