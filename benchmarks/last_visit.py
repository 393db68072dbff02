"""AQ-SGD beside token anchors at equal bytes: `python -m benchmarks.last_visit --model FOLDER --text FILE`.

All weights of a pretrained model are fine-tuned exactly, on a few samples for some epochs. What leaves a quarter, half
and three quarters of the layers also crosses boundaries with each format, forward only. In the first epoch it crosses
exactly, so that AQ-SGD keeps it, and anchors are fitted. Each later epoch has a line for each format: signal-to-noise
ratio of what arrives, mean over tokens and boundaries, ± its standard deviation over steps, and the bytes that the
sending ends of the boundaries keep.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.anchors import STAGES, windows
from benchmarks.real import opened
from lowbit.codecs import AQSGD, Codec, GroupInt, TransformQuant
from lowbit.pipeline import TokenAnchor, emulate_
from lowbit_lab.bench.training import boundary_modules


class Probe(nn.Module):
    """Boundaries with one format, beside a model."""

    def __init__(self, warmup_steps: int, codec: Codec, anchor: TokenAnchor | None = None) -> None:
        super().__init__()
        self.ends = nn.ModuleList(nn.Identity() for _ in range(STAGES - 1))
        at = [f"ends.{i}" for i in range(STAGES - 1)]
        self.emulation = emulate_(self, at=at, forward=codec, warmup_steps=warmup_steps, anchor=anchor)
        self.decibels: list[float] = []

    @torch.no_grad()
    def cross(self, boundary: int, x: Tensor) -> None:
        """Send an activation."""
        error = (self.ends[boundary](x) - x).square().sum(-1)
        self.decibels.append(float((10 * (x.square().sum(-1) / error.clamp_min(1e-30)).log10()).mean()))


def main() -> None:
    """Fine-tune, and print a line for each format and epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument("--text", required=True, type=Path, help="file of the samples")
    parser.add_argument("--lr", type=float, default=5e-5)
    for name, default in {"samples": 64, "tokens": 128, "batch": 8, "epochs": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.samples % given.batch or given.samples < 2 * given.batch:
        parser.error(f"--samples is {given.samples}; allowed: a multiple of --batch {given.batch}, at least twice it")
    torch.set_num_threads(1)
    [(_, tokenizer, load)] = opened([given.model])
    model = load().train()
    ids, steps = windows(tokenizer, given.text, given.samples, given.tokens), given.samples // given.batch
    anchor = TokenAnchor(embedding=model.get_input_embeddings().weight.detach().clone())
    probes = {}
    for bits in (2, 3):
        inner, same = GroupInt(bits=bits, group=64), TransformQuant(bits=bits + 0.5)  # which has as many bytes
        probes |= {
            f"GroupInt {bits}": Probe(steps, inner),
            f"AQ-SGD {bits}": Probe(0, AQSGD(inner=inner)),  # its first visits are exact
            f"TransformQuant {bits + 0.5}": Probe(steps, same),
            f"TransformQuant {bits + 0.5}, anchors": Probe(steps, same, anchor),
        }
    for i, name in enumerate(boundary_modules(model, STAGES)):
        for each in probes.values():
            model.get_submodule(name).register_forward_hook(lambda m, a, x, i=i, each=each: each.cross(i, x.detach()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(1, given.epochs + 1):
        losses = []
        for probe in probes.values():
            probe.emulation.traffic.reset()
            probe.decibels.clear()
        for batch in torch.randperm(steps * given.batch, generator=generator).split(given.batch):
            for probe in probes.values():
                probe.emulation.set_samples(batch)
                probe.emulation.set_tokens(ids[batch])
            loss = model(input_ids=ids[batch], labels=ids[batch], use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
            for probe in probes.values():
                probe.emulation.step()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)  # noqa: T201
        for name, probe in probes.items() if epoch > 1 else ():
            traffic, noise = probe.emulation.traffic, torch.tensor(probe.decibels).view(steps, -1).mean(1)
            bits, kept = traffic.forward_bits, probe.emulation.state_bytes() / 2e6
            print(f"  {name}: {bits:.2f} bits, {noise.mean():.2f} ± {noise.std():.2f} dB, {kept:.2f} MB")  # noqa: T201


if __name__ == "__main__":
    main()
