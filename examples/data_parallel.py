"""Your own `DistributedDataParallel` script, with the line that makes its gradients travel in 8 bits.

A byte-level language model learns this very file, each rank on its own windows of it:

    torchrun --nproc-per-node 2 examples/data_parallel.py

The lines that differ from a script with PyTorch's own all-reduce are marked with `# lowbit`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowbit.codecs import parse  # lowbit
from lowbit.gradients import all_reduce_hook  # lowbit

WIDTH, LENGTH, BATCH = 128, 32, 16


class Model(nn.Module):
    """Predicts the next byte; tokens: int64 (batch, sequence), result: float32 (batch, sequence, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.memory = nn.GRU(WIDTH, 2 * WIDTH, batch_first=True)
        self.output = nn.Linear(2 * WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.output(self.memory(self.embedding(tokens))[0])


def batch(text: Tensor, generator: torch.Generator) -> Tensor:
    """Windows of the text, int64 (BATCH, LENGTH + 1)."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def main() -> None:
    """Train, and check that all ranks hold the same model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--codec", default="fp8", help="by name, such as fp8, or in full")
    parser.add_argument("--error-feedback", action="store_true", help="worth it with few bits")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    hook = all_reduce_hook(parse(options.codec), error_feedback=options.error_feedback)  # lowbit
    model.register_comm_hook(None, hook)  # lowbit
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    generator = torch.Generator().manual_seed(rank)
    for step in range(options.steps):
        tokens = batch(text, generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % max(1, options.steps // 4) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    same = all(torch.equal(one, weights) for one in everyone)
    if rank == 0:
        print(f"the same model on all ranks, bit for bit: {'yes' if same else 'NO'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
