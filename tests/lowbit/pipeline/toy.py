"""A small model, cut into stages, and the schedules to run it under."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from lowbit.codecs import Cast, GroupInt
from lowbit.pipeline import LowBitStage, emulate_
from tests.processes import Ranks

WIDTH, ROWS, MICRO_BATCHES = 24, 2, 4
CPU = torch.device("cpu")
FP32 = Cast(dtype=torch.float32)
INT4 = GroupInt(bits=4, group=64)
INT6 = GroupInt(bits=6, group=32, symmetric=True)

SCHEDULES: dict[str, tuple[Any, int]] = {  # class and stages on each rank
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved-2": (ScheduleInterleaved1F1B, 2),
    "interleaved-4": (ScheduleInterleaved1F1B, 4),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 2),
    "looped-bfs": (ScheduleLoopedBFS, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
    "dual-pipe-v": (ScheduleDualPipeV, 2),
}
V_SHAPED = ("zbv", "dual-pipe-v")


def sends_to_itself(schedule: str) -> bool:
    """PyTorch before 2.12 does so in V schedules, which Gloo cannot."""
    return schedule in V_SHAPED and not hasattr(PipelineStage, "_is_same_rank")


class Block(nn.Module):
    """One residual layer, of which each stage has one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def blocks(count: int, kind: Callable[[], nn.Module] = Block) -> list[nn.Module]:
    """The same weights on every rank."""
    torch.manual_seed(7)
    return [kind() for _ in range(count)]


def data(seed: int, rows: int = ROWS * MICRO_BATCHES, length: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (rows, length, WIDTH)."""
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(rows, length, WIDTH, generator=generator) for _ in range(2))
    return x, target


def batch(step: int) -> tuple[Tensor, Tensor]:
    return data(100 + step)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y.float() - target).square().mean()


def held(schedule: str, rank: int, ranks: int) -> list[int]:
    """Stages of a rank: in turn, or down one side of the V and up the other."""
    each = SCHEDULES[schedule][1]
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(each)]


@dataclass
class Run:
    """A pipeline of this rank's stages, and what training it gave."""

    schedule: str
    make: Callable[..., Any]
    kind: Callable[[], nn.Module] = Block
    group: dist.ProcessGroup | None = None
    device: torch.device = CPU
    batch: Callable[[int], tuple[Tensor, Tensor]] = batch
    losses: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        modules = blocks(SCHEDULES[self.schedule][1] * ranks, self.kind)
        self.stages = [
            self.make(modules[i].to(self.device), i, len(modules), self.device, group=self.group)
            for i in held(self.schedule, rank, ranks)
        ]
        self.runner = self.another(MICRO_BATCHES)
        self.parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def another(self, micro_batches: int) -> Any:
        schedule, each = SCHEDULES[self.schedule]
        own = self.stages[0] if each == 1 else self.stages
        return schedule(own, micro_batches, loss_fn=loss_of)

    @property
    def first(self) -> bool:
        return any(stage.is_first for stage in self.stages)

    @property
    def last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    def continues(self, other: "Run") -> "Run":
        """This pipeline, with the weights of another one."""
        for new, old in zip(self.stages, other.stages, strict=True):
            new.submod.load_state_dict(old.submod.state_dict())
        return self

    def restarted(self) -> "Run":
        """A new pipeline that continues from this one's weights and codec states."""
        run = replace(self).continues(self)
        for new, old in zip(run.stages, self.stages, strict=True):
            new.load_codec_state_dict(old.codec_state_dict())
        return run

    def feed(
        self, x: Tensor, target: Tensor, runner: Any = None, *, training: bool = True, **given: Any
    ) -> tuple[Any, list[Tensor]]:
        """A pass: outputs of an evaluation on the last stage's rank, and losses."""
        runner, losses, inputs = runner or self.runner, [], [x] if self.first else []
        with torch.set_grad_enabled(training):
            run = runner.step if training else runner.eval
            y = run(*inputs, target=target if self.last else None, losses=losses, **given)
        return (None if training else y), [loss.detach() for loss in losses]

    def take(self, *given: Any, **named: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
        """What `feed` gives, and this batch's gradients of this rank's parameters."""
        self.optimizer.zero_grad()
        return *self.feed(*given, **named), [p.grad.clone() for p in self.parameters if p.grad is not None]

    def train(self, step: int) -> list[Tensor]:
        """One step; returns the gradients of this rank's parameters."""
        _, losses, grads = self.take(*(t.to(self.device) for t in self.batch(step)))
        self.losses += losses
        self.optimizer.step()
        return grads

    def evaluate(self, step: int) -> Tensor | None:
        return self.feed(*(t.to(self.device) for t in self.batch(step)), training=False)[0]


class Emulated:
    """A model of a block for each stage in one process, with the codecs of a pipeline's boundaries between them."""

    def __init__(
        self,
        kind: Callable[[], nn.Module] = Block,
        batch: Callable[[int], tuple[Tensor, Tensor]] = batch,
        stages: int = 2,
        **options: Any,
    ) -> None:
        self.model, self.batch = nn.Sequential(*blocks(stages, kind)), batch
        self.emulation = emulate_(self.model, at=[str(i) for i in range(stages - 1)], **options)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        self.losses: list[Tensor] = []

    def feed(
        self, x: Tensor, target: Tensor, ids: Tensor | None = None, tokens: Tensor | None = None
    ) -> tuple[None, list[Tensor]]:
        """As `Run.feed`: losses of micro-batches, one after the other, with the gradients that a schedule gives."""
        losses = []
        for number, (part, wanted) in enumerate(zip(x.split(ROWS), target.split(ROWS), strict=True)):
            if ids is not None:
                self.emulation.set_samples(ids.split(ROWS)[number])
            self.emulation.set_tokens(None if tokens is None else tokens.split(ROWS)[number])
            loss = loss_of(self.model(part), wanted)
            loss.backward()
            losses.append(loss.detach())
        for p in self.parameters:
            assert p.grad is not None
            p.grad /= MICRO_BATCHES  # with what is there already, too
        self.emulation.step()
        return None, losses

    def train(self, step: int, ids: Tensor | None = None, tokens: Tensor | None = None) -> None:
        self.optimizer.zero_grad()
        self.losses += self.feed(*self.batch(step), ids, tokens)[1]
        self.optimizer.step()


def lowbit(**options: Any) -> Callable[..., LowBitStage]:
    return partial(LowBitStage, **options)


def timely(ranks: Ranks, function: Callable[..., Any], *args: Any, count: int = 2, limit: float = 25) -> list[Any]:
    """Outcomes, which take seconds and no timeout."""
    ranks.start(count)
    start = time.monotonic()
    outcomes = ranks.outcomes(function, *args, ranks=count)
    assert time.monotonic() - start < limit
    return outcomes


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def disagreement(outcomes: list[Any]) -> str:
    """The error that all ranks raise, word for word the same."""
    assert {outcome.kind for outcome in outcomes} == {"AgreementError"}
    [text] = {outcome.text for outcome in outcomes}
    return text
