"""Fine-tune a Hugging Face model with one added line, and see the memory fall.

    python examples/fine_tune.py my_model --output tuned   # any local folder that AutoModelForCausalLM takes
    python examples/fine_tune.py                           # a tiny Llama, made here

The model learns this very file. Only one line makes the difference; what else is marked with `# lowbit` shows it, in
bytes that autograd keeps of one batch between forward and backward.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lowbit.activations import compress_saved_, counted  # lowbit


def load(folder: str) -> tuple[Any, Any, Tensor]:
    """The model in training mode, its tokenizer (None: bytes), and the text as token ids (tokens,)."""
    text = Path(__file__).read_text("utf-8")
    torch.manual_seed(0)
    if folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(text, return_tensors="pt").input_ids[0]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.train(), tokenizer, ids
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config).train(), None, torch.tensor(list(text.encode()))


def batch(ids: Tensor, sequence: int) -> Tensor:
    """Windows of the text, int64 (4, sequence)."""
    starts = torch.randint(len(ids) - sequence, (4, 1))
    return ids[starts + torch.arange(sequence)]


def kept_bytes(model: torch.nn.Module, tokens: Tensor) -> int:
    """Bytes that autograd keeps of a batch."""
    with counted(model) as kept:  # lowbit
        model(input_ids=tokens, labels=tokens)
    return kept.total


def main() -> None:
    """Fine-tune."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="local folder in Hugging Face format")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--lr", type=float, help="2e-5; for the tiny Llama, which starts from nothing, 2e-3")
    parser.add_argument("--output", default="", help="folder for the fine-tuned model")
    options = parser.parse_args()
    model, tokenizer, ids = load(options.model)
    if not 2 <= options.sequence < len(ids):
        parser.error(
            f"--sequence is {options.sequence}; allowed: 2 to {len(ids) - 1}, for the text has {len(ids)} tokens"
        )
    usual = 2e-5 if options.model else 2e-3
    rate = usual if options.lr is None else options.lr
    before = kept_bytes(model, batch(ids, options.sequence))
    compress_saved_(model)  # lowbit: the line
    after = kept_bytes(model, batch(ids, options.sequence))
    print(f"autograd keeps {after / 1e6:.1f} MB of a batch; it was {before / 1e6:.1f} MB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(options.steps):
        tokens = batch(ids, options.sequence)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, options.steps // 4) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if options.output:
        model.save_pretrained(options.output)
        if tokenizer is not None:
            tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
