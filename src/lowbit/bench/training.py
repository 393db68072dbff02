"""One training run in one process, with the pipeline's codecs at the places where stages would be cut.

Runs of the same recipe and seed start from the same weights and see the same samples in the same order, whatever their
boundaries carry, so that losses can be compared in pairs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.codecs import Cast, Codec, parse, parse_pair
from lowbit.config import ConfigError, NonNegative, Positive, section
from lowbit.gradients import GradientStorage
from lowbit.pipeline import Traffic, emulate_
from lowbit.train.config import DataConfig, ModelConfig, OptimizerConfig, PipelineConfig
from lowbit.train.data import Data, Windows, load_data
from lowbit.train.model import build_model, vocabulary
from lowbit.train.plan import make_plan
from lowbit.train.single_process import model_loss, train_single_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CURVE_POINTS = 40
GRADIENTS = "gradients:"
"""Before a format that gradients are stored and all-reduced in, in place of a boundary's."""
ACTIVATIONS = "activations:"
"""Before the name of a policy for saved activations, in place of a boundary's format."""
POLICIES = {
    "low-bit": LayerAware(),
    "norm-4": LayerAware(norm=4),
    "attention-8": LayerAware(attention=8),
    "uniform": LayerAware(norm=4, attention=4),
}
RANKS = 2


@section("recipe")
class Recipe:
    """What runs that are compared with each other have in common."""

    model: ModelConfig = ModelConfig()
    """As in `lowbit train`."""
    data: DataConfig = DataConfig()
    """As in `lowbit train`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """As in `lowbit train`."""
    steps: Positive
    """Optimizer steps."""
    warmup_steps: NonNegative = 0
    """The first of them, with full precision at the boundaries."""
    stages: Positive = 2
    """How many the pipeline would have, one boundary fewer."""
    samples: NonNegative = 0
    """Distinct windows to train on, seen again in every epoch; 0: all of the text."""
    eval_windows: Positive = 256
    """Held-out windows of the final evaluation, spread evenly over the text."""
    start: str = ""
    """File with weights to start from; empty: random ones."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: the current device."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: for matrix products."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of matrix products; None: the weights' own."""
        return torch.bfloat16 if self.precision == "bf16" else None


def codec_pair(boundary: str, backward: str = "") -> tuple[Codec, Codec]:
    """Codecs each way, as `parse_pair` has it; float32 where gradients or saved activations have a format instead."""
    plain = boundary.startswith((GRADIENTS, ACTIVATIONS))
    return (Cast(), Cast()) if plain else parse_pair(boundary, backward)


def gradient_codec(boundary: str) -> Codec | None:
    """The codec that gradients are stored and all-reduced in ("gradients:fp8"); None for a boundary's format.

    Raises:
        ConfigError: an unknown format, or one with state.
    """
    if not boundary.startswith(GRADIENTS):
        return None
    codec = parse(boundary.removeprefix(GRADIENTS))
    if codec.stateful:
        raise ConfigError(f"{boundary!r} has state between messages; allowed: codecs without state")
    return codec


def activation_policy(boundary: str) -> LayerAware | None:
    """The policy for saved activations ("activations:low-bit"); None for a boundary's format.

    Raises:
        ConfigError: an unknown policy.
    """
    if not boundary.startswith(ACTIVATIONS):
        return None
    name = boundary.removeprefix(ACTIVATIONS)
    if name not in POLICIES:
        allowed = ", ".join(ACTIVATIONS + policy for policy in POLICIES)
        raise ConfigError(f"boundary is {boundary!r}; allowed: {allowed}")
    return POLICIES[name]


def train(
    recipe: Recipe,
    boundary: str = "fp32",
    backward: str = "",
    *,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train once and evaluate on the held-out text.

    Args:
        recipe: the run.
        boundary: formats of activations, or of both ways, or "gradients:..." or "activations:...".
        backward: format of gradients that `boundary` does not name.
        seed: of weights and data order.
        on_step: called after every step with the number of steps done and the loss.

    Returns:
        The trained model without emulation, and a mapping: `loss` (held-out, nats a token, the trained model by
        itself), `loss_through_codecs` (None for formats that need known samples), `bits_forward`, `bits_backward` (an
        element, once warm-up is over), `bits_forward_run`, `bits_backward_run` (over the whole run), `state_bytes` (at
        one end of all boundaries), `curve` (pairs of step and mean training loss), `seconds`.
    """
    started = time.perf_counter()
    forward, back = codec_pair(boundary, backward)
    data, model = prepare(recipe, seed)
    emulation = emulate_(
        model,
        at=boundary_modules(model, recipe.stages),
        forward=forward,
        backward=back,
        warmup_steps=recipe.warmup_steps,
    )
    gradients = gradient_codec(boundary)
    policy = activation_policy(boundary)
    compressed = compress_saved_(model, policy) if policy else None
    in_warmup = replace(emulation.traffic)

    def before_step(step: int, ids: Tensor) -> None:
        nonlocal in_warmup
        if step == recipe.warmup_steps:
            in_warmup = replace(emulation.traffic)
        emulation.set_samples(ids)

    def after_step(step: int, loss: float) -> None:
        emulation.step()
        if on_step:
            on_step(step + 1, loss)

    losses = train_single_process(
        model, data.train, recipe.optimizer, steps=recipe.steps, batch=recipe.data.batch, seed=seed,
        samples=recipe.samples, autocast=recipe.autocast, gradients=Replicas(model, gradients) if gradients else None,
        before_step=before_step, after_step=after_step,
    )  # fmt: skip
    run = replace(emulation.traffic)  # which evaluation adds to
    after = _since(in_warmup, run)
    state_bytes = emulation.state_bytes()
    if compressed is not None:
        compressed.remove()
    through = None if forward.needs_key else evaluate(model, data.held_out, recipe)
    bits = {
        "bits_forward": after.forward_bits,
        "bits_backward": after.backward_bits,
        "bits_forward_run": run.forward_bits,
        "bits_backward_run": run.backward_bits,
    }
    emulation.remove()
    return model, {
        **bits,
        "state_bytes": state_bytes,
        "loss": evaluate(model, data.held_out, recipe),
        "loss_through_codecs": through,
        "curve": curve_of(losses),
        "seconds": round(time.perf_counter() - started, 1),
    }


def prepare(recipe: Recipe, seed: int) -> tuple[Data, PreTrainedModel]:
    """The text, and the model on its device, in training mode."""
    data = load_data(recipe.data)
    vocab = vocabulary(recipe.model, data.tokenizer.size)
    model = build_model(recipe.model, vocab=vocab, sequence=recipe.data.sequence, seed=seed)
    if recipe.start:
        model.load_state_dict(torch.load(recipe.start, map_location="cpu", weights_only=True))
    nn.Module.to(model, torch.device(recipe.device))
    return data, model.train()


def boundary_modules(model: PreTrainedModel, stages: int) -> list[str]:
    """Names of the decoder layers that end a stage, but for the last stage."""
    count = model.config.num_hidden_layers
    lists = (name for name, m in model.named_modules() if isinstance(m, nn.ModuleList))
    layers = next(name for name in lists if len(model.get_submodule(name)) == count)  # pyright: ignore[reportArgumentType]
    plan = make_plan(PipelineConfig(schedule="GPipe"), ranks=stages, layers=count)
    return [f"{layers}.{plan.layers_of(stage)[-1]}" for stage in range(stages - 1)]


@torch.no_grad()
def evaluate(model: PreTrainedModel, held_out: Windows, recipe: Recipe) -> float:
    """Mean loss, in nats a token, over windows spread evenly over the held-out text."""
    ids = spread_evenly(recipe.eval_windows, len(held_out))
    model.eval()
    total = 0.0
    for part in ids.split(8):
        total += model_loss(model, *held_out.batch(part), autocast=recipe.autocast).item() * len(part)
    model.train()
    return total / len(ids)


def spread_evenly(count: int, windows: int) -> Tensor:
    """Ids of at most `count` windows, spread evenly over the text."""
    count = min(count, windows)
    return torch.arange(count) * windows // count


def curve_of(losses: list[float]) -> list[tuple[int, float]]:
    """Mean loss of equal stretches of the run, each under its last step."""
    width = max(1, math.ceil(len(losses) / CURVE_POINTS))
    parts = [losses[i : i + width] for i in range(0, len(losses), width)]
    ends = [min(len(losses), (i + 1) * width) for i in range(len(parts))]
    return [(end, sum(p) / len(p)) for end, p in zip(ends, parts, strict=True)]


def _since(earlier: Traffic, later: Traffic) -> Traffic:
    return Traffic(**{f.name: getattr(later, f.name) - getattr(earlier, f.name) for f in fields(Traffic)})


class Replicas:
    """Gradients of `RANKS` ranks in one process, which share a batch, one sample a micro-batch.

    As in AGoQ's all-reduce: each rank's sum over its micro-batches is coded for the network, the sum over the ranks is
    float32, coded once more, and stored.

    Args:
        model: whose gradients are taken out of `.grad`.
        codec: of storage and all-reduce.
    """

    def __init__(self, model: nn.Module, codec: Codec) -> None:
        self.codec, self.storage = codec, GradientStorage(model, codec=codec)

    def backward(self, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Leave the mean gradient of a batch in the storage.

        Args:
            loss: mean loss of samples.
            inputs, targets: (samples, sequence), a multiple of `RANKS` samples.

        Returns:
            The batch's mean loss.

        Raises:
            ConfigError: a number of samples that the ranks cannot share.
        """
        if len(inputs) % RANKS:
            raise ConfigError(f"batch is {len(inputs)}; allowed: multiples of {RANKS}")
        sums: dict[nn.Parameter, Tensor] = {}
        losses: list[Tensor] = []
        for mine in torch.arange(len(inputs)).chunk(RANKS):
            self.storage.zero_()
            for sample in mine.split(1):
                one = loss(inputs[sample], targets[sample])
                one.backward()
                losses.append(one.detach())
            for parameter, gradient in self.storage.gradients():
                sent = self.codec.round_trip(gradient)
                sums[parameter] = sums[parameter] + sent if parameter in sums else sent
        for parameter, total in sums.items():
            self.storage.put(parameter, self.codec.round_trip(total))
        self.storage.scale_(1 / len(inputs))
        return torch.stack(losses).mean()

    def step(self, optimizer: torch.optim.Optimizer, clip: float) -> None:
        """Clip to this norm (0: never), take the optimizer's step, and drop the gradients."""
        if clip:
            self.storage.clip_(clip)
        self.storage.step(optimizer)
        self.storage.zero_()
