"""One training run in one process, with the pipeline's codecs at the places where stages would be cut.

Runs of the same recipe and seed start from the same weights and see the same samples in the same order, whatever their
boundaries carry, so that losses can be compared in pairs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.bench.replicas import Replicas
from lowbit.codecs import Cast, Codec, parse, parse_pair
from lowbit.pipeline import Emulation, Traffic, emulate_
from lowbit.train.config import DataConfig, ModelConfig, OptimizerConfig, PipelineConfig
from lowbit.train.data import Data, Order, Windows, load_data
from lowbit.train.layout import make_layout
from lowbit.train.model import build_model, vocabulary
from lowbit.train.optim import learning_rate, make_optimizer, set_learning_rate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CURVE_POINTS = 40
GRADIENTS = "gradients:"
"""Before a format that gradients are kept and all-reduced in, in place of a boundary's."""
ACTIVATIONS = "activations:"
"""Before the name of a policy for what autograd keeps, in place of a boundary's format."""
POLICIES = {
    "low-bit": LayerAware(),
    "norm-4": LayerAware(norm=4),
    "attention-8": LayerAware(attention=8),
    "uniform": LayerAware(norm=4, attention=4),
}

OnStep = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What runs that are compared with each other have in common.

    Args:
        model, data, optimizer: as in `lowbit train`.
        steps: optimizer steps; warmup_steps: the first ones, with full precision at the boundaries.
        stages: how many the pipeline would have, one boundary fewer.
        samples: distinct windows to train on, seen again in every epoch; 0: all of the text.
        eval_windows: held-out windows of the final evaluation, spread evenly over the text.
        start: file with weights to start from; empty: random ones.
        device: "cpu" or "cuda" (the current device); precision: "fp32", or "bf16" for matrix products.
    """

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    steps: int
    warmup_steps: int
    stages: int
    samples: int = 0
    eval_windows: int = 256
    start: str = ""
    device: str = "cpu"
    precision: str = "fp32"


def codec_pair(boundary: str, backward: str = "") -> tuple[Codec, Codec]:
    """Codecs each way, as `parse_pair` has it; float32 where gradients or saved activations have a format instead."""
    plain = boundary.startswith((GRADIENTS, ACTIVATIONS))
    return (Cast(), Cast()) if plain else parse_pair(boundary, backward)


def formats_of(boundary: str, backward: str = "") -> dict[str, str]:
    """What boundaries carry each way, in full: `forward` and `backward` of a row."""
    forward, back = codec_pair(boundary, backward)
    return {"forward": repr(forward), "backward": repr(back)}


def gradient_codec(boundary: str) -> Codec | None:
    """What gradients are kept and all-reduced in ("gradients:fp8"); None for a boundary's format.

    Raises:
        ValueError: an unknown format, or one with state.
    """
    if not boundary.startswith(GRADIENTS):
        return None
    codec = parse(boundary.removeprefix(GRADIENTS))
    if codec.stateful:
        raise ValueError(f"{boundary!r} keeps something between messages; allowed: codecs without state")
    return codec


def activation_policy(boundary: str) -> LayerAware | None:
    """How autograd keeps activations ("activations:low-bit"); None for a boundary's format.

    Raises:
        ValueError: an unknown policy.
    """
    if not boundary.startswith(ACTIVATIONS):
        return None
    name = boundary.removeprefix(ACTIVATIONS)
    if name not in POLICIES:
        allowed = ", ".join(ACTIVATIONS + policy for policy in POLICIES)
        raise ValueError(f"boundary is {boundary!r}; allowed: {allowed}")
    return POLICIES[name]


def train(
    recipe: Recipe,
    *,
    forward: Codec,
    backward: Codec,
    seed: int,
    gradients: Codec | None = None,
    activations: LayerAware | None = None,
    on_step: OnStep | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train once and evaluate on the held-out text.

    Args:
        recipe: the run; forward, backward: what every boundary carries.
        seed: of weights and data order.
        gradients: what gradients are kept and all-reduced in (`lowbit.bench.replicas`); None: full precision.
        activations: how autograd keeps them (`compress_saved_`); None: as they are.
        on_step: called after every step with the number of steps done and the loss.

    Returns:
        The trained model without emulation, and a mapping: `loss` (held-out, nats a token, the trained model by
        itself), `loss_through_codecs` (None for formats that need known samples), `bits_forward`, `bits_backward` (an
        element, once warm-up is over), `bits_forward_run` (over the whole run), `state_bytes` (at one end of all
        boundaries), `curve` (pairs of step and mean training loss), `seconds`.
    """
    started = time.perf_counter()
    data, model = _prepare(recipe, seed)
    emulation = emulate_(
        model,
        at=boundary_modules(model, recipe.stages),
        forward=forward,
        backward=backward,
        warmup_steps=recipe.warmup_steps,
    )
    replicas = Replicas(model, gradients) if gradients else None
    compressed = compress_saved_(model, activations) if activations else None
    losses, result = _steps(recipe, model, emulation, data.train, seed, replicas, on_step)
    if compressed is not None:
        compressed.remove()
    through = None if forward.needs_key else evaluate(model, data.held_out, recipe)
    emulation.remove()
    result |= {
        "loss": evaluate(model, data.held_out, recipe),
        "loss_through_codecs": through,
        "curve": _curve(losses),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return model, result


def boundary_modules(model: PreTrainedModel, stages: int) -> list[str]:
    """Names of the decoder layers that end a stage, but for the last stage."""
    count = model.config.num_hidden_layers
    lists = (name for name, m in model.named_modules() if isinstance(m, nn.ModuleList))
    layers = next(name for name in lists if len(model.get_submodule(name)) == count)  # pyright: ignore[reportArgumentType]
    plan = make_layout(PipelineConfig(schedule="GPipe"), ranks=stages, layers=count)
    return [f"{layers}.{plan.layers_of(stage)[-1]}" for stage in range(stages - 1)]


@torch.no_grad()
def evaluate(model: PreTrainedModel, held_out: Windows, recipe: Recipe) -> float:
    """Mean loss, in nats a token, over windows spread evenly over the held-out text."""
    count = min(recipe.eval_windows, len(held_out))
    ids = torch.arange(count) * len(held_out) // count
    model.eval()
    total = sum(_loss(model, *held_out.batch(part), recipe).item() * len(part) for part in ids.split(8))
    model.train()
    return total / count


def _prepare(recipe: Recipe, seed: int) -> tuple[Data, PreTrainedModel]:
    data = load_data(recipe.data)
    vocab = vocabulary(recipe.model, data.tokenizer.size)
    model = build_model(recipe.model, vocab=vocab, sequence=recipe.data.sequence, seed=seed)
    if recipe.start:
        model.load_state_dict(torch.load(recipe.start, map_location="cpu", weights_only=True))
    nn.Module.to(model, torch.device(recipe.device))
    return data, model.train()


def _steps(
    recipe: Recipe,
    model: PreTrainedModel,
    emulation: Emulation,
    windows: Windows,
    seed: int,
    replicas: Replicas | None,
    on_step: OnStep | None,
) -> tuple[list[float], dict[str, Any]]:
    """All steps: their losses, and what the boundaries sent."""
    samples = min(recipe.samples or len(windows), len(windows))
    order = Order(samples=samples, batch=recipe.data.batch, seed=seed)
    optimizer = make_optimizer(model.parameters(), recipe.optimizer)
    losses, in_warmup = [], replace(emulation.traffic)
    for step in range(recipe.steps):
        if step == recipe.warmup_steps:
            in_warmup = replace(emulation.traffic)
        ids = order.ids(step)
        emulation.set_samples(ids)
        set_learning_rate(optimizer, learning_rate(recipe.optimizer, step=step, steps=recipe.steps))
        if replicas is None:
            loss = _loss(model, *windows.batch(ids), recipe)
            loss.backward()
            if recipe.optimizer.clip:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = replicas.backward(partial(_loss, model, recipe=recipe), *windows.batch(ids))
            replicas.step(optimizer, recipe.optimizer.clip)
        emulation.step()
        losses.append(loss.item())
        if on_step:
            on_step(step + 1, losses[-1])
    run = emulation.traffic
    after = _since(in_warmup, run)
    return losses, {
        "bits_forward": after.forward_bits,
        "bits_backward": after.backward_bits,
        "bits_forward_run": run.forward_bits,
        "bits_backward_run": run.backward_bits,
        "state_bytes": emulation.state_bytes(),
    }


def _since(earlier: Traffic, later: Traffic) -> Traffic:
    return Traffic(**{f.name: getattr(later, f.name) - getattr(earlier, f.name) for f in fields(Traffic)})


def _loss(model: PreTrainedModel, inputs: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    autocast = recipe.precision == "bf16"
    with torch.autocast(recipe.device, dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=inputs.to(recipe.device), use_cache=False).logits
    targets = targets.to(recipe.device)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _curve(losses: list[float]) -> list[tuple[int, float]]:
    """Mean loss of equal stretches of the run, each under its last step."""
    width = max(1, math.ceil(len(losses) / CURVE_POINTS))
    parts = [losses[i : i + width] for i in range(0, len(losses), width)]
    ends = [min(len(losses), (i + 1) * width) for i in range(len(parts))]
    return [(end, sum(p) / len(p)) for end, p in zip(ends, parts, strict=True)]
