"""`lowbit bench families`: what `compress_saved_` saves for common models, and what it does to gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import compress_saved_, counted
from lowbit.config import ConfigError, NonNegative, Positive, section
from lowbit.plan.measure import gradients, relative_error
from lowbit.report import Column, Command, Row, Table
from lowbit.train.config import DataConfig
from lowbit.train.data import Order, load_data
from lowbit_lab.bench.memory_run import policy_of
from lowbit_lab.bench.settings import EachOnce, megabytes

Family = Literal[
    "llama", "qwen3", "gemma3", "phi3", "glm4", "cohere", "opt", "gpt-neox", "falcon", "gpt2", "megatron",
    "bloom", "nemotron", "gemma2-eager", "mamba", "rwkv", "lora", "lora-dropout", "lora-dora",
]  # fmt: skip
FAMILIES: tuple[Family, ...] = get_args(Family)
NAMES = {"gemma3": "gemma3_text", "gpt-neox": "gpt_neox", "gemma2-eager": "gemma2"}
WIDE = {"opt": "ffn_dim", "gpt-neox": "intermediate_size", "falcon": "ffn_hidden_size", "gpt2": "n_inner"}
"""Families whose feed-forward block has two matrices, four times as wide as the model, and their setting for it."""
SCANS = ("mamba", "rwkv")
"""Families without attention: a scan passes over the tokens one after the other."""
_NO_DROPOUT = ("attention_dropout", "attn_pdrop")


@section()
class FamiliesBenchmark:
    """The models, how long they are trained, and the bits."""

    families: Annotated[tuple[Family, ...], EachOnce] = FAMILIES
    """Hugging Face models with random weights, a model in Megatron's layout, and LoRA on Llama by PEFT. Mamba and RWKV
    are scans, which save most of their tensors uncompressed."""
    weights: Annotated[tuple[Literal["autocast", "bf16"], ...], EachOnce] = ("autocast", "bf16")
    """autocast: float32 weights with bfloat16 autocast. bf16: bfloat16 weights. LoRA has bf16 only."""
    bits: Annotated[int, Field(ge=0, le=16)] = 0
    """Bits of saved activations; norms and attention have at least 8. 0: the default of `LayerAware`."""
    dim: Positive = 128
    """Width of the model."""
    layers: Positive = 4
    """Decoder layers."""
    sequence: Positive = 256
    """Tokens of a sample."""
    batch: Positive = 2
    """Samples."""
    steps: NonNegative = 60
    """Number of training steps before gradients are compared."""
    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Learning rate of AdamW."""
    seed: NonNegative = 0
    """Seed of weights, data order and dropout."""
    text: tuple[str, ...] = ()
    """Files or folders to train on, as bytes. If omitted, Python's standard library."""
    max_bytes: Positive = 4_000_000
    """Read at most this many bytes of text."""
    threads: Positive = 2
    """PyTorch threads."""

    def __post_init__(self) -> None:
        if self.dim % 32:
            raise ConfigError(f"dim is {self.dim}; allowed: multiples of 32, the width of a head")

    def data(self) -> DataConfig:
        """Return the settings of the text, in samples of this many tokens."""
        return DataConfig(text=self.text, batch=self.batch, max_bytes=self.max_bytes, sequence=self.sequence)


def measure(settings: FamiliesBenchmark, earlier: Sequence[Row]) -> Iterator[list[Row]]:
    """Measure every family that `earlier` rows lack.

    Yields:
        Rows, one for each: `family`, `weights`, `plain_bytes` and `saved_bytes` (kept by autograd for a batch, each
        storage once), `saved_vs_plain`, `gradient_error` (|g' - g| / |g| against plain gradients of the same weights,
        after the training steps), `loss`, and `modules`: for modules with the same name except for numbers, what they
        would keep without compression and what they keep, listed by PyTorch function if it is not compressed.
    """
    torch.set_num_threads(settings.threads)
    load_data(settings.data())  # so that an unreadable text is an error here
    rows = list(earlier)
    known = {(row["family"], row["weights"]) for row in rows}
    yield rows
    for family in settings.families:
        for weights in ("bf16",) if family.startswith("lora") else settings.weights:
            if (family, weights) not in known:
                rows.append(_measured(settings, family, weights))
                rows.sort(key=lambda row: (row["weights"], FAMILIES.index(row["family"])))
                yield rows


def _measured(settings: FamiliesBenchmark, family: Family, weights: str) -> dict[str, Any]:
    model = family_model(
        family, dim=settings.dim, layers=settings.layers, vocab=256, sequence=settings.sequence, seed=settings.seed
    )
    if weights == "bf16" and not family.startswith("lora"):
        model = model.bfloat16()
    windows = load_data(settings.data()).train
    order = Order(samples=len(windows), batch=settings.batch, seed=settings.seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.lr)

    def loss(step: int) -> Tensor:
        torch.manual_seed(settings.seed)  # for dropout
        ids, targets = windows.batch(order.ids(step))
        with torch.autocast("cpu", torch.bfloat16) if weights == "autocast" else nullcontext():
            logits = model(input_ids=ids, use_cache=False).logits
            return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    for step in range(settings.steps):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with counted(model) as plain:
        last = loss(settings.steps)
    value = last.item()
    del last
    exact = gradients(model, lambda: loss(settings.steps))
    compressed = compress_saved_(model, policy_of(settings.bits))
    error = relative_error(gradients(model, lambda: loss(settings.steps)), exact)
    with counted(model) as saved:
        last = loss(settings.steps)
    del last
    survey = compressed.survey
    assert survey is not None
    modules = [
        {"module": row.module, "count": len(row.names), "plain": row.plain, "kept": row.kept, "whole": dict(row.whole)}
        for row in survey.rows.values()
    ]
    return {
        "family": family, "weights": weights, "plain_bytes": plain.total, "saved_bytes": saved.total,
        "saved_vs_plain": saved.total / plain.total, "gradient_error": error, "loss": value, "modules": modules,
    }  # fmt: skip


def family_model(family: Family, *, dim: int, layers: int, vocab: int, sequence: int, seed: int = 0) -> Any:
    """Make a causal language model in training mode, float32; with LoRA, bfloat16 and float32 adapters.

    It has a head for every 32 channels, and its configuration's default dropout, except in attention, which has none.
    """
    torch.manual_seed(seed)
    if family == "megatron":
        return _Megatron(dim, layers, vocab, sequence).train()
    if family.startswith("lora"):
        model = family_model("llama", dim=dim, layers=layers, vocab=vocab, sequence=sequence, seed=seed)
        dropout = 0.1 if family == "lora-dropout" else 0.0
        return _with_adapters(model.bfloat16(), dropout, dora=family == "lora-dora")
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = max(1, dim // 32)
    sizes: dict[str, Any] = {
        "vocab_size": vocab, "max_position_embeddings": sequence, "hidden_size": dim, "num_hidden_layers": layers,
        "num_attention_heads": heads, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if family in WIDE:
        sizes |= {WIDE[family]: 4 * dim} | dict.fromkeys(_NO_DROPOUT, 0.0)
        sizes |= {"word_embed_proj_dim": dim} if family == "opt" else {}
    elif family in SCANS:
        sizes |= {"context_length": sequence}
    elif family == "bloom":
        sizes |= {"n_head": sizes.pop("num_attention_heads"), "n_layer": sizes.pop("num_hidden_layers")}
    else:
        sizes |= {"intermediate_size": 11 * dim // 4, "num_key_value_heads": max(1, heads // 2), "head_dim": 32}
    config = AutoConfig.for_model(NAMES.get(family, family), **sizes)
    attention = "eager" if family in ("bloom", "gemma2-eager", *SCANS) else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=False)
    return model.float().train()


def _with_adapters(model: Any, dropout: float, *, dora: bool) -> Any:
    """Add LoRA of rank 8 to all linear layers. The second matrices are random: zeros would make most gradients 0."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=dropout, use_dora=dora, target_modules="all-linear")
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


COMMAND = Command(
    name="bench families",
    summary="Saved activations of common models in few bits, and their gradients.",
    examples=("lowbit bench families --family llama,phi3,lora-dropout", "lowbit bench families --json families.json"),
    settings=FamiliesBenchmark,
    measure=measure,
    key=("family", "weights"),
    free=("families", "weights"),
    tables=[
        Table(
            title="Kept by autograd for backward, and the relative error of gradients",
            columns=[
                Column("weights", "weights"),
                Column("family", "family"),
                Column("plain\nMB", "plain_bytes", megabytes),
                Column("kept\nMB", "saved_bytes", megabytes),
                Column("of\nplain", "saved_vs_plain", "{:.1%}"),
                Column("gradient\nerror", "gradient_error", "{:.2%}"),
                Column("loss", "loss", "{:.3f}"),
            ],
            gap="weights",
        ),
    ],
    charts=[],
)
