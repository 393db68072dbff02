"""Fine-tune a Hugging Face model with one added line, and see the memory fall.

    python examples/fine_tune.py my_model          # any local folder that AutoModelForCausalLM takes
    python examples/fine_tune.py                   # a tiny Llama, made here

The model learns this very file. The lines that differ from a script without lowbit are marked with `# lowbit`; the
bytes that are printed are those that autograd keeps of one batch between forward and backward.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lowbit.activations import compress_saved_, counted  # lowbit


def load(folder: str) -> tuple[torch.nn.Module, Tensor]:
    """The model in training mode, and the text as token ids (tokens,)."""
    text = Path(__file__).read_text("utf-8")
    torch.manual_seed(0)
    if folder:
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(), ids
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
    )  # fmt: skip
    return LlamaForCausalLM(config).train(), torch.tensor(list(text.encode()))


def main() -> None:
    """Fine-tune."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="local folder in Hugging Face format")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--plain", action="store_true", help="without the line, to compare")
    options = parser.parse_args()
    model, ids = load(options.model)
    if not options.plain:
        print(compress_saved_(model))  # lowbit: the line
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    kept = 0
    for step in range(options.steps):
        starts = torch.randint(len(ids) - options.sequence, (4, 1))
        tokens = ids[starts + torch.arange(options.sequence)]
        if not kept:
            with counted(model) as count:  # lowbit: only to show what is kept; a batch costs the same every time
                model(input_ids=tokens, labels=tokens)
            kept = count.total
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, options.steps // 4) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, autograd keeps {kept / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
