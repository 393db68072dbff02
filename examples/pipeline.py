"""Your own `torch.distributed.pipelining` script, with the few lines that make it send few bits.

A byte-level language model, cut into one stage for each rank, learns this very file:

    torchrun --nproc-per-node 2 examples/pipeline.py

The lines that differ from a script with PyTorch's own stage are marked with `# lowbit`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from lowbit.codecs import TransformQuant  # lowbit
from lowbit.pipeline import LowBitStage  # lowbit: where it said PipelineStage

WIDTH, LENGTH, BATCH, MICRO_BATCHES = 128, 64, 16, 4


class Layer(nn.Module):
    """Causal attention and a feed-forward network, both residual; x: float32 (batch, sequence, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.feed_forward(self.norms[1](x))


class Embedding(nn.Module):
    """Bytes, int64 (batch, sequence), to vectors that know their position."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Float32 (batch, sequence, WIDTH)."""
        return self.bytes(tokens) + self.positions.weight


def stage_module(rank: int, world: int) -> nn.Module:
    """What this rank computes: two layers, after the embedding or before the output where it is at an end."""
    first = [Embedding()] if rank == 0 else []
    last = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)] if rank == world - 1 else []
    return nn.Sequential(*first, Layer(), Layer(), *last)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Train, and show on the last rank how the loss falls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module = stage_module(rank, world)

    stage = LowBitStage(  # lowbit
        module, rank, world, torch.device("cpu"),
        forward=TransformQuant(),  # lowbit: activations in 3.2 bits an element
        backward=TransformQuant(step="message"),  # lowbit: gradients in 2.1 bits
        warmup_steps=steps // 4,  # lowbit: from scratch, the first steps at full precision
    )  # fmt: skip

    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    generator = torch.Generator().manual_seed(0)  # the same batches on every rank

    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        batch = text[starts + torch.arange(LENGTH + 1)]
        losses: list[Tensor] = []
        schedule.step(
            *([batch[:, :-1].contiguous()] if rank == 0 else []),  # PyTorch 2.11 compares strides
            target=batch[:, 1:] if rank == world - 1 else None,
            losses=losses,
        )
        optimizer.step()
        optimizer.zero_grad()
        if losses and (step % 10 == 9 or step == steps - 1):
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.3f}", flush=True)

    if rank == 0:
        megabytes, bits = stage.traffic.forward_bytes / 1e6, stage.traffic.forward_bits
        print(f"rank 0 sent {megabytes:.2f} MB, {bits:.1f} bits an element")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
