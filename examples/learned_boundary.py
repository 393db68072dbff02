"""Learned boundaries, and their floor, a boundary that sends only ids: `python examples/learned_boundary.py`.

A small Llama trains in four stages, emulated in one process, once with each kind of boundary. A learned boundary sends
`rank` numbers of each token; a table adds what the receiver has learned for the token's id. Not counted: the first
tenth of the steps, which crosses exactly, and what keeps the sender's copy of a table equal to the receiver's, whose
gradients arise at both ends. Takes ten minutes.
"""

import argparse
import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.codecs import parse_pair
from lowbit.pipeline import emulate_

WIDTH, LENGTH, BATCH, VOCABULARY, ENDS = 128, 128, 4, 1024, (1, 3, 5)  # the last layers of three of four stages
ROWS = {  # rank (None: no learned boundary), table of ids, formats
    "FP32": (None, False, "fp32"),
    "TransformQuant, default": (None, False, "transform"),
    "rank 16": (16, False, "fp32"),
    "rank 16 + ids": (16, True, "fp32"),
    "rank 16 + ids + INT4": (16, True, "int4 / int4"),
    "ids only": (0, True, "fp32"),
}


class LearnedBoundary(nn.Module):
    """Both ends know `table`; `send` returns what crosses, `rank` numbers of what the table does not say."""

    def __init__(self, rank: int, table: Tensor | None) -> None:
        super().__init__()
        self.table = None if table is None else nn.Embedding.from_pretrained(table.clone(), freeze=False)
        self.ids = torch.empty(0)
        self.send = nn.Linear(WIDTH, rank, bias=False) if rank else None
        self.receive = nn.Linear(rank, WIDTH, bias=False) if rank else None
        if self.send and self.receive:  # a projection at first
            nn.init.orthogonal_(self.send.weight)
            self.receive.weight.data.copy_(self.send.weight.detach().T)

    def forward(self, layer: nn.Module, inputs: object, x: Tensor) -> Tensor:
        """Return what arrives of a layer's output (a forward hook)."""
        known = self.table(self.ids) if self.table else torch.zeros_like(x)
        return known + self.receive(self.send(x - known)) if self.send and self.receive else known


def train(name: str, windows: Tensor, held_out: Tensor, steps: int, seed: int) -> tuple[float, float]:
    """Return bytes of a token at each boundary, and the held-out loss."""
    rank, table, pair = ROWS[name]
    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 344, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY))
    embedding = nn.init.normal_(model.model.embed_tokens.weight, std=0.3).detach()
    order = torch.randint(len(windows), (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    start = embedding if table else None
    learned = nn.ModuleList([] if rank is None else [LearnedBoundary(rank, start) for _ in ENDS])
    model.learned = learned
    for layer, boundary in zip(ENDS, learned, strict=False):
        model.model.layers[layer].register_forward_hook(boundary)
    places = [f"learned.{i}.send" for i in range(len(learned))] or [f"model.layers.{layer}" for layer in ENDS]
    forward, backward = parse_pair(pair)
    warmup, crosses = steps // 10, rank is None or rank > 0
    formats = {"forward": forward, "backward": backward, "in_evaluation": False}
    emulation = emulate_(model, at=places, warmup_steps=warmup, **formats) if crosses else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20, 2 - 2 * step / steps))

    def loss_of(ids: Tensor) -> Tensor:
        for boundary in learned:
            boundary.ids = ids
        return model(ids, labels=ids).loss

    for step, batch in enumerate(order):
        if emulation and step == warmup:
            emulation.traffic.reset()
        loss_of(windows[batch]).backward()
        if emulation:
            emulation.step()
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    sent = emulation.traffic.forward_bytes + emulation.traffic.backward_bytes if emulation else 0
    with torch.no_grad():
        model.eval()
        loss = torch.stack([loss_of(part) for part in held_out.split(8)]).mean()
    return sent / (order[warmup:].numel() * LENGTH * len(ENDS)) + 2 * table, loss.item()  # an id has two bytes


def main() -> None:
    """Train with each kind of boundary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    words = re.findall(r"\w+|\W", "\n\n".join(topics.values()))
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    ids = torch.tensor([known.get(word, VOCABULARY - 1) for word in words])
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    print(f"{'boundary':24} {'bytes a token':>14} {'times fewer':>12} {'held-out loss':>14}")
    for name in ROWS:
        sent, loss = train(name, windows[:-64], windows[-64:], given.steps, given.seed)
        print(f"{name:24} {sent:14.1f} {8 * WIDTH / sent:12.1f} {loss:14.4f}", flush=True)


if __name__ == "__main__":
    main()
