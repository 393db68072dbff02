"""One rank of `lowbit bench tensor-parallel`: sums its tensor as it is told to."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.bench.gradients_rank import sent_bytes
from lowbit.bench.rank import serve
from lowbit.bench.tensor_parallel import FORMATS, codec_of, sample
from lowbit.codecs import Codec
from lowbit.collectives import all_reduce


class Rank:
    """This rank's partial sums, and the codecs that fit everybody's."""

    def __init__(self) -> None:
        self._x = torch.empty(0)
        self._codecs: dict[str, Codec] = {}

    def open(self, tokens: int, width: int) -> dict[str, float]:
        """Make the largest message, of which smaller ones are the first tokens, and the codecs; bits by format."""
        parts = [sample(tokens, width, rank) for rank in range(dist.get_world_size())]
        self._x = parts[dist.get_rank()]
        self._codecs = {name: codec_of(name, parts) for name in FORMATS if name != "bf16"}
        bits = {name: c.bits_per_element((tokens, width)) for name, c in self._codecs.items()}
        return bits | {"bf16": 16.0}

    def reduce(self, name: str, algorithm: str, tokens: int, calls: int) -> dict[str, float]:
        """Sum a message several times: seconds of a call, and bytes that left this host for it."""
        messages = [self._x[:tokens].clone() for _ in range(calls)]
        dist.barrier()
        before, start = sent_bytes(), time.perf_counter()
        for x in messages:
            self._sum(x, name, algorithm)
        seconds = time.perf_counter() - start
        dist.barrier()
        return {"seconds": seconds / calls, "sent": (sent_bytes() - before) / calls}

    def error(self, name: str, algorithm: str) -> float:
        """Relative error of the sum of the largest message."""
        x = self._x.clone()
        self._sum(x, name, algorithm)
        exact = torch.zeros(x.shape, dtype=torch.float64)
        for rank in range(dist.get_world_size()):
            exact += sample(*x.shape, rank)
        return float((x - exact).norm() / exact.norm())

    def _sum(self, x: Tensor, name: str, algorithm: Any) -> None:
        if name == "bf16":
            dist.all_reduce(x)
        else:
            all_reduce(x, self._codecs[name], algorithm=algorithm, small=0)


if __name__ == "__main__":
    serve(Rank)
