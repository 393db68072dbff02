"""Speed of a codec, measured in turns with a copy, eager PyTorch, a checksum and a decoder layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowbit import kernels
from lowbit.codecs import Codec, Session
from lowbit.codecs.speed import coding_operations
from lowbit.report import spread
from lowbit.train.config import ModelConfig
from lowbit.train.model import StageModule, build_model
from lowbit.wire.checksum import CHECKSUM_BYTES, Checksums
from lowbit_lab.bench import timing

REFERENCE_ROUNDS = LAYER_ROUNDS = 3
HEAD = 128  # width of a layer's attention heads, if it divides the channels


class Inputs:
    """Equal tensors, more than the caches hold, and buffers for decoded ones."""

    def __init__(self, x: Tensor) -> None:
        self.count = timing.buffers_for(x.numel() * x.element_size(), x.device)
        self.tensors = [x.clone() for _ in range(self.count)]
        self.outs = [torch.zeros_like(x) for _ in range(self.count)]
        self.nbytes = x.numel() * x.element_size()


def speeds(codec: Codec, inputs: Inputs, rounds: int, *, reference: bool, layer: nn.Module | None) -> dict[str, float]:
    """Measure speeds and their spreads."""
    xs, outs = inputs.tensors, inputs.outs
    encode, decode, size = coding_operations(codec, xs, outs)

    def copy(i: int) -> None:
        outs[i].copy_(xs[i])

    operations = {"copy": copy, "encode": encode, "decode": decode}
    operations["checksum"] = _checksum(size, inputs.count, xs[0].device)
    if reference:
        operations |= {"reference_encode": _eagerly(encode), "reference_decode": _eagerly(decode)}
    fewer = {name: REFERENCE_ROUNDS for name in operations if name.startswith("reference")}
    if layer is not None:
        operations["layer"], fewer["layer"] = _forward_and_backward(layer, xs), LAYER_ROUNDS
    seconds = timing.in_turn(operations, rounds=rounds, buffers=inputs.count, fewer=fewer, device=xs[0].device)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    coding, checksum = medians["encode"] + medians["decode"], medians.pop("checksum")
    row = {"checksum_gb_s": size / checksum / 1e9, "checksum_share": 2 * checksum / coding}
    if layer is not None:
        row["layer_seconds"] = medians.pop("layer")
        row["share_of_layer"] = coding / row["layer_seconds"]
    row |= {f"{name}_gb_s": inputs.nbytes / s / 1e9 for name, s in medians.items()}
    for name in ("copy", "encode", "decode"):
        row[f"{name}_best_gb_s"] = inputs.nbytes / min(seconds[name]) / 1e9
        row[f"{name}_spread"] = spread(seconds[name])
    for name in ("encode", "decode"):
        shares = [c / s for c, s in zip(seconds["copy"], seconds[name], strict=True)]
        row[f"{name}_share_of_copy"] = share = statistics.median(shares)
        row[f"{name}_share_of_rate"] = share * (1 + size / inputs.nbytes) / 2
    return row


def _checksum(size: int, count: int, device: torch.device) -> timing.Operation:
    """Return an operation: the checksum of `size` bytes, as a transport computes it at either end, on host or GPU."""
    checksums, room = Checksums("bench"), size + CHECKSUM_BYTES
    messages = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(count)]
    seal = checksums.seal_there if device.type == "cuda" else checksums.seal
    return lambda i: seal(messages[i], i)


def ends_of(codec: Codec, x: Tensor) -> tuple[Session, Session]:
    """Open sessions of a sender and a receiver of tensors such as `x`."""
    sender, receiver = (codec.open(shape=x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    return sender, receiver


def layer_config(channels: int) -> ModelConfig:
    """Return the config of a Llama with one layer.

    Raises:
        ConfigError: an odd number of channels.
    """
    return ModelConfig(dim=channels, layers=1, heads=channels // math.gcd(channels, HEAD))


def decoder_layer(x: Tensor) -> nn.Module:
    """Return a decoder layer for tensors such as x (sequences, tokens, channels)."""
    _, tokens, channels = x.shape
    model = build_model(layer_config(channels), vocab=2, sequence=tokens, seed=0)
    return StageModule(model, layers=range(1), first=False, last=False).decoder


def _forward_and_backward(layer: nn.Module, xs: Sequence[Tensor]) -> timing.Operation:
    """Return an operation: forward and backward, with gradients for the input and all weights."""

    def run(i: int) -> None:
        x = xs[i].detach().requires_grad_()
        y = layer(inputs_embeds=x, use_cache=False).last_hidden_state
        torch.autograd.grad(y, [x, *layer.parameters()], xs[i])

    return run


def _eagerly(operation: timing.Operation) -> timing.Operation:
    def run(i: int) -> None:
        with kernels.backend("reference"):
            operation(i)

    return run
