"""Measures a model's parts: parameters, operations and saved activations of a layer and of both ends."""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lowbit.activations import counted
from lowbit.config import ConfigError
from lowbit.terminal import shown
from lowbit.train.config import ModelConfig
from lowbit.train.cut import attention_of
from lowbit.train.model import StageModule, hugging_face_config, next_token_loss

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TOKENS = 64  # of the sample whose saved activations are counted: these are proportional to the tokens
_ROUNDS = 3
_LEAST_SECONDS = 0.3  # of all calls together
_LONG_SECONDS = 3.0  # of a micro-batch in two layers
STATE_BYTES = 16
"""Bytes of a parameter: float32 weight and gradient, and two float32 states of AdamW."""
MOMENT_BYTES = 8
"""Bytes of the two states."""


def parse_bytes(text: str, name: str = "budget") -> int:
    """The number in "24gb", "1.5gib", "300mb" or "1000000"; ConfigError, with `name`, for another text."""
    match = re.fullmatch(r"([0-9.]+) *([a-z]*)", text.strip().lower())
    try:
        return int(float(match[1]) * _UNITS[match[2]])  # pyright: ignore[reportOptionalSubscript]
    except (TypeError, ValueError, KeyError):
        raise ConfigError(f"{name} is {shown(text)}; allowed: bytes, such as 24gb, 1.5gib or 800mb") from None


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A model in numbers.

    Attributes:
        layers: number of decoder layers. width: elements of a token's activation.
        layer_parameters, first_parameters, last_parameters: of a layer, and of what only the first and the last stage
            have. tied: those of the embedding, if the last stage's matrix is a copy of it; otherwise 0.
        layer_flops, last_flops: of a token's forward in a layer, and after the last layer; backward takes twice that.
        layer_saved, last_saved: bytes that autograd saves of a token in a layer, and after the last layer.
        logits: bytes of a token's logits and of their gradient.
    """

    layers: int
    width: int
    layer_parameters: int
    first_parameters: int
    last_parameters: int
    tied: int
    layer_flops: float
    last_flops: float
    layer_saved: float
    last_saved: float
    logits: int

    def parameters(self, layers: int, *, first: bool, last: bool) -> int:
        ends = first * self.first_parameters + last * self.last_parameters - (first and last) * self.tied
        return layers * self.layer_parameters + ends


def measure_sizes(model: ModelConfig, *, vocab: int, sequence: int, precision: Literal["fp32", "bf16"]) -> ModelSizes:
    """Measure two layers of a model with random weights on a few tokens."""
    whole, layers = two_layers(model, vocab, sequence)
    autocast = torch.bfloat16 if precision == "bf16" else None

    def stage(count: int, *, first: bool = False, last: bool = False) -> StageModule:
        return StageModule(whole, layers=range(count), first=first, last=last, autocast=autocast).train()

    one, two, first, last = stage(1), stage(2), stage(1, first=True), stage(1, last=True)
    parameters = [sum(p.numel() for p in module.parameters()) for module in (one, two, first, last)]
    saved = [_saved(module, min(sequence, _TOKENS)) for module in (one, two, last)]
    layer = parameters[1] - parameters[0]
    head = sum(p.numel() for p in last.head.parameters()) if last.head is not None else 0
    width = one.width
    return ModelSizes(
        layers=layers,
        width=width,
        layer_parameters=layer,
        first_parameters=parameters[2] - parameters[0],
        last_parameters=parameters[3] - parameters[0],
        tied=whole.get_input_embeddings().weight.numel() if getattr(whole.config, "tie_word_embeddings", False) else 0,
        layer_flops=2.0 * layer + 2.0 * sequence * width,  # attention: a token sees half of the sequence, twice
        last_flops=2.0 * head,
        layer_saved=saved[1] - saved[0],
        last_saved=saved[2] - saved[0],
        logits=2 * 4 * last.vocab,
    )


def layer_seconds(
    model: ModelConfig, *, vocab: int, sequence: int, rows: int, autocast: torch.dtype | None, device: torch.device
) -> tuple[float, int, float]:
    """Seconds of forward and backward of one decoder layer on a device, the tokens they are for, and the overhead.

    The overhead is the part of these seconds that does not grow with the tokens: it makes small micro-batches slow.

    `rows`: windows of a micro-batch; only one window is measured if all would take too long.
    """
    whole, _ = two_layers(model, vocab, sequence)
    stage = StageModule(whole, layers=range(2), first=False, last=False, autocast=autocast).train().to(device)

    def step(count: int) -> None:
        stage.zero_grad(set_to_none=True)
        inputs = torch.randn(count, sequence, stage.width, device=device, requires_grad=True)
        output = stage(inputs)
        output.backward(torch.ones_like(output))

    (one,) = _usual(lambda: step(1), device=device, rounds=1)
    if one * max(2, rows) > _LONG_SECONDS:
        return _usual(lambda: step(1), device=device)[0] / 2, sequence, 0.0
    few, many = 1, max(2, rows)
    both = _usual(lambda: step(few), lambda: step(many), device=device)
    few_seconds, many_seconds = (seconds / 2 for seconds in both)
    of_any = few_seconds - (many_seconds - few_seconds) * few / (many - few)
    seconds = few_seconds if rows == few else many_seconds
    return seconds, rows * sequence, min(max(0.0, of_any), seconds)


def optimizer_ns(device: torch.device | None = None) -> float:
    """Nanoseconds that AdamW with clipping takes for one parameter on this machine; on the CPU by default."""
    parameter = nn.Parameter(torch.zeros(1 << 20, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])

    def step() -> None:
        nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()

    return 1e9 * _usual(step, device=device)[0] / parameter.numel()


def two_layers(model: ModelConfig, vocab: int, sequence: int) -> tuple[Any, int]:
    """A model with random weights, cut to two layers, and the number of layers of the whole model."""
    from transformers import AutoModelForCausalLM

    config: Any = hugging_face_config(model, vocab=vocab, sequence=sequence)
    layers, config.num_hidden_layers = config.num_hidden_layers, 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    whole = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config), trust_remote_code=False)
    return whole.float(), layers


def _usual(*works: Callable[[], object], device: torch.device | None = None, rounds: int = _ROUNDS) -> list[float]:
    """Median seconds of each call; calls take turns, and the first round, which may compile, is left out."""
    times: list[list[float]] = [[] for _ in works]
    while len(times[0]) <= rounds or sum(sum(each[1:]) for each in times) < _LEAST_SECONDS * len(works):
        for each, work in zip(times, works, strict=True):
            start = time.perf_counter()
            work()
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
            each.append(time.perf_counter() - start)
    return [statistics.median(each[1:]) for each in times]


def _saved(module: StageModule, tokens: int) -> float:
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    inputs = torch.randn(1, tokens, module.width, requires_grad=True)
    with counted(module) as kept:
        output = module(inputs)
        if module.last:
            output = next_token_loss(output, ids)
    total = sum(size for (kind, _), size in kept.modules.items() if kind != "weights")
    del output
    return total / tokens
