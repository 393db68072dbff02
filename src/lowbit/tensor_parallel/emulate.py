"""A tensor-parallel model in one process: on CPU, bit for bit what real ranks compute; to calibrate and evaluate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.codecs.base import Codec
from lowbit.codecs.checks import check_int
from lowbit.tensor_parallel.calibration import Calibration
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.plan import (
    ROW,
    Plan,
    check_heads,
    is_row,
    parallel_boundaries,
    plan_of,
    shards,
)
from lowbit.tensor_parallel.reduce import Settings, check_codec, check_inference, sum_in_process
from lowbit.tensor_parallel.rowwise import Installed
from lowbit.tensor_parallel.traffic import Traffic

Watch = Callable[[str, Sequence[Tensor], Tensor], None]
"""Called with the name of a boundary, the ranks' partial sums and their sum."""


class Emulation(Installed):
    """A model whose forward passes go as on `ranks` tensor-parallel ranks, until `remove`. A context manager.

    Attributes:
        ranks: that are played. traffic: what each of them would have sent and received so far.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks


def emulate_tensor_parallel_(
    model: nn.Module,
    ranks: int,
    low_bit: Calibration | Codec | None = None,
    *,
    settings: Settings | None = None,
    plan: Plan | None = None,
    watch: Watch | None = None,
    drift: Drift | None = None,
) -> Emulation:
    """Make a whole model compute, in place and in this process, what it would on so many tensor-parallel ranks.

    Every matrix product has the shape that it has on a rank (column-wise weights are cut by outputs, row-wise ones by
    inputs), activations between them are computed by shards, and partial sums are coded and added up in the order of
    the ranks: on CPU, logits are bit-identical to those of real ranks that use as many threads (tested, with bfloat16
    and float32 weights). On a GPU that is not shown: attention is computed for all heads at once here and for a rank's
    own there, for which a kernel may choose another order of additions. Memory: a second copy of the row-wise
    weights. Nothing travels.

    Args:
        model: a whole Hugging Face model, or any module with a `plan`.
        ranks: how many to play, at least 1.
        low_bit: a `Calibration` for so many ranks and this model; any codec, used by all boundaries (`GroupInt` for a
            plain INT8); None: sums in the model's dtype, in the order of the ranks, rounded once. The engine's own
            BF16 all-reduce does the same for two ranks, and rounds after every addition with more.
        settings: how sums travel; default `Settings()`.
        plan: overrides the model's own.
        watch: sees all partial sums and their total. drift: watches what is coded, over all ranks.

    Returns:
        An `Emulation`, whose `remove()` undoes it.

    Raises:
        ValueError: no plan, modules that are not `Linear`, heads or a calibration that do not fit.
        RuntimeError: in a forward pass with gradients on: it is for inference.
    """
    check_int("ranks", ranks, 1, 1 << 16)
    if parallel_boundaries(model) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("model is on tensor-parallel ranks already; allowed: a whole one")
    check_heads(model, ranks)
    styles = plan_of(model, plan)
    modules = dict(model.named_modules())
    rows = {name: modules[name] for name, style in styles.items() if is_row(style)}
    if isinstance(low_bit, Calibration):
        low_bit.check(model, ranks, rows)
    emulation = Emulation(ranks)
    chosen = settings or Settings()
    forwards: dict[nn.Module, Callable[..., Tensor]] = {}  # all of them, or none
    for name, style in styles.items():
        module = modules[name]
        assert isinstance(module, nn.Linear)
        if is_row(style):
            codec = low_bit.codec(name) if isinstance(low_bit, Calibration) else low_bit
            if codec is not None:
                check_codec(name, codec, module.out_features, ranks)
            if drift is not None:
                codec = drift.attach(name, codec, module.weight.device)
            add_up = _Sum(name, codec, chosen, watch, drift, emulation.traffic)
            forwards[module] = _row_forward(name, module, ranks, add_up)
        else:
            forwards[module] = _column_forward(module, ranks)
    for module, forward in forwards.items():
        emulation.replace(module, forward)
    for name, style in styles.items():
        if style in ROW:
            _cut_activations(emulation, modules[name.rpartition(".")[0]], modules[name])
    return emulation


class _Sum:
    """What happens to the partial sums of a boundary."""

    def __init__(
        self,
        name: str,
        codec: Codec | None,
        settings: Settings,
        watch: Watch | None,
        drift: Drift | None,
        traffic: Traffic,
    ) -> None:
        self._name, self._codec, self._settings = name, codec, settings
        self._watch, self._drift, self._traffic = watch, drift, traffic

    def __call__(self, partials: list[Tensor]) -> Tensor:
        numel, ranks = partials[0].numel(), len(partials)
        coded = self._traffic.take(partials[0], ranks, self._codec, self._settings)
        if self._drift is not None and coded:
            assert self._codec is not None
            totals = ranks * self._settings.totals(numel, ranks, self._codec)
            self._drift.look(self._name, partials, totals)
        total = sum_in_process(partials, self._codec, self._settings)
        if self._watch is not None:
            self._watch(self._name, partials, total)
        return total


def _row_forward(
    name: str, module: nn.Linear, ranks: int, add_up: Callable[[list[Tensor]], Tensor]
) -> Callable[[Tensor], Tensor]:
    cut = _Cut(module, ranks, dim=1)

    def forward(x: Tensor) -> Tensor:
        check_inference(name, x, module.weight)
        weights = cut.of(module.weight)
        parts = zip(shards(x, ranks, -1), weights, strict=True)
        total = add_up([F.linear(part.contiguous(), weight) for part, weight in parts])
        return total if module.bias is None else total + module.bias

    return forward


def _column_forward(module: nn.Linear, ranks: int) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weights = shards(module.weight, ranks, 0)
        biases = [None] * ranks if module.bias is None else shards(module.bias, ranks, 0)
        return torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], -1)

    return forward


class _Cut:
    """Columns of a weight for each rank, each in memory of its own as a rank has it; made again when it changes."""

    def __init__(self, module: nn.Linear, ranks: int, dim: int) -> None:
        self._ranks, self._dim = ranks, dim
        self._key: object = None
        self._parts: list[Tensor] = []

    def of(self, weight: Tensor) -> list[Tensor]:
        key = (weight.data_ptr(), weight._version, weight.dtype)
        if key != self._key:
            self._parts = [part.detach().clone() for part in shards(weight, self._ranks, self._dim)]
            self._key = key
        return self._parts


def _cut_activations(emulation: Emulation, parent: nn.Module, row: nn.Module) -> None:
    """Let functions without parameters beside a row-wise module see one rank's features at a time.

    Vectorized loops compute the last elements of a tensor by other instructions than the rest, so where a tensor ends
    may show in the last bit of an exponential.
    """
    assert isinstance(row, nn.Linear)
    for module in parent.children():
        plain = not list(module.parameters()) and not isinstance(module, nn.Dropout)
        if plain and not list(module.children()):
            own = module.forward

            def forward(x: Tensor, *args: Any, _own: Any = own, **kwargs: Any) -> Tensor:
                if not isinstance(x, Tensor) or x.shape[-1] != row.in_features:
                    return _own(x, *args, **kwargs)
                parts = [part.contiguous() for part in shards(x, emulation.ranks, -1)]
                return torch.cat([_own(part, *args, **kwargs) for part in parts], -1)

            emulation.replace(module, forward)
