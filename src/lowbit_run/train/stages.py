"""Pipeline stages and their schedule."""

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from lowbit.gradients import GradientStorage
from lowbit.pipeline import LowBitStage
from lowbit.pipeline.boundary import warm_up
from lowbit_run.train.boundaries import Codecs
from lowbit_run.train.metrics import Work
from lowbit_run.train.model import StageModule, next_token_loss

if TYPE_CHECKING:
    from lowbit_run.train.prepare import Prepared

_COUNTED = (  # fields that a stage's traffic shares with `Work`
    "forward_bytes", "forward_elements", "backward_bytes", "backward_elements", "checksum_seconds", "wait_seconds",
)  # fmt: skip


class Pipeline:
    """This rank's stages with the schedule that runs them.

    Args:
        modules: this rank's modules by stage, on the device. group: the ranks of this pipeline; None: the default one.
        storage: holds the gradients instead of `.grad`; the schedule then does not divide them by the micro-batches.

    Attributes:
        width: elements of an activation. anchor: of all stages, or None.
        followed: copies of parameters that follow another rank of this pipeline, by name; equal on both ranks.
    """

    def __init__(
        self,
        prepared: "Prepared",
        modules: dict[int, StageModule],
        storage: GradientStorage | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.config, self.layout, self.modules, self.codecs = prepared.config, prepared.layout, modules, prepared.codecs
        self.device, self._group, self.width = prepared.device, group, next(iter(modules.values())).width
        self.anchor = prepared.anchor
        self._loss = _Loss()  # a method of this object would keep it alive in a cycle with the schedule
        self.stages = [self._stage(index) for index in modules]
        if self.config.checkpoints:
            for stage in self.stages:
                _never_split(stage)
        if storage is not None:
            for stage in self.stages:
                _absorb_weight_passes(stage, storage)
        kind = get_schedule_class(self.config.pipeline.schedule)
        several = issubclass(kind, PipelineScheduleMulti)
        self.schedule = kind(
            self.stages if several else self.stages[0],  # pyright: ignore[reportArgumentType]
            n_microbatches=self.config.pipeline.microbatches,
            loss_fn=self._loss,
            scale_grads=storage is None,
        )
        self.followed: dict[str, Tensor] = {}
        self.sent: dict[tuple[int, int], int] = {}  # bytes of the last step, by (stage of this rank, receiving stage)
        self._compile_kernels()

    @property
    def lowbit_stages(self) -> dict[int, LowBitStage]:
        """Stages with codecs, by index."""
        return {s.stage_index: s for s in self.stages if isinstance(s, LowBitStage)}

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        learned: int | None = None,
    ) -> tuple[float, Work]:
        """Run forward and backward of one batch; gradients are left in the parameters.

        Args:
            inputs, targets: int64 (batch, sequence). ids: sample ids, int64 (batch,).
            positions: of tokens in their samples, int64 (batch, sequence), if windows hold several samples.
            learned: number of targets that are not ignored, over all pipelines, so that each counts the same; None:
                none is ignored.

        Returns:
            Mean loss over the micro-batches (0.0 on ranks without the last stage), and the work of the step.
        """
        losses: list[Tensor] = []
        for stage in self.lowbit_stages.values():
            stage.set_samples(ids)
            stage.set_tokens(inputs)
            stage.traffic.reset()
        whole = self.config.pipeline.microbatches * self.config.pipeline.data_parallel
        self._loss.learned = None if learned is None else learned / whole
        kwargs = {} if positions is None else {"positions": positions.to(self.device)}
        has_first, has_last = 0 in self.modules, self.layout.stages - 1 in self.modules
        start = time.perf_counter()
        self.schedule.step(
            *([inputs.to(self.device)] if has_first else []),
            target=targets.to(self.device) if has_last else None,
            losses=losses if has_last else None,
            return_outputs=False,
            **kwargs,
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the gradients are needed next anyway
        seconds = time.perf_counter() - start
        loss = torch.stack(losses).detach().mean().item() if losses else 0.0
        return loss, self._work(seconds)

    def use_codecs(self, codecs: Codecs, *, keep_state: bool = False) -> None:
        """Change the formats from the next step on, as `LowBitStage.set_codecs`; every rank calls it."""
        self.codecs = codecs
        for stage in self.lowbit_stages.values():
            stage.set_codecs(dict(enumerate(codecs.forward)), dict(enumerate(codecs.backward)), keep_state=keep_state)
        self._compile_kernels()

    def look_ahead(self, ahead: bool) -> None:
        """Set whether steps post receives for the next one at their end; must be off before formats change."""
        for stage in self.lowbit_stages.values():
            stage.looks_ahead = ahead

    def _stage(self, index: int) -> PipelineStage:
        module, shape = self.modules[index], (self.config.rows, self.config.data.sequence)
        floats: Any = {"device": "meta", "requires_grad": True}
        activations = torch.empty(*shape, module.width, dtype=module.boundary_dtype, **floats)
        logits = torch.empty(*shape, module.vocab, dtype=module.autocast or module.dtype, **floats)
        common: dict[str, Any] = {  # meta tensors like those of a micro-batch save PyTorch a trial run
            "input_args": torch.empty(shape, dtype=torch.int64, device="meta") if module.first else activations,
            "output_args": logits if module.last else activations, "group": self._group,
        }  # fmt: skip
        return self._new_stage(module, index, **common)

    def _new_stage(self, module: StageModule, index: int, **common: Any) -> PipelineStage:
        return LowBitStage(
            module,
            index,
            self.layout.stages,
            self.device,
            **common,
            forward=dict(enumerate(self.codecs.forward)),
            backward=dict(enumerate(self.codecs.backward)),
            warmup_steps=self.config.codec_warmup_steps,
            timeout=self.config.run.timeout_seconds,
            checksums=self.config.run.checksums,
            anchor=self.anchor,
        )

    def _compile_kernels(self) -> None:
        """Use the codecs of this rank's boundaries once, so that no step waits for compilation."""
        shape = torch.Size((self.config.rows, self.config.data.sequence, self.width))
        for boundary in {side for index in self.modules for side in (index - 1, index)}:
            if 0 <= boundary < self.layout.stages - 1 and self.layout.crosses(boundary):
                for codec in (self.codecs.forward[boundary], self.codecs.backward[boundary]):
                    warm_up(codec, shape, torch.float32, self.device)

    def _work(self, seconds: float) -> Work:
        work = Work()
        for index, stage in self.lowbit_stages.items():
            traffic = stage.traffic
            self._note_sent(index, traffic.forward_bytes, traffic.backward_bytes)
            for name in _COUNTED:
                setattr(work, name, getattr(work, name) + getattr(traffic, name))
            work.codec_seconds += traffic.codec_seconds + traffic.checksum_seconds
            work.other_bytes += traffic.announced_bytes
        work.compute_seconds = seconds - work.codec_seconds - work.wait_seconds
        return work

    def _note_sent(self, stage: int, forward: int, backward: int) -> None:
        self.sent |= {(stage, stage + 1): forward} if forward else {}
        self.sent |= {(stage, stage - 1): backward} if backward else {}


class _Loss:
    """Loss of a micro-batch, scaled so that its mean over all micro-batches is the mean over all learned tokens."""

    learned: float | None = None  # average number of learned tokens in a micro-batch; None: all are learned

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.learned is None:
            return next_token_loss(logits, targets)
        return next_token_loss(logits, targets, "sum") / self.learned


def _never_split(stage: PipelineStage) -> None:
    """Run whole backward passes: until its second part, a split one would hold what layers have computed again."""
    backward = stage.backward_one_chunk

    def whole(number: int, loss: Any = None, full_backward: bool = True, **named: Any) -> None:
        backward(number, loss, **named)

    stage.backward_one_chunk = whole  # pyright: ignore[reportAttributeAccessIssue]
    stage.backward_weight_one_chunk = lambda *args, **kwargs: None


def _absorb_weight_passes(stage: PipelineStage, storage: GradientStorage) -> None:
    """Let the storage absorb gradients that zero-bubble weight passes write to `.grad` without calling hooks."""
    weight_pass = stage.backward_weight_one_chunk

    def absorbing(*args: Any, **kwargs: Any) -> None:
        weight_pass(*args, **kwargs)
        storage.absorb(stage.submod.parameters())

    stage.backward_weight_one_chunk = absorbing
