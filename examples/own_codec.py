"""A codec of your own beside the published ones, on a small Llama in one process: `python examples/own_codec.py`.

The codec sends what differs from each feature's running mean. Two boundaries are emulated: the numbers are those of a
pipeline of three ranks. Takes three to six minutes of processor time.
"""

from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.codecs import Codec, GroupInt, Session, StatefulCodec, parse_pair
from lowbit.pipeline import emulate_

STEPS, WARMUP, BATCH, LENGTH = 150, 20, 16, 128


@dataclass(frozen=True, kw_only=True)
class RunningMean(StatefulCodec):
    """What differs from each feature's running mean, coded by `inner`."""

    inner: Codec = field(default_factory=lambda: GroupInt(bits=3, group=64))
    rate: float = 0.1

    def format_nbytes(self, shape: torch.Size) -> int:
        """Return the bytes of a message, which every message of this shape has."""
        return self.inner.nbytes(shape)

    def open(self, *, shape: Any, dtype: torch.dtype, device: Any = "cpu") -> Session:
        """Open one end of a boundary."""
        return RunningMeanSession(self, torch.Size(shape), dtype, torch.device(device))


class RunningMeanSession(Session):
    """One end. Both ends see the same payloads in the same order, so both learn from payloads alone."""

    codec: RunningMean

    def __init__(self, codec: RunningMean, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(codec, shape, dtype, device)
        self.mean = torch.zeros(shape[-1:], device=device)

    def _encode(self, x: Tensor, payload: Tensor, training: bool) -> None:
        self.codec.inner.encode(x.float() - self.mean, out=payload)
        self._learn(payload, training)

    def _decode(self, payload: Tensor, out: Tensor, training: bool) -> None:
        out.copy_(self._learn(payload, training))

    def _learn(self, payload: Tensor, training: bool) -> Tensor:
        y = self.mean + self.codec.inner.decode(payload, shape=self.shape)
        if training:
            self.mean = self.mean.lerp(y.flatten(0, -2).mean(0), self.codec.rate)
        return y

    def state_bytes(self) -> int:
        """Return the memory that this end keeps between messages."""
        return self.mean.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.mean = state["mean"].to(self.device)


def train(windows: Tensor, held_out: Tensor, forward: Codec, backward: Codec) -> tuple[float, float, float]:
    """Train a small Llama; return bits per element forward and backward, and the held-out loss in nats per byte."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=4, vocab_size=256
        )
    )  # fmt: skip
    emulation = emulate_(
        model, at=["model.layers.0", "model.layers.1"], forward=forward, backward=backward, warmup_steps=WARMUP
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        ids = torch.arange(step * BATCH, (step + 1) * BATCH) % len(windows)
        emulation.set_samples(ids)  # for AQ-SGD, which remembers what it sent for each sample
        model(windows[ids], labels=windows[ids]).loss.backward()
        emulation.step()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == WARMUP:
            emulation.traffic.reset()
    bits = emulation.traffic.forward_bits, emulation.traffic.backward_bits
    emulation.remove()
    with torch.no_grad():
        return *bits, model.eval()(held_out, labels=held_out).loss.item()


def main() -> None:
    """Compare formats."""
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    windows, held_out = windows[: 40 * BATCH], windows[-64:]
    own = RunningMean()
    formats = {name: parse_pair(name) for name in ("fp32", "tah-quant-published", "aq-sgd", "transform")}
    formats["your own"] = (own, GroupInt(bits=6, group=32, symmetric=True))
    print(f"{'format':20} {'bits forward':>12} {'backward':>9} {'held-out loss':>14}")
    for name, (forward, backward) in formats.items():
        forward_bits, backward_bits, loss = train(windows, held_out, forward, backward)
        print(f"{name:20} {forward_bits:12.2f} {backward_bits:9.2f} {loss:14.4f}", flush=True)


if __name__ == "__main__":
    main()
