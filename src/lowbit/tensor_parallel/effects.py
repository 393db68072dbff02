"""What each layer's coding does to the outputs of a model: the weights by which a budget of bits is spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.codecs.base import Codec
from lowbit.tensor_parallel.emulate import emulate_tensor_parallel_
from lowbit.tensor_parallel.plan import Plan
from lowbit.tensor_parallel.reduce import SumSettings
from lowbit.tensor_parallel.rowwise import Installed, install
from lowbit.tensor_parallel.sums import ModelSum

_CODED = SumSettings(small=0, algorithm="one_shot")


@torch.no_grad()
def effects(
    model: nn.Module,
    codecs: Mapping[str, Codec],
    sequences: Iterable[Tensor],
    *,
    ranks: int,
    sums: Mapping[str, ModelSum],
    group: dist.ProcessGroup | None = None,
    plan: Plan | None = None,
) -> dict[str, float]:
    """Return, by layer, the squared relative error of the model's outputs when only this layer's sum is coded.

    Errors of sums do not tell it: they are added to a residual stream of another size for each token, and a few tokens
    make up most of the power of many sums. Outputs are logits, or the last hidden states of a model without; each
    token's error is relative to its own output, and all tokens count alike.

    Args:
        model: whole, or on real tensor-parallel ranks, all of which must call this. codecs: by layer.
        sequences: token ids, (length,) or (batch, length). One pass over them for each layer.
        ranks, sums, group, plan: of the model; as `calibrate` knows them.
    """
    batches = [batch if batch.dim() == 2 else batch[None] for batch in sequences]

    def outputs(coded: Mapping[str, Codec]) -> list[Tensor]:
        with _installed(model, coded, ranks, sums, group, plan):
            return [_output(model, batch) for batch in batches]

    exact = outputs({})
    return {name: _difference(exact, outputs({name: codec})) for name, codec in codecs.items()}


def _installed(
    model: nn.Module, coded: Mapping[str, Codec], ranks: int, sums: Mapping[str, ModelSum],
    group: dist.ProcessGroup | None, plan: Plan | None,
) -> Installed:  # fmt: skip
    if group is not None:
        return install(sums, coded, group, _CODED)
    return emulate_tensor_parallel_(model, ranks, coded, settings=_CODED, plan=plan)


def _output(model: Any, batch: Tensor) -> Tensor:
    """Return logits or hidden states, float32 (tokens, features)."""
    options = {"use_cache": False} if hasattr(model, "config") else {}
    output = model(batch.to(next(model.parameters()).device), **options)
    if not isinstance(output, Tensor):
        output = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return output.float().flatten(0, -2)


def _difference(exact: Sequence[Tensor], coded: Sequence[Tensor]) -> float:
    """Return the mean over all tokens of the squared error over the squared deviation from the token's mean."""
    shares = [
        (other - one).square().sum(1) / (one - one.mean(1, keepdim=True)).square().sum(1).clamp(min=1e-30)
        for one, other in zip(exact, coded, strict=True)
    ]
    return float(torch.cat(shares).double().mean())
