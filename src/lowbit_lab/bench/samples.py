"""Tensors to measure codecs on: random numbers, and activations and gradients of language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.train.config import DataConfig, ModelConfig
from lowbit.train.data import load_data
from lowbit.train.model import build_model, count_layers, next_token_loss, vocabulary
from lowbit_lab.bench.training import TrainingRecipe, boundary_modules, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEGREES_OF_FREEDOM = 3
OUTLIER_CHANNELS, OUTLIER_SCALE = 0.005, 30.0
SEQUENCE, BATCH = 256, 4


def drawn(kind: str, shape: Sequence[int], *, seed: int = 0) -> Tensor:
    """Draw a float32 tensor of random numbers.

    Args:
        kind: "gaussian" (standard normal), "student-t" (3 degrees of freedom: heavy tails anywhere) or "outliers"
            (normal, but one channel in 200, the same ones for every token, is 30 times as large, as in large language
            models).
        shape: of the tensor; channels last.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if kind == "gaussian":
        return x
    if kind == "student-t":
        squares = torch.randn(DEGREES_OF_FREEDOM, *shape, generator=generator).square()
        return x / (squares.mean(0)).sqrt()
    if kind == "outliers":
        channels = shape[-1]
        chosen = torch.randperm(channels, generator=generator)[: max(1, round(channels * OUTLIER_CHANNELS))]
        x[..., chosen] *= OUTLIER_SCALE
        return x
    raise ValueError(f"kind is {kind!r}; allowed: 'gaussian', 'student-t', 'outliers'")


def real(source: str, *, steps: int) -> list[Tensor]:
    """Return activations between the layers of a language model, float32 (batch, tokens, channels) each.

    Args:
        source: a local Hugging Face folder, whose model is run on Python's standard library; or empty, for a small
            Llama that is first trained on it.
        steps: of that training.
    """
    if source and not Path(source).is_dir():
        raise ValueError(f"activations are {source!r}; allowed: a folder with a model")
    data = DataConfig(tokenizer=source or "bytes", sequence=SEQUENCE, batch=BATCH, max_bytes=4_000_000)
    config = ModelConfig(pretrained=source)
    if source:
        tokenizer = load_data(data).tokenizer
        model = build_model(config, vocab=vocabulary(config, tokenizer.size), sequence=SEQUENCE, seed=0)
    else:
        model, _ = train(TrainingRecipe(model=config, data=data, steps=steps, eval_windows=1), seed=0)
    inputs, _ = load_data(data).held_out.batch(torch.arange(BATCH))
    return capture(model, inputs, stages=count_layers(config))[0]


def capture(
    model: PreTrainedModel, inputs: Tensor, targets: Tensor | None = None, *, stages: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a model and return the tensors that would cross a pipeline's boundaries.

    Args:
        inputs, targets: token ids (batch, tokens); without targets, nothing runs backward.

    Returns:
        Activations and gradients of the mean loss, by boundary: float32 (batch, tokens, channels) each.
    """
    forward: list[Tensor] = []
    backward: dict[int, Tensor] = {}

    def keep(module: Any, args: Any, output: Any) -> None:
        x, index = output if isinstance(output, Tensor) else output[0], len(forward)
        forward.append(x.detach().float().clone())
        if x.requires_grad:
            x.register_hook(lambda gradient: backward.update({index: gradient.float().clone()}))

    model.eval().requires_grad_(False)
    embedding = model.get_input_embeddings()
    embedding.requires_grad_(targets is not None)  # makes a graph without gradients of all weights
    handles = [model.get_submodule(name).register_forward_hook(keep) for name in boundary_modules(model, stages)]
    try:
        logits = model(input_ids=inputs, use_cache=False).logits
        if targets is not None:
            next_token_loss(logits, targets).backward()
    finally:
        for handle in handles:
            handle.remove()
        embedding.zero_grad()
    return forward, [backward[i] for i in sorted(backward)]


def filled(tensors: Sequence[Tensor], numel: int) -> Tensor:
    """Repeat the tokens of all tensors to fill one tensor (1, tokens, channels) of about `numel` elements."""
    channels = tensors[0].shape[-1]
    tokens = torch.cat([t.reshape(-1, channels) for t in tensors if t.shape[-1] == channels])
    wanted = max(1, numel // channels)
    return tokens.repeat(-(-wanted // len(tokens)), 1)[:wanted][None].contiguous()
