"""Pipeline stages and their schedule: the one place where a boundary's kind is chosen."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from lowbit.gradients import GradientStorage
from lowbit.pipeline import LowBitStage
from lowbit.pipeline.boundary import warm_up
from lowbit.train.boundaries import Codecs, stock_dtype
from lowbit.train.config import TrainConfig
from lowbit.train.layout import Layout
from lowbit.train.metrics import Work
from lowbit.train.model import StageModule, next_token_loss


class StockStage(PipelineStage):
    """PyTorch's own stage, which measures how long it computes (on GPUs: launches that); to compare with."""

    compute_seconds = 0.0

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class does, timed."""
        return self._timed(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class does, timed."""
        return self._timed(super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class does, timed."""
        return self._timed(super().backward_weight_one_chunk, *args, **kwargs)

    def _timed(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.compute_seconds += time.perf_counter() - start
        return result


class Pipeline:
    """This rank's stages with the schedule that runs them.

    Args:
        config: the run; plan: where everything lies.
        modules: this rank's modules by stage, on `device`.
        codecs: what the boundaries use.
        storage: what takes the gradients out of `.grad`; nobody divides those by the number of micro-batches then.
        group: the ranks of this pipeline; None: the default group.
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: Layout,
        modules: dict[int, StageModule],
        codecs: Codecs,
        device: torch.device,
        storage: GradientStorage | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.config, self.plan, self.modules, self.codecs = config, plan, modules, codecs
        self.device, self.storage, self._group = device, storage, group
        self._width = next(iter(modules.values())).width
        self.stages = [self._stage(index) for index in modules]
        if storage is not None:
            for stage in self.stages:
                _absorb_weight_passes(stage, storage)
        kind = get_schedule_class(config.pipeline.schedule)
        several = issubclass(kind, PipelineScheduleMulti)
        self.schedule = kind(
            self.stages if several else self.stages[0],  # pyright: ignore[reportArgumentType]
            n_microbatches=config.pipeline.microbatches,
            loss_fn=next_token_loss,
            scale_grads=storage is None,
        )
        self._compile_kernels()

    @property
    def has_first(self) -> bool:
        """Whether this rank reads token ids."""
        return 0 in self.modules

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.plan.stages - 1 in self.modules

    @property
    def lowbit_stages(self) -> dict[int, LowBitStage]:
        """Stages with codecs, by index."""
        return {s.stage_index: s for s in self.stages if isinstance(s, LowBitStage)}

    def step(self, inputs: Tensor, targets: Tensor, ids: Tensor) -> tuple[float, Work]:
        """Forward and backward of one batch; gradients are left in the parameters.

        Args:
            inputs, targets: int64 (batch, sequence). ids: sample ids, int64 (batch,).

        Returns:
            Mean loss over the micro-batches (0.0 where this rank has no last stage), and what the step cost.
        """
        losses: list[Tensor] = []
        for stage in self.stages:
            if isinstance(stage, LowBitStage):
                stage.set_samples(ids)
                stage.traffic.reset()
        start = time.perf_counter()
        self.schedule.step(
            *([inputs.to(self.device)] if self.has_first else []),
            target=targets.to(self.device) if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the gradients are needed next anyway
        seconds = time.perf_counter() - start
        loss = torch.stack(losses).detach().mean().item() if losses else 0.0
        return loss, self._work(seconds)

    def _stage(self, index: int) -> PipelineStage:
        shapes = _examples(self.modules[index], self.config.rows, self.config.data.sequence)
        common = (self.modules[index], index, self.plan.stages, self.device)
        if self.config.pipeline.boundary != "lowbit":
            return StockStage(*common, input_args=shapes[0], output_args=shapes[1], group=self._group)
        return LowBitStage(
            *common,
            input_args=shapes[0],
            output_args=shapes[1],
            group=self._group,
            forward=dict(enumerate(self.codecs.forward)),
            backward=dict(enumerate(self.codecs.backward)),
            warmup_steps=self.config.codec_warmup_steps,
            timeout=self.config.run.timeout_seconds,
            checksums=self.config.run.checksums,
        )

    def _compile_kernels(self) -> None:
        """Use the codecs of this rank's boundaries once, so that no step's time has compilation in it."""
        shape = torch.Size((self.config.rows, self.config.data.sequence, self._width))
        for index in self.modules:
            for boundary in (index - 1, index):
                if 0 <= boundary < self.plan.stages - 1 and self.plan.crosses(boundary):
                    for codec in (self.codecs.forward[boundary], self.codecs.backward[boundary]):
                        if not codec.settled:
                            continue  # once it is settled, its lanes do so
                        warm_up(codec, shape, stock_dtype(self.config.pipeline), self.device)

    def _work(self, seconds: float) -> Work:
        work = Work()
        for stage in self.stages:
            if isinstance(stage, LowBitStage):
                work.forward_bytes += stage.traffic.forward_bytes
                work.forward_elements += stage.traffic.forward_elements
                work.backward_bytes += stage.traffic.backward_bytes
                work.backward_elements += stage.traffic.backward_elements
                work.codec_seconds += stage.traffic.codec_seconds + stage.traffic.checksum_seconds
                work.checksum_seconds += stage.traffic.checksum_seconds
                work.wait_seconds += stage.traffic.wait_seconds
            elif isinstance(stage, StockStage):
                work.compute_seconds += stage.compute_seconds
                stage.compute_seconds = 0.0
        if self.config.pipeline.boundary == "lowbit":
            work.compute_seconds = seconds - work.codec_seconds - work.wait_seconds
        else:
            work.wait_seconds = seconds - work.compute_seconds
            self._count_stock(work)
        return work

    def _count_stock(self, work: Work) -> None:
        """What a stock stage sends follows from the shapes."""
        rows = self.config.rows * self.config.pipeline.microbatches * self.config.data.sequence
        width = self._width
        for index in self.modules:
            forward = index < self.plan.stages - 1 and self.plan.crosses(index)
            backward = index > 0 and self.plan.crosses(index - 1)
            work.forward_elements += rows * width * forward
            work.backward_elements += rows * width * backward
        size = stock_dtype(self.config.pipeline).itemsize
        work.forward_bytes = work.forward_elements * size
        work.backward_bytes = work.backward_elements * size


def _absorb_weight_passes(stage: PipelineStage, storage: GradientStorage) -> None:
    """The weight passes of zero-bubble schedules write `.grad` themselves, which no hook of autograd notices."""
    weight_pass = stage.backward_weight_one_chunk

    def absorbing(*args: Any, **kwargs: Any) -> None:
        weight_pass(*args, **kwargs)
        storage.absorb(stage.submod.parameters())

    stage.backward_weight_one_chunk = absorbing


def _examples(module: StageModule, rows: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Shape and dtype of a micro-batch on either side of a stage, so that no trial run has to find them."""

    def floats(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, sequence, width, dtype=dtype, device="meta", requires_grad=True)

    ids = torch.empty(rows, sequence, dtype=torch.int64, device="meta")
    activations = floats(module.width, module.wire)
    logits = floats(module.vocab, module.autocast or torch.float32)  # PyTorch 2.11 compares
    return ids if module.first else activations, logits if module.last else activations
