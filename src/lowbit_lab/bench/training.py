"""One training run in one process, with a pipeline's codecs between the layers where stages would end.

Runs of the same recipe and seed start from the same weights and see the same samples in the same order, whatever their
boundaries carry, so that their losses can be compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware, compress_saved_
from lowbit.codecs import BlockFloat8, Cast, Codec, parse, parse_pair
from lowbit.gradients import GradientStorage
from lowbit.pipeline import TokenAnchor, Traffic, emulate_
from lowbit_lab.bench.workers import report_progress, serve
from lowbit_run.config import ConfigError, NonNegative, Positive, build, section
from lowbit_run.train.answers import Answers
from lowbit_run.train.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from lowbit_run.train.data import Data, Windows, load_data
from lowbit_run.train.layout import PipelineLayout, make_layout
from lowbit_run.train.model import add_adapters, build_model, next_token_loss, vocabulary
from lowbit_run.train.optim import eight_bit_adamw, make_optimizer
from lowbit_run.train.single_process import Loss, PlainGradients, model_loss, train_single_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CURVE_POINTS = 40
RANKS = 2
"""Data-parallel ranks that `Replicas` emulates."""
GRADIENTS = "gradients:"
"""Prefix of a format in which gradients are stored and all-reduced, in place of a boundary's format."""
ACTIVATIONS = "activations:"
"""Prefix of a policy for saved activations, in place of a boundary's format."""
ANCHOR = "anchor:"
"""Prefix of a boundary's format, which then codes only what the token ids do not already say."""
EIGHT_BITS = "+8bit"
"""Suffix of a policy: gradients are also stored and all-reduced in 8 bits, with an 8-bit optimizer."""
AGOQ = "agoq"
"""All of AGoQ as published: short for "activations:agoq+8bit"."""
POLICIES = {
    "default": LayerAware(),
    "norm-8": LayerAware(bits=4, attention=16),
    AGOQ: LayerAware.published(),
    "attention-8": LayerAware(bits=4, attention=8),
    "uniform": LayerAware(bits=4, norm=4, attention=4),
}


@section("recipe")
class TrainingRecipe:
    """A training run without its boundary and seed."""

    model: ModelConfig = ModelConfig()
    """As in `lowbit train`."""
    lora: LoraConfig = LoraConfig()
    """Adapters to train instead of all weights; with rank 0, all weights."""
    data: DataConfig = DataConfig()
    """As in `lowbit train`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """As in `lowbit train`."""
    steps: Positive
    """Optimizer steps."""
    warmup_steps: NonNegative = 0
    """Number of first steps at full precision."""
    stages: Positive = 2
    """Stages of the emulated pipeline. It has one boundary fewer."""
    samples: NonNegative = 0
    """Distinct windows to train on. Each epoch visits all of them. 0: the whole text."""
    eval_windows: Positive = 256
    """Held-out windows of the final evaluation, spread evenly over the text."""
    start: str = ""
    """File with weights to start from. If empty, random weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: the current GPU."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of matrix products."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of matrix products; None: the weights' own."""
        return torch.bfloat16 if self.precision == "bf16" else None


class Formats(NamedTuple):
    """Formats of everything that is sent or kept in few bits.

    Attributes:
        forward, backward: codecs at the boundaries.
        gradients: the codec in which gradients are stored and all-reduced; None: float32.
        activations: the policy for saved activations; None: they are kept as they are.
        eight_bit: the optimizer is torchao's 8-bit AdamW.
        anchor: whether activations are coded with a token anchor, which the warm-up fits.
    """

    forward: Codec = Cast()
    backward: Codec = Cast()
    gradients: Codec | None = None
    activations: LayerAware | None = None
    eight_bit: bool = False
    anchor: bool = False


def formats_in(boundary: str, backward: str = "") -> Formats:
    """Parse "gradients:CODEC", "activations:POLICY", the same with "+8bit", "agoq", or a pair for `parse_pair`.

    "anchor:" before a pair adds a token anchor.
    """
    if boundary.startswith(GRADIENTS):
        codec = parse(boundary.removeprefix(GRADIENTS))
        if codec.stateful:
            raise ConfigError(f"{boundary!r} keeps state between messages; allowed: codecs without state")
        return Formats(gradients=codec)
    if boundary == AGOQ or boundary.startswith(ACTIVATIONS):
        name = AGOQ if boundary == AGOQ else boundary.removeprefix(ACTIVATIONS).removesuffix(EIGHT_BITS)
        if name not in POLICIES:
            allowed = ", ".join(ACTIVATIONS + policy for policy in POLICIES)
            raise ConfigError(f"boundary is {boundary!r}; allowed: {allowed}, each also with {EIGHT_BITS}")
        eight = boundary == AGOQ or boundary.endswith(EIGHT_BITS)
        return Formats(gradients=BlockFloat8() if eight else None, activations=POLICIES[name], eight_bit=eight)
    try:
        return Formats(*parse_pair(boundary.removeprefix(ANCHOR), backward), anchor=boundary.startswith(ANCHOR))
    except ValueError as error:
        if "(" in boundary:  # the arguments of a codec
            raise
        allowed = f"{AGOQ}, {ACTIVATIONS}POLICY, {GRADIENTS}CODEC, {ANCHOR}CODEC"
        raise ConfigError(f"boundary: {error}; or {allowed}") from None


def train(
    recipe: TrainingRecipe,
    boundary: str = "fp32",
    backward: str = "",
    *,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train once and evaluate on the held-out text.

    Args:
        recipe: the run.
        boundary: formats of activations, or of both ways, or what `formats_in` allows besides.
        backward: format of gradients that `boundary` does not name.
        seed: of weights and data order.
        on_step: called after every step with the number of steps done and the loss.

    Returns:
        The trained model without emulation, and a mapping: `loss` (held-out, nats per token, without codecs),
        `loss_through_codecs` (None for formats that need known samples), `bits_forward`, `bits_backward` (per element,
        after the warm-up), `bits_forward_run`, `bits_backward_run` (over the whole run), `state_bytes` (at one end of
        all boundaries), `curve` (pairs of step and mean training loss), `seconds`.
    """
    started = time.perf_counter()
    formats = formats_in(boundary, backward)
    data, model = prepare(recipe, seed)
    places = boundary_modules(model, recipe.stages)
    anchor = None
    if formats.anchor:
        embedding: Any = model.get_input_embeddings()
        anchor = TokenAnchor(embedding=embedding.weight.detach().cpu().clone())
    emulation = emulate_(
        model, at=places, forward=formats.forward, backward=formats.backward, warmup_steps=recipe.warmup_steps,
        anchor=anchor,
    )  # fmt: skip
    handles = []
    if anchor is not None:

        def set_tokens(_: nn.Module, args: Any, given: dict[str, Any]) -> None:
            emulation.set_tokens(given["input_ids"])

        handles.append(model.register_forward_pre_hook(set_tokens, with_kwargs=True))
    compressed = compress_saved_(model, formats.activations) if formats.activations else None
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
        samples=recipe.samples, autocast=recipe.autocast,
        gradients=Replicas(model, formats.gradients) if formats.gradients else None,
        make=partial(eight_bit_adamw, compiled=True) if formats.eight_bit else make_optimizer,
        before_step=before_step, after_step=after_step,
    )  # fmt: skip
    run = replace(emulation.traffic)  # a copy, because evaluation adds to it
    after = traffic_between(in_warmup, run)
    state_bytes = emulation.state_bytes()
    if compressed is not None:
        compressed.remove()
    through = None if formats.forward.needs_key else evaluate(model, data.held_out, recipe)
    for handle in (emulation, *handles):
        handle.remove()
    return model, {
        "bits_forward": after.forward_bits,
        "bits_backward": after.backward_bits,
        "bits_forward_run": run.forward_bits,
        "bits_backward_run": run.backward_bits,
        "state_bytes": state_bytes,
        "loss": evaluate(model, data.held_out, recipe),
        "loss_through_codecs": through,
        "curve": curve_of(losses),
        "seconds": round(time.perf_counter() - started, 1),
    }


class Replicas(PlainGradients):
    """Emulates gradients of `RANKS` ranks in one process, which share a batch, with one sample per micro-batch.

    As in AGoQ's all-reduce, each rank's sum over its micro-batches is coded for the network, and the sum over the ranks
    is computed in float32, coded once more, and stored.

    Args:
        model: its gradients are moved out of `.grad`.
        codec: format of storage and all-reduce.
    """

    def __init__(self, model: nn.Module, codec: Codec) -> None:
        super().__init__(model)
        self.codec, self.storage = codec, GradientStorage(model, codec=codec)

    def backward(self, loss: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean gradient of a batch into the storage.

        Args:
            loss: mean loss of samples.
            inputs, targets: (samples, sequence), a multiple of `RANKS` samples.

        Returns:
            The batch's mean loss.
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
        """Clip to this norm (0: never), take the optimizer's step, and delete the gradients."""
        if clip:
            self.storage.clip_(clip)
        self.storage.step(optimizer)
        self.storage.zero_()


def prepare(recipe: TrainingRecipe, seed: int) -> tuple[Data, PreTrainedModel]:
    """Load the text, and make the model on its device, in training mode."""
    data = load_data(recipe.data, pretrained=recipe.model.pretrained)
    vocab = vocabulary(recipe.model, data.tokenizer.size)
    model = build_model(recipe.model, vocab=vocab, sequence=recipe.data.sequence, seed=seed)
    if recipe.start:
        model.load_state_dict(torch.load(recipe.start, map_location="cpu", weights_only=True))
    if recipe.lora.rank:
        add_adapters(model, TrainConfig(model=recipe.model, lora=recipe.lora, run=RunConfig(seed=seed)))
    nn.Module.to(model, torch.device(recipe.device))
    return data, model.train()


def boundary_modules(model: PreTrainedModel, stages: int | PipelineLayout) -> list[str]:
    """Return the names of the last decoder layer of each stage except the last; of as equal stages as possible."""
    count = model.config.num_hidden_layers
    lists = (name for name, m in model.named_modules() if isinstance(m, nn.ModuleList))
    layers = next(name for name in lists if len(model.get_submodule(name)) == count)  # pyright: ignore[reportArgumentType]
    if isinstance(stages, int):
        stages = make_layout(PipelineConfig(schedule="GPipe"), ranks=stages, layers=count)
    return [f"{layers}.{stages.layers_of(stage)[-1]}" for stage in range(stages.stages - 1)]


def capture(
    model: PreTrainedModel,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    stages: int | PipelineLayout,
    autocast: torch.dtype | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a model and return the tensors that would cross a pipeline's boundaries.

    Args:
        inputs, targets: token ids (batch, tokens); without targets, nothing runs backward.
        stages: of the pipeline. autocast: dtype of matrix products; None: that of the weights.

    Returns:
        Activations and gradients of the mean loss, by boundary: float32 (batch, tokens, channels) each.
    """
    forward: list[Tensor] = []
    backward: dict[int, Tensor] = {}

    def keep(module: Any, args: Any, output: Any) -> None:
        x, index = output if isinstance(output, Tensor) else output[0], len(forward)
        forward.append(x.detach().float().clone())
        if x.requires_grad:
            x.register_hook(lambda gradient: backward.update({index: gradient.float().clone()}))

    model.eval().requires_grad_(False)
    embedding = model.get_input_embeddings()
    embedding.requires_grad_(targets is not None)  # makes a graph without gradients of all weights
    handles = [model.get_submodule(name).register_forward_hook(keep) for name in boundary_modules(model, stages)]
    try:
        with torch.autocast(inputs.device.type, dtype=autocast, enabled=autocast is not None):
            logits = model(input_ids=inputs, use_cache=False).logits
        if targets is not None:
            next_token_loss(logits, targets).backward()
    finally:
        for handle in handles:
            handle.remove()
        embedding.zero_grad()
    return forward, [backward[i] for i in sorted(backward)]


@torch.no_grad()
def evaluate(model: PreTrainedModel, held_out: Windows | Answers, recipe: TrainingRecipe) -> float:
    """Return the mean loss, in nats per token, over windows spread evenly over the held-out text."""
    ids = spread_evenly(recipe.eval_windows, len(held_out))
    model.eval()
    total = 0.0
    for part in ids.split(8):
        total += model_loss(model, *held_out.batch(part), autocast=recipe.autocast).item() * len(part)
    model.train()
    return total / len(ids)


def spread_evenly(count: int, windows: int) -> Tensor:
    """Return the ids of at most `count` windows, spread evenly over the text."""
    count = min(count, windows)
    return torch.arange(count) * windows // count


def curve_of(losses: list[float]) -> list[tuple[int, float]]:
    """Return the mean loss of equal stretches of the run, each with its last step."""
    width = max(1, math.ceil(len(losses) / CURVE_POINTS))
    parts = [losses[i : i + width] for i in range(0, len(losses), width)]
    return [(i * width + len(part), sum(part) / len(part)) for i, part in enumerate(parts)]


def traffic_between(earlier: Traffic, later: Traffic) -> Traffic:
    """Return the traffic between two moments."""
    return Traffic(**{f.name: getattr(later, f.name) - getattr(earlier, f.name) for f in fields(Traffic)})


class Training:
    """Methods that the training process runs on order."""

    def train(
        self, regime: str, boundary: str, backward: str, seed: int, recipe: dict[str, Any], threads: int, keep: str
    ) -> dict[str, Any]:
        """Train once and return the row; `keep`: file for the weights."""
        torch.set_num_threads(threads)

        def on_step(step: int, loss: float) -> None:
            report_progress(f"{regime} {boundary} seed {seed}: step {step}, loss {loss:.3f}")

        model, result = train(build(TrainingRecipe, recipe), boundary, backward, seed=seed, on_step=on_step)
        if keep:
            part = Path(keep).with_suffix(".part")  # so that an interrupted call leaves no incomplete file
            part.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), part)
            part.replace(keep)
        formats = formats_in(boundary, backward)
        named = {"forward": repr(formats.forward), "backward": repr(formats.backward)}
        return {"boundary": boundary, **named, "seed": seed, "regime": regime, **result}


if __name__ == "__main__":
    serve(Training)
