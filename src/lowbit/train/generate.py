"""A line of text from a trained model."""

from __future__ import annotations

from pathlib import Path

import torch


def generate(
    folder: str | Path,
    prompt: str,
    *,
    tokens: int = 80,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Continue a prompt with the model that a run saved.

    Args:
        folder: model and tokenizer in Hugging Face format. prompt: at least one character.
        tokens: how many to add. temperature: 0 takes the likeliest token each time. seed: of the sampling.

    Returns:
        Prompt and continuation.

    Raises:
        ValueError: an empty prompt.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not prompt:
        raise ValueError("prompt is ''; allowed: at least one character")
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    window = model.config.max_position_embeddings
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(input_ids=ids[:, -window:], use_cache=False).logits[0, -1]
            ids = torch.cat([ids, _choose(logits, temperature, generator).view(1, 1)], dim=1)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
