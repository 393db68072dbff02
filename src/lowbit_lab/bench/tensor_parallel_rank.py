"""One rank of `lowbit bench tensor-parallel`: sums its tensor on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lowbit.codecs import Codec
from lowbit.collectives import all_reduce
from lowbit.tensor_parallel import Installed, SumSettings, calibrate, low_bit_, tensor_parallel_
from lowbit.tensor_parallel.plan import is_cut_by_input, local
from lowbit.tensor_parallel.reduce import Choice, SumSample, measured, sum_over_ranks
from lowbit.train.config import ModelConfig
from lowbit.train.model import build_model, vocabulary
from lowbit.wire.pytorch import default_group
from lowbit_lab.bench.sums import error_of_sum, timed
from lowbit_lab.bench.tensor_parallel import Format, codec_of, sample
from lowbit_lab.bench.worker import serve

_VOCAB = 512
_FITTED = 64  # least number of tokens: with fewer, some features are 0 in all sums


class TensorParallelRank:
    """This rank's partial sums, and codecs that are fitted to those of all ranks."""

    def __init__(self) -> None:
        self._x = torch.empty(0)
        self._codecs: dict[str, Codec] = {}
        self._model: Any = None
        self._ids = torch.empty(0)
        self._sources: dict[str, Any] = {}
        self._auto: dict[str, SumSettings] = {}

    def open(self, tokens: int, width: int) -> dict[str, float]:
        """Make the codecs and the largest message, whose first tokens are the smaller ones; return bits by format."""
        parts = [sample(max(_FITTED, tokens), width, rank, draw=1) for rank in range(dist.get_world_size())]
        self._x = sample(tokens, width, dist.get_rank())
        self._codecs = {name: codec_of(name, parts) for name in get_args(Format) if name != "bf16"}
        return {name: c.bits_per_element((tokens, width)) for name, c in self._codecs.items()} | {"bf16": 16.0}

    def measure(self, names: list[str]) -> None:
        """Measure on the link the number of tokens from which on formats are faster than PyTorch's all-reduce."""
        for name in names:
            sample = SumSample(self._x.shape[1], self._x.dtype, self._x.device, self._codecs[name])
            self._auto[name] = measured([sample], default_group(), SumSettings(), anew=True)

    def reduce(self, name: str, algorithm: str, tokens: int, calls: int) -> dict[str, Any]:
        """Sum a message several times; return seconds and bytes of a call, and what "auto" chooses."""
        messages = [self._x[:tokens].clone() for _ in range(calls)]

        def every() -> None:
            for x in messages:
                self._sum(x, name, algorithm)

        result: dict[str, Any] = {key: value / calls for key, value in timed(every).items()}
        return result | ({"choice": self._choice(name, messages[0])} if algorithm == "auto" else {})

    def error(self, name: str, algorithm: str) -> float:
        """Return the relative error of the sum of the largest message."""
        x = self._x.clone()
        self._sum(x, name, algorithm)
        return error_of_sum(x, (sample(x.shape[0], x.shape[1], rank) for rank in range(dist.get_world_size())))

    def prepare(self, tokens: int, model: dict[str, Any]) -> None:
        """Split a model with random weights over the ranks, and calibrate its sums on the prompt that it will read."""
        sizes = ModelConfig(**model)
        vocab = vocabulary(sizes, _VOCAB)
        self._model = tensor_parallel_(build_model(sizes, vocab=vocab, sequence=tokens, seed=0).bfloat16().eval())
        self._ids = torch.randint(vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
        calibration = calibrate(self._model, [self._ids])
        self._sources = {
            "feature-int4": calibration, "feature-int4-static": calibration.select(gain="static"),
            "int4": calibration.select(k=0), "int8": codec_of("int8", []),
        }  # fmt: skip

    def measure_prefill(self, names: list[str]) -> None:
        """Measure thresholds of the model's sums on the link."""
        for name in names:
            with low_bit_(self._model, self._sources[name]) as installed:
                installed.measure()

    def prefill(self, name: str) -> dict[str, float]:
        """Run the model on its prompt."""
        with torch.inference_mode():
            if name == "bf16":
                installed = _pytorch_sums(self._model)
            else:
                installed = low_bit_(self._model, self._sources[name])
            with installed:
                return timed(lambda: self._model(self._ids, use_cache=False, logits_to_keep=1))

    def _sum(self, x: Tensor, name: str, algorithm: Any) -> None:
        if name == "bf16":
            dist.all_reduce(x)
        elif algorithm == "auto":
            sum_over_ranks(x, self._codecs[name], default_group(), self._choice(name, x), self._auto[name])
        else:
            all_reduce(x, self._codecs[name], algorithm=algorithm, small=0)

    def _choice(self, name: str, x: Tensor) -> Choice:
        return self._auto[name].choice(x, dist.get_world_size(), self._codecs[name])


def _pytorch_sums(model: nn.Module) -> Installed:
    """Make the model add up its partial sums by PyTorch's own all-reduce, in its dtype."""

    def forward_of(weight: Tensor) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            y = functional.linear(x, weight)
            dist.all_reduce(y)
            return y

        return forward

    installed = Installed()
    for module in model.modules():
        if is_cut_by_input(module):
            installed.replace(module, forward_of(local(module.get_parameter("weight"))))
    return installed


if __name__ == "__main__":
    serve(TensorParallelRank)
