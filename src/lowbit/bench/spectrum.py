"""`lowbit bench spectrum`: how near a model's boundaries lie to a few directions, and what each format makes of that.

The model of a checkpoint is run on a text, forward and backward, as it is: nothing is trained. What would cross each
boundary goes through the sessions of every format, message after message, as in a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.bench.emulated import boundary_modules
from lowbit.bench.report import Report, Row, machine
from lowbit.codecs import Codec, SubspaceQuant, parse
from lowbit.codecs.sessions import Session
from lowbit.train.config import DataConfig, ModelConfig
from lowbit.train.data import load_data
from lowbit.train.model import build_model, count_layers, vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Args:
        model: local folder with a Hugging Face checkpoint of a causal language model.
        text: file, folder or pattern that the model is run on.
        stages: of the pipeline that the model would be cut into, at most its layers.
        directions: numbers of them to try; besides them, the one that suits the first message (SubspaceQuant.fitted).
        bits: of the remainder, to try with each of them; group, refresh: of SubspaceQuant.
        codecs: formats to compare with, by name or in full.
        sequence: tokens of a window; batch: windows in a message; messages: how many; the second half is judged.
        tokenizer: "bytes" or a folder; absent: the model's own.
        max_bytes: read no more text than this.
    """

    model: str
    text: str
    stages: int = 4
    directions: tuple[int, ...] = (8, 16, 32, 64)
    bits: tuple[int, ...] = (3, 4)
    group: int = 64
    refresh: int = 8
    codecs: tuple[str, ...] = ("int8", "int4", "tah-quant", "tah-quant-published")
    sequence: int = 256
    batch: int = 4
    messages: int = 8
    tokenizer: str = ""
    max_bytes: int = 16_000_000

    def __post_init__(self) -> None:
        for name, least in (("stages", 2), ("sequence", 2), ("batch", 1), ("messages", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: at least {least}")
        for name in self.codecs:
            codec = parse(name)
            if codec.needs_key:
                raise ValueError(f"codecs has {name!r}, which learns from epoch to epoch; allowed: others")
            if not codec.settled:
                raise ValueError(
                    f"codecs has {name!r}, which a pipeline's warm-up settles; allowed: those that leave nothing to "
                    "choose (what the spectrum would choose is measured anyway)"
                )
        if not self.bits:
            raise ValueError("bits is empty; allowed: 2 to 8, between commas")
        for directions in (*self.directions, 1):
            for bits in self.bits:
                SubspaceQuant(directions=directions, bits=bits, group=self.group, refresh=self.refresh)


@dataclass
class _Trial:
    """A format at one boundary, in one direction."""

    name: str
    codec: Codec
    fitted: bool
    ends: tuple[Session, Session]
    signal: float = 0.0
    noise: float = 0.0

    def carry(self, x: Tensor, counted: bool) -> None:
        sender, receiver = self.ends
        y = receiver.decode(sender.encode(x))
        if counted:
            self.signal += float(x.double().square().sum())
            self.noise += float((x.double() - y.double()).square().sum())

    def decibels(self) -> float:
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else math.inf


@dataclass
class _Boundary:
    """What crosses a boundary in one direction, and how it fares."""

    index: int
    direction: str
    outside: Tensor = field(default_factory=lambda: torch.zeros(0))
    trials: list[_Trial] = field(default_factory=list)

    def begin(self, settings: Settings, x: Tensor) -> None:
        self.outside = outside(x)
        made: dict[tuple[int, int], bool] = {}
        for bits in settings.bits:
            more = {"bits": bits, "group": settings.group, "refresh": settings.refresh}
            made |= {(directions, bits): False for directions in settings.directions if directions <= x.shape[-1]}
            made[SubspaceQuant.fitted(x, **more).count, bits] = True
        self.trials = [self._trial(name, parse(name), x) for name in settings.codecs]
        for (directions, bits), fitted in sorted(made.items(), key=lambda item: item[0][::-1]):
            codec = SubspaceQuant(directions=directions, bits=bits, group=settings.group, refresh=settings.refresh)
            self.trials.append(self._trial("subspace", codec, x, fitted))

    def rows(self, shape: Sequence[int]) -> Iterator[Row]:
        for trial in self.trials:
            directions = getattr(trial.codec, "directions", None)
            yield {
                "boundary": self.index,
                "direction": self.direction,
                "shape": list(shape),
                "format": trial.name,
                "codec": str(trial.codec),
                "directions": directions,
                "bits": getattr(trial.codec, "bits", None) if directions else None,
                "fitted": trial.fitted,
                "outside": float(self.outside[min(directions, len(self.outside) - 1)]) if directions else None,
                "bits_per_element": trial.codec.bits_per_element(shape),
                "decibels": trial.decibels(),
            }

    @staticmethod
    def _trial(name: str, codec: Codec, x: Tensor, fitted: bool = False) -> _Trial:
        sender, receiver = (codec.open(shape=x.shape, dtype=x.dtype) for _ in range(2))
        return _Trial(name, codec, fitted, (sender, receiver))


def run(settings: Settings, on_rows: Callable[[list[Row]], None] | None = None) -> Report:
    """Measure every format on what crosses every boundary.

    Args:
        on_rows: called with all rows so far, after every message.

    Returns:
        A report whose rows have `boundary`, `direction`, `shape` (of a message), `format` (a name), `codec`,
        `bits_per_element` (every byte counted) and `decibels` (signal over noise, second half of the messages); those
        of SubspaceQuant also `directions`, `bits` and `outside`: the share of the first message's energy that its best
        directions, so many, leave out; `fitted`: whether this number is `SubspaceQuant.fitted`'s.

    Raises:
        ValueError: a model or text that cannot be used, or more stages than layers.
    """
    data = DataConfig(
        text=(settings.text,), tokenizer=settings.tokenizer or settings.model, sequence=settings.sequence,
        batch=settings.batch * settings.messages, max_bytes=settings.max_bytes, held_out_share=0,
    )  # fmt: skip
    config = ModelConfig(pretrained=settings.model)
    if settings.stages > (layers := count_layers(config)):
        raise ValueError(f"stages is {settings.stages}; the model has {layers} layers; allowed: at most as many")
    found = load_data(data)
    vocab = vocabulary(config, found.tokenizer.size)
    model = build_model(config, vocab=vocab, sequence=settings.sequence, seed=0)
    count = settings.batch * settings.messages
    ids = torch.arange(count) * len(found.train) // count
    rows: list[Row] = []
    boundaries: list[_Boundary] = []
    for message, part in enumerate(ids.split(settings.batch)):
        sent = capture(model, *found.train.batch(part), stages=settings.stages)
        if not message:
            boundaries = [_Boundary(i, d) for d in DIRECTIONS for i in range(settings.stages - 1)]
        tensors = [x for direction in sent for x in direction]
        for boundary, x in zip(boundaries, tensors, strict=True):
            if not message:
                boundary.begin(settings, x)
            for trial in boundary.trials:
                trial.carry(x, message >= settings.messages // 2)
        rows = [row for b, x in zip(boundaries, tensors, strict=True) for row in b.rows(x.shape)]
        if on_rows is not None and message >= settings.messages // 2:
            on_rows(rows)
    return Report(command="bench spectrum", settings=settings, machine=machine(), rows=rows)


def capture(
    model: PreTrainedModel, inputs: Tensor, targets: Tensor, *, stages: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What each stage but the last would send forward, and what each but the first would send back.

    Args:
        inputs, targets: token ids (batch, tokens).

    Returns:
        Activations and gradients of the mean loss, by boundary: float32 (batch, tokens, channels) each.
    """
    forward: list[Tensor] = []
    backward: dict[int, Tensor] = {}

    def keep(module: Any, args: Any, output: Any) -> None:
        x, index = output if isinstance(output, Tensor) else output[0], len(forward)
        forward.append(x.detach().float().clone())
        x.register_hook(lambda gradient: backward.update({index: gradient.float().clone()}))

    model.eval().requires_grad_(False)
    embedding = model.get_input_embeddings()
    embedding.requires_grad_(True)  # so that there is a graph, but no gradients of all the weights
    names = boundary_modules(model, stages)
    handles = [model.get_submodule(name).register_forward_hook(keep) for name in names]
    try:
        logits = model(input_ids=inputs, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
    finally:
        for handle in handles:
            handle.remove()
        embedding.zero_grad()
    return forward, [backward[i] for i in range(len(names))]


def outside(x: Tensor) -> Tensor:
    """Share of the energy of tokens (..., C) that the k best directions leave out, for k from 0 on."""
    energy = torch.linalg.svdvals(x.reshape(-1, x.shape[-1]).double()).square()
    total = energy.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return (1 - torch.cat([torch.zeros(1), energy.cumsum(0) / total])).clamp(min=0)
