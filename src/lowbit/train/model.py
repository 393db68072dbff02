"""Build Hugging Face causal language models, add LoRA adapters, cut them into pipeline stages, and save them.

A stage's module is the model's own decoder without the layers of other stages. Hugging Face's `forward` makes masks,
positions and rotary embeddings exactly as for the whole model. A stage without the embedding takes activations instead
of token ids; in a stage without the final norm, the identity replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.config import ConfigError
from lowbit.train.config import ModelConfig, TrainConfig
from lowbit.train.cut import (
    MIXES_SAMPLES,
    Share,
    attention_of,
    dtype_of,
    is_tied,
    joined,
    parts_of,
    stage_of,
    uncut,
    whole_class,
)
from lowbit.train.pretrained import Tokenizer, check_weights, load, read_config, transformers_config
from lowbit.wire.messages import Messages

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


ALL = "all-linear"
_PIECE_BYTES = 8 << 20
_DROPOUT = re.compile(r"(?!classifier|summary)\w*(dropout|_pdrop)")  # of a decoder, by its name in `config.json`
_DTYPES = ("float32", "bfloat16", "float16", "float64")


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
    return {key: _size(model, *each) for key, each in names.items()}


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
    return loaded


def check_pretrained(model: ModelConfig, sequence: int) -> None:
    """Check a pretrained model, if there is one, as far as possible without loading it."""
    if not model.pretrained:
        return
    check_weights(model.pretrained, hugging_face_config(model, vocab=0, sequence=0))
    longest = _size(model, "max_position_embeddings", "n_positions")
    if longest is not None and sequence > longest:
        raise ConfigError(f"data.sequence is {sequence}; the model knows {longest} positions; allowed: at most as many")


def check_stages(config: TrainConfig, starts: Iterable[int]) -> None:
    """Check that a pretrained model can be cut before these layers, and that windows can hold several samples."""
    if not config.model.pretrained:
        return
    exact: Any = hugging_face_config(config.model, vocab=0, sequence=0)
    bound = joined(exact)
    if refused := next((layer for layer in starts if layer in bound), None):
        free = [str(layer) for layer in range(1, count_layers(config.model)) if layer not in bound]
        allowed = f"pipeline.layers with stages that begin with layers {', '.join(free)}" if free else "a single stage"
        raise ConfigError(
            f"a stage would begin with layer {refused}, which needs {bound[refused]} of earlier layers; "
            f"allowed: {allowed}"
        )
    if config.data.format == "jsonl" and config.data.packing and exact.model_type in MIXES_SAMPLES:
        raise ConfigError(
            f"data.packing is true; in a {exact.model_type} model, samples in the same window affect each other; "
            "allowed: false"
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
    """Cross-entropy in float32, ignoring targets of -100. logits: (batch, sequence, vocab); targets: int64."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


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
        super().__init__()
        self.first, self.last, self.autocast, self.boundary_dtype = first, last, autocast, boundary_dtype
        self.width, self.dtype = model.config.hidden_size, dtype_of(model)
        self.vocab = getattr(model.config, "unpadded_vocab_size", None) or model.config.vocab_size
        self.names: dict[nn.Parameter, str] = {p: name for name, p in model.named_parameters()}
        self.aliases: dict[str, str] = {}
        self.model: Any = stage_of(model, Share(layers=frozenset(layers), first=first, last=last))
        if last and not first and is_tied(model):
            self.aliases = {"lm_head.weight": self.names[model.get_input_embeddings().weight]}
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
                return self.model(**inputs, use_cache=False).logits.to(self.autocast or torch.float32)
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


def save_adapters(folder: Path, weights: Mapping[str, Tensor], config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Write adapters and tokenizer so that `PeftModel.from_pretrained(model, folder)` loads them.

    Args:
        weights: the adapters, by their names in the whole model.
    """
    from safetensors.torch import save_file

    named = {f"base_model.model.{name.replace('.default.', '.')}": w.contiguous() for name, w in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    saved = _peft_config(config)
    saved.inference_mode = True
    saved.save_pretrained(str(folder))
    tokenizer.hugging_face().save_pretrained(folder)


def _peft_config(config: TrainConfig) -> Any:
    lora = config.lora
    pretrained, family = Path(config.model.pretrained), architecture(config.model, vocab=0)["family"]
    return _peft(lora.rank).LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(targets_of(config)),
        fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM", base_model_name_or_path=str(pretrained.resolve()),
    )  # fmt: skip


def _peft(rank: int) -> Any:  # PEFT, of an optional package
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"lora.rank is {rank}, which needs: pip install 'lowbit[frameworks]'") from error
    return peft


def gather_weights(modules: dict[int, StageModule], messages: Messages | None = None) -> dict[str, Tensor]:
    """Gather all weights, or of adapters the trained ones, on the CPU of a pipeline's first rank, by name.

    The last stage's copy of a tied embedding, equal to the first's, is left out. The other ranks get nothing. Each rank
    in turn sends a piece of 8 MiB, so that no wait is longer than one piece of every rank takes, and only rank 0 needs
    memory for more than its own weights.

    Args:
        modules: of this rank. messages: between the ranks of the pipeline; None: this rank is the only one.

    Raises:
        DamagedError: a piece did not arrive as it was sent.
        PeerError: a rank ended or does not answer.
        ValueError: a rank describes weights that it cannot have.
    """
    named = {n: p for m in modules.values() for p, n in m.names.items() if n not in m.aliases}
    if any(".lora_" in name for name in named):
        weights = {name: p.detach().cpu() for name, p in named.items() if p.requires_grad}
    else:
        saved = {name: buffer for m in modules.values() for name, buffer in m.saved_buffers.items()}
        weights = {name: tensor.detach().cpu() for name, tensor in (named | saved).items()}
    if messages is None:
        return weights
    if messages.rank != 0:
        described = [(n, list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
        messages.send_json(described, 0)
        for tensor in weights.values():
            for piece in tensor.contiguous().view(-1).view(torch.uint8).split(_PIECE_BYTES):
                messages.send(piece, 0).wait()
        return {}
    for _ in zip_longest(*(_receive_all(weights, messages, rank) for rank in range(1, messages.ranks))):
        pass  # a piece of each rank in turn
    return weights


def _receive_all(weights: dict[str, Tensor], messages: Messages, rank: int) -> Iterator[None]:
    """Receive a rank's weights into `weights`; yield after each piece."""
    for name, shape, dtype in messages.receive_json(rank, "names of weights"):
        if dtype not in _DTYPES or name in weights:
            raise ValueError(f"rank {rank} of the pipeline has {name} in {dtype}; allowed: new names in {_DTYPES}")
        weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        for piece in weights[name].view(-1).view(torch.uint8).split(_PIECE_BYTES):
            piece.copy_(messages.receive(piece.numel(), rank, name))
            yield


def save_model(folder: Path, weights: dict[str, Tensor], config: PretrainedConfig, tokenizer: Tokenizer) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` loads both."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    logging.disable_progress_bar()
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.hugging_face().save_pretrained(folder)
