"""One rank of `lowbit bench gradients`: averages its tensor, and trains, on demand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lowbit.collectives import all_reduce
from lowbit.collectives.calls import payload_bytes, queue_of
from lowbit.gradients import GradientStorage, all_reduce_hook
from lowbit.train.config import ModelConfig
from lowbit.train.model import build_model, next_token_loss, vocabulary
from lowbit.wire.pytorch import default_group
from lowbit_lab.bench.gradients import ENGINE, MATRIX, POWER_RANK, STORED, codec_of
from lowbit_lab.bench.memory_run import Meter
from lowbit_lab.bench.sums import error_of_sum, timed
from lowbit_lab.bench.worker import serve

MICROBATCHES = 3
"""Micro-batches that stored gradients are averaged over. Dividing by 3 makes coding round; dividing by 4 would not."""
_BUCKET_MB = 25  # PyTorch's default
# PowerSGD starts its second all-reduce when the first has ended. With several buckets the order would differ between
# ranks, and Gloo would end the process; so it gets a single bucket.
_ONE_BUCKET_MB = 1 << 20
_HOOKS = {"hook-fp16": default_hooks.fp16_compress_hook, "hook-bf16": default_hooks.bf16_compress_hook}


class GradientsRank:
    """This rank's tensor, and its models by format."""

    def __init__(self) -> None:
        self._x = torch.empty(0)
        self._algorithm: Any = "two_shot"
        self._power: powerSGD_hook.PowerSGDState | None = None
        self._models: dict[str, tuple[nn.Module, GradientStorage | None, Tensor, int]] = {}
        self._stored: dict[str, tuple[GradientStorage, list[nn.Parameter]]] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}  # one per format, so that each has its own payload buffers

    def open(self, numel: int, algorithm: str) -> None:
        """Make the tensor to average."""
        self._x, self._algorithm = sample(numel, dist.get_rank()), algorithm

    def average(self, name: str) -> dict[str, float]:
        """Average once."""
        x = self._gradients(name)
        return timed(lambda: self._average(name, x))

    def outcome(self, name: str) -> dict[str, float]:
        """Return peak memory, and the error of the mean in the third call, when PowerSGD starts to compress."""
        for _ in range(3):
            x = self._gradients(name)
            meter = Meter(torch.device("cpu"))
            meter.reset()
            self._average(name, x)
            peak = meter.peak()
        if name in STORED:
            storage, _ = self._stored[name]
            held, x = storage.nbytes, torch.cat([gradient.view(-1) for _, gradient in storage.gradients()])
            x *= MICROBATCHES
        else:
            held = x.nbytes
        ranks, total = dist.get_world_size(), x.double() * dist.get_world_size()
        error = error_of_sum(total, (sample(x.numel(), rank) for rank in range(ranks))) if dist.get_rank() == 0 else 0.0
        kept = queue_of(self._groups[name]).scratch.nbytes()
        return {"error": error, "peak_bytes": held + kept + peak}

    def _gradients(self, name: str) -> Tensor:
        """Return this rank's gradients, as a copy or stored."""
        if name not in self._groups:
            self._groups[name] = _new_group()
        if name not in STORED:
            return self._x.clone()
        matrices = self._x.view(-1, MATRIX, MATRIX)
        if name not in self._stored:
            parameters = [nn.Parameter(torch.empty_like(part)) for part in matrices]
            self._stored[name] = GradientStorage(parameters), parameters
        storage, parameters = self._stored[name]
        for parameter, part in zip(parameters, matrices, strict=True):
            storage.put(parameter, part)
        storage.scale_(1 / MICROBATCHES)
        return torch.empty(0)

    def prepare(self, name: str, model: dict[str, Any], batch: int, sequence: int) -> None:
        """Set up data-parallel training with a format, and do the first steps, after which buckets no longer change."""
        sizes = ModelConfig(**model)
        vocab = vocabulary(sizes, 256)
        replica: Any = build_model(sizes, vocab=vocab, sequence=sequence, seed=0)
        storage = GradientStorage(replica) if name in STORED else None
        if storage is not None:
            self._groups[name] = _new_group()
        else:
            replica = self._wrapped(name, replica)
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(vocab, (batch, sequence + 1), generator=generator)
        before = payload_bytes()
        self._models[name] = replica, storage, tokens, 0
        for _ in range(3):
            self.step(name)
        self._models[name] = replica, storage, tokens, payload_bytes() - before

    def step(self, name: str) -> dict[str, float]:
        """Train a step; return its seconds, and the bytes held for gradients at its end."""
        model, storage, tokens, payloads = self._models[name]
        dist.barrier()
        start = time.perf_counter()
        next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:]).backward()
        if storage is not None:
            self._average_stored(name, storage)
        seconds = time.perf_counter() - start
        if storage is not None:
            held = storage.nbytes
            storage.zero_()
            return {"seconds": seconds, "gradient_bytes": held + payloads}
        gradients = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
        held = sum({s.data_ptr(): s.nbytes() for s in gradients}.values())
        model.zero_grad(set_to_none=True)
        return {"seconds": seconds, "gradient_bytes": held + payloads}

    def _wrapped(self, name: str, model: nn.Module) -> DistributedDataParallel:
        replica = DistributedDataParallel(
            model, bucket_cap_mb=_ONE_BUCKET_MB if name == "powersgd" else _BUCKET_MB, gradient_as_bucket_view=True
        )
        if name in _HOOKS:
            replica.register_comm_hook(None, _HOOKS[name])
        elif name == "powersgd":
            replica.register_comm_hook(_power_state(), powerSGD_hook.powerSGD_hook)
        elif name not in ENGINE:
            replica.register_comm_hook(None, all_reduce_hook(codec_of(name), algorithm=self._algorithm))
        return replica

    def _average(self, name: str, x: Tensor) -> None:
        """Replace a tensor, or stored gradients, by the mean over all ranks."""
        if name in STORED:
            self._average_stored(name, self._stored[name][0])
        elif name == "engine-fp32":
            dist.all_reduce(x)
            x.div_(dist.get_world_size())
        elif name == "engine-bf16":
            low = x.bfloat16()
            dist.all_reduce(low)
            x.copy_(low).div_(dist.get_world_size())
        elif name in ENGINE:
            bucket = bucket_of(x)
            if name == "powersgd":
                self._power = self._power or _power_state()
                mean = powerSGD_hook.powerSGD_hook(self._power, bucket).wait()
            else:
                mean = _HOOKS[name](default_group(), bucket).wait()
            if mean.data_ptr() != x.data_ptr():
                x.copy_(mean)
        else:
            all_reduce(x, codec_of(name), self._groups[name], "avg", self._algorithm)

    def _average_stored(self, name: str, storage: GradientStorage) -> None:
        group = self._groups[name]
        if name == "fp8-stored":
            storage.average(group)
        else:
            storage.all_reduce(lambda flat: all_reduce(flat, storage.codec, group, "avg", async_op=True))


def _new_group() -> dist.ProcessGroup:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def bucket_of(flat: Tensor) -> Any:
    """Imitate the parts of a `GradBucket` that PyTorch's hooks use, with consecutive square matrices."""
    matrices = list(flat.view(-1, MATRIX, MATRIX))
    return SimpleNamespace(buffer=lambda: flat, gradients=lambda: matrices, index=lambda: 0, is_last=lambda: True)


def sample(numel: int, rank: int) -> Tensor:
    """Draw a rank's gradients: a part common to all ranks plus its own part, with rows of very different sizes."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    own = torch.randn(numel, generator=torch.Generator().manual_seed(2 + rank))
    rows = torch.randn(numel // MATRIX, 1, generator=torch.Generator().manual_seed(0)).exp()
    return ((common + own).view(-1, MATRIX) * (1e-3 * rows)).view(-1)


def _power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=2)


if __name__ == "__main__":
    serve(GradientsRank)
