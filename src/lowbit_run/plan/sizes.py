"""Measures a model's parts: parameters, operations and saved activations of a layer and of both ends."""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowbit.escape import shown
from lowbit_run.config import ConfigError
from lowbit_run.train.config import ModelConfig, TrainConfig
from lowbit_run.train.cut import Share, attention_of
from lowbit_run.train.footprint import BatchBytes, LayerSaves, ModelBytes, batch_meter, model_bytes
from lowbit_run.train.model import StageModule, count_layers, hidden_size, hugging_face_config
from lowbit_run.train.weights import build_share, weights_of

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_ROUNDS = 3
_LEAST_SECONDS = 0.3  # of all calls together
_LONG_SECONDS = 3.0  # of a micro-batch in two layers


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
        layer_parameters, first_parameters, last_parameters: trained ones, of a layer (the mean), and of what only the
            first and the last stage have. tied: those of the embedding, if it is trained and the last stage's matrix is
            a copy of it, which counts there; otherwise 0.
        layer_flops, last_flops: of a token's forward in a layer, and after the last layer.
        kept: bytes of each part. batch: those of a micro-batch in it, by what layers save.
        passes, last_passes: time of forward and backward over that of forward, in a layer and after the last: 3; with
            frozen weights, of which backward computes no gradients, 2; in layers that backward computes again 1 more.
        checkpoints: whether it does, in a backward pass that is not split.
    """

    layers: int
    width: int
    layer_parameters: int
    first_parameters: int
    last_parameters: int
    tied: int
    layer_flops: float
    last_flops: float
    kept: ModelBytes
    batch: Callable[[LayerSaves], BatchBytes]
    vocab: int = 0
    passes: int = 3
    last_passes: int = 3
    checkpoints: bool = False

    def parameters(self, layers: int, *, first: bool, last: bool) -> int:
        ends = first * self.first_parameters + last * self.last_parameters - (first and last) * self.tied
        return layers * self.layer_parameters + ends


def measure_sizes(config: TrainConfig, *, vocab: int, autocast: torch.dtype | None) -> ModelSizes:
    """Count the model of a run, without its weights."""
    counts: dict[str, Any] = {"vocab": vocab, "autocast": autocast}
    kept, batch, width = (
        model_bytes(config, **counts),
        batch_meter(config, **counts, splits=True),
        hidden_size(config.model),
    )
    if width is None:
        raise ConfigError(f"model.pretrained is {shown(config.model.pretrained)}, whose config.json has no hidden_size")
    elements, trained = (sum(getattr(one, name) for one in kept.layers) for name in ("elements", "trained"))
    head = kept.tied.elements or max(0, kept.last.elements - width)  # without the norm
    passes = 2 if config.lora.rank else 3
    layer = elements / len(kept.layers)
    return ModelSizes(
        layers=len(kept.layers),
        width=width,
        layer_parameters=trained // len(kept.layers),
        first_parameters=kept.first.trained,
        last_parameters=kept.last.trained + kept.tied.trained,
        tied=kept.tied.trained,
        layer_flops=2 * layer + 2 * config.data.sequence * width,  # a token sees half of the sequence, twice
        last_flops=2 * head,
        passes=passes + config.checkpoints,
        last_passes=passes,
        checkpoints=config.checkpoints,
        kept=kept,
        batch=batch,
        vocab=vocab,
    )


def layer_seconds(
    config: TrainConfig, *, vocab: int, rows: int, autocast: torch.dtype | None, device: torch.device
) -> tuple[float, int, float]:
    """Seconds of forward and backward of one decoder layer on a device, the tokens they are for, and the overhead.

    The overhead is the part of these seconds that does not grow with the tokens: it makes small micro-batches slow.

    Args:
        config: of the run. With adapters, the layer is the run's own, with weights of the format that they have there.
        rows: windows of a micro-batch; only one window is measured if all would take too long.
    """
    sequence, layers = config.data.sequence, 2
    if config.lora.rank:
        layers = min(2, count_layers(config.model))
        share = Share(layers=frozenset(range(layers)), first=False, last=False)
        model = build_share(config, share, vocab=vocab, device=device, autocast=autocast)
    else:
        model, _ = two_layers(config.model, vocab, sequence)
        model = model.to(device, torch.float32 if weights_of(config, autocast) == "fp32" else torch.bfloat16)
    stage = StageModule(model, layers=range(layers), first=False, last=False, autocast=autocast).train()

    def step(count: int) -> None:
        stage.zero_grad(set_to_none=True)
        inputs = torch.randn(count, sequence, stage.width, device=device, requires_grad=True)
        output = stage(inputs)
        output.backward(torch.ones_like(output))

    (one,) = _usual(lambda: step(1), device=device, rounds=1)
    if one * max(2, rows) > _LONG_SECONDS:
        return _usual(lambda: step(1), device=device)[0] / layers, sequence, 0.0
    few, many = 1, max(2, rows)
    both = _usual(lambda: step(few), lambda: step(many), device=device)
    few_seconds, many_seconds = (seconds / layers for seconds in both)
    fixed_seconds = few_seconds - (many_seconds - few_seconds) * few / (many - few)
    seconds = few_seconds if rows == few else many_seconds
    return seconds, rows * sequence, min(max(0.0, fixed_seconds), seconds)


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
