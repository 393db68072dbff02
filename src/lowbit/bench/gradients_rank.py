"""One rank of `lowbit bench gradients`: follows orders as `lowbit.bench.rank` does, with averages instead of runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lowbit.bench.gradients import ENGINE, MATRIX, POWER_RANK, codec_of
from lowbit.bench.rank import serve
from lowbit.collectives import all_reduce
from lowbit.collectives.calls import payload_bytes
from lowbit.gradients import all_reduce_hook
from lowbit.ranks.groups import default_group
from lowbit.train.config import ModelConfig
from lowbit.train.model import build_model
from lowbit.train.stages import next_token_loss

_BUCKET_MB = 25  # PyTorch's default
# PowerSGD starts its second all-reduce when the first has ended. With several buckets that is in another order on
# another rank, upon which Gloo ends the process; so it gets a single bucket.
_ONE_BUCKET_MB = 1 << 20
_HOOKS = {
    "hook-fp16": default_hooks.fp16_compress_hook,
    "hook-bf16": default_hooks.bf16_compress_hook,
}


class Rank:
    """This rank's tensor, and its models by format."""

    def __init__(self) -> None:
        self._x = torch.empty(0)
        self._algorithm: Any = "two_shot"
        self._states: dict[str, Any] = {}
        self._models: dict[str, tuple[nn.Module, Tensor, int]] = {}

    def open(self, numel: int, algorithm: str) -> None:
        """Make the tensor that is averaged."""
        self._x, self._algorithm = sample(numel, dist.get_rank()), algorithm

    def average(self, name: str) -> dict[str, float]:
        """Average once: seconds, and bytes that left this host meanwhile."""
        x = self._x.clone()
        act = self._averager(name)
        dist.barrier()
        before, start = sent_bytes(), time.perf_counter()
        act(x)
        seconds = time.perf_counter() - start
        dist.barrier()
        return {"seconds": seconds, "sent": sent_bytes() - before}

    def error(self, name: str) -> float:
        """Relative error of the mean, on the third call, as PowerSGD is itself only then; 0.0 where not rank 0."""
        for _ in range(3):
            x = self._x.clone()
            self._averager(name)(x)
        if dist.get_rank() != 0:
            return 0.0
        exact = torch.zeros(x.shape, dtype=torch.float64)
        for rank in range(dist.get_world_size()):
            exact += sample(x.numel(), rank)
        exact /= dist.get_world_size()
        return float((x - exact).norm() / exact.norm())

    def prepare(
        self,
        name: str,
        dim: int,
        layers: int,
        heads: int,
        ffn: int,
        batch: int,
        sequence: int,
    ) -> None:
        """Set up data-parallel training with a format, and do the first two steps, after which buckets stay."""
        sizes = ModelConfig(dim=dim, layers=layers, heads=heads, ffn=ffn)
        model = build_model(sizes, vocab=256, sequence=sequence, seed=0)
        model = DistributedDataParallel(
            model,
            bucket_cap_mb=_ONE_BUCKET_MB if name == "powersgd" else _BUCKET_MB,
            gradient_as_bucket_view=True,
        )
        if name in _HOOKS:
            model.register_comm_hook(None, _HOOKS[name])
        elif name == "powersgd":
            model.register_comm_hook(_power_state(), powerSGD_hook.powerSGD_hook)
        elif name not in ENGINE:
            model.register_comm_hook(None, all_reduce_hook(codec_of(name), algorithm=self._algorithm))
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(256, (batch, sequence + 1), generator=generator)
        before = payload_bytes()
        self._models[name] = model, tokens, 0
        for _ in range(3):
            self.step(name)
        self._models[name] = model, tokens, payload_bytes() - before

    def step(self, name: str) -> dict[str, float]:
        """A step of training: seconds, and bytes held for gradients at its end."""
        model, tokens, payloads = self._models[name]
        dist.barrier()
        start = time.perf_counter()
        next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:]).backward()
        seconds = time.perf_counter() - start
        gradients = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
        held = sum({s.data_ptr(): s.nbytes() for s in gradients}.values())
        model.zero_grad(set_to_none=True)
        return {"seconds": seconds, "gradient_bytes": held + payloads}

    def _averager(self, name: str) -> Callable[[Tensor], object]:
        """Replaces a tensor by its mean over all ranks."""
        if name in ENGINE:
            return lambda x: self._engine(name, x)
        codec = codec_of(name)
        return lambda x: all_reduce(x, codec, None, "avg", self._algorithm)

    def _engine(self, name: str, x: Tensor) -> None:
        if name == "engine-fp32":
            dist.all_reduce(x)
            x.div_(dist.get_world_size())
        elif name == "engine-bf16":
            low = x.bfloat16()
            dist.all_reduce(low)
            x.copy_(low).div_(dist.get_world_size())
        else:
            bucket: Any = Bucket(x)
            if name == "powersgd":
                state = self._states.setdefault(name, _power_state())
                found = powerSGD_hook.powerSGD_hook(state, bucket).wait()
            else:
                found = _HOOKS[name](default_group(), bucket).wait()
            if found.data_ptr() != x.data_ptr():
                x.copy_(found)


class Bucket:
    """What PyTorch's hooks use of a `GradBucket`: square matrices, one behind the other."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def buffer(self) -> Tensor:
        """All of it."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """The matrices."""
        return list(self._flat.view(-1, MATRIX, MATRIX))

    def index(self) -> int:
        """Of the bucket."""
        return 0

    def is_last(self) -> bool:
        """Whether it is the last one of a backward pass."""
        return True


def sample(numel: int, rank: int) -> Tensor:
    """A rank's gradients: a part that all ranks have in common and one of its own, rows of very different sizes."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    own = torch.randn(numel, generator=torch.Generator().manual_seed(2 + rank))
    rows = torch.randn(numel // MATRIX, 1, generator=torch.Generator().manual_seed(0)).exp()
    return ((common + own).view(-1, MATRIX) * (1e-3 * rows)).view(-1)


def sent_bytes() -> int:
    """Bytes that all interfaces of this host have sent."""
    lines = Path("/proc/net/dev").read_text("utf-8").splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def _power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=2)


if __name__ == "__main__":
    serve(Rank)
