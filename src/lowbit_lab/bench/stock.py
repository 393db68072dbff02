"""The baseline of pipelines: training with PyTorch's own stage in place of `LowBitStage`."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lowbit_run.train.metrics import Work
from lowbit_run.train.model import StageModule
from lowbit_run.train.stages import Pipeline
from lowbit_run.train.trainer import Trainer


class StockStage(PipelineStage):
    """PyTorch's own stage, with a timer for its computing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_seconds = 0.0
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.compute_seconds += time.perf_counter() - start
            return result

        return timed


class _HandingOver(nn.Module):
    """A module whose activations have another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.module(*args, **kwargs).to(self.dtype)


class StockPipeline(Pipeline):
    """A pipeline of PyTorch's stages, which hand over tensors in the configured format: "fp32" or "bf16"."""

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.pipeline.forward == ("bf16",) else torch.float32

    def _new_stage(self, module: StageModule, index: int, **common: Any) -> PipelineStage:
        for name, crosses in (("input_args", not module.first), ("output_args", not module.last)):
            if crosses:
                common[name] = torch.empty_like(common[name], dtype=self._dtype, requires_grad=True)
        whole = module if module.last else _HandingOver(module, self._dtype)
        return StockStage(whole, index, self.layout.stages, self.device, **common)

    def _work(self, seconds: float) -> Work:
        work = Work()
        for stage in self.stages:
            assert isinstance(stage, StockStage)
            work.compute_seconds += stage.compute_seconds
            stage.compute_seconds = 0.0
        work.wait_seconds = seconds - work.compute_seconds
        # The bytes that PyTorch's stage sends follow from the shapes.
        rows = self.config.rows * self.config.pipeline.microbatches
        for index, module in self.modules.items():
            elements = rows * self.config.data.sequence * module.width
            forward = elements * (index < self.layout.stages - 1 and self.layout.crosses(index))
            backward = elements * (index > 0 and self.layout.crosses(index - 1))
            work.forward_elements += forward
            work.backward_elements += backward
            self._note_sent(index, forward * self._dtype.itemsize, backward * self._dtype.itemsize)
        work.forward_bytes = work.forward_elements * self._dtype.itemsize
        work.backward_bytes = work.backward_elements * self._dtype.itemsize
        return work


class StockTrainer(Trainer):
    """Trains with `StockPipeline`."""

    pipeline_kind = StockPipeline
