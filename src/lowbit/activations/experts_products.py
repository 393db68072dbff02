"""Products of rows with the weights of their experts: one matrix for each expert, rows sorted by expert.

Shape suffixes: S rows (token and expert), E experts, I inputs, O outputs of an expert's matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Routing:
    """Which expert gets which token: exact, and the same in forward and backward.

    Attributes:
        order: (S,) positions in the flat (tokens, choices) index, sorted by expert; those without an expert left out.
        ends: for each expert, where its rows end.
        choices: choices of each token, with an expert or without.
    """

    order: Tensor
    ends: tuple[int, ...]
    choices: int

    @classmethod
    def of(cls, index_NK: Tensor, experts: int) -> Routing | None:
        """The routing of an index; None if it has other numbers than 0 to `experts`, which means no expert."""
        ids, order = torch.sort(index_NK.reshape(-1), stable=True)
        limits = torch.arange(experts + 2, device=ids.device, dtype=ids.dtype)
        first, *ends, last = torch.searchsorted(ids, limits).tolist()
        if first != 0 or last != len(ids):
            return None
        return cls(order[: ends[-1]].to(torch.int32), tuple(ends), index_NK.shape[1])

    def gather(self, x_NC: Tensor) -> Tensor:
        """The token of each row."""
        return x_NC.index_select(0, self.order // self.choices)

    def sums(self, x_SC: Tensor, tokens: int) -> Tensor:
        """Sums of the rows of each token, in a fixed order."""
        all_rows = x_SC.new_zeros(tokens * self.choices, x_SC.shape[1])
        all_rows.index_copy_(0, self.order.long(), x_SC)
        return all_rows.view(tokens, self.choices, -1).sum(1)

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Experts that have rows, and their rows."""
        start = 0
        for expert, end in enumerate(self.ends):
            if end > start:
                yield expert, slice(start, end)
            start = end


def product(x_SI: Tensor, weight_EIO: Tensor, routing: Routing) -> Tensor:
    """Each row times its expert's matrix, in the dtype of the rows."""
    if _in_one_launch(x_SI, weight_EIO):
        return functional.grouped_mm(x_SI, weight_EIO.to(x_SI.dtype), offs=_offsets(routing, x_SI))
    out = x_SI.new_empty(len(x_SI), weight_EIO.shape[2])
    for expert, rows in routing.slices():
        torch.mm(x_SI[rows], weight_EIO[expert].to(x_SI.dtype), out=out[rows])
    return out


def weight_gradient(x_SI: Tensor, grad_SO: Tensor, like_EIO: Tensor, routing: Routing) -> Tensor:
    """The gradient of `product` at the weights, in their dtype and layout; 0 for experts without rows."""
    if _in_one_launch(x_SI, like_EIO):
        grad = functional.grouped_mm(x_SI.t(), grad_SO, offs=_offsets(routing, x_SI))
        out = torch.empty_like(like_EIO).copy_(grad)
        used = {expert for expert, _ in routing.slices()}
        for expert in set(range(len(out))) - used:  # kernels may leave these as they were
            out[expert] = 0
        return out
    out = torch.zeros_like(like_EIO)
    for expert, rows in routing.slices():
        out[expert] = x_SI[rows].t() @ grad_SO[rows]
    return out


def bias_rows(bias_EO: Tensor, routing: Routing) -> Tensor:
    """Each row's expert's bias."""
    return bias_EO.index_select(0, _experts(routing, bias_EO.device))


def bias_gradient(grad_SO: Tensor, like_EO: Tensor, routing: Routing) -> Tensor:
    """The gradient of `bias_rows` at the biases."""
    out = torch.zeros_like(like_EO)
    for expert, rows in routing.slices():
        out[expert] = grad_SO[rows].sum(0)
    return out


def _experts(routing: Routing, device: torch.device) -> Tensor:
    ends = torch.tensor(routing.ends)
    counts = ends.diff(prepend=ends.new_zeros(1))
    return torch.repeat_interleave(counts, output_size=routing.ends[-1]).to(device)


def _offsets(routing: Routing, x: Tensor) -> Tensor:
    return torch.tensor(routing.ends, dtype=torch.int32, device=x.device)


def _in_one_launch(x_SI: Tensor, weight_EIO: Tensor) -> bool:
    """Whether PyTorch has a kernel for all experts at once; on CPUs it loops over them as we do."""
    if not x_SI.is_cuda or x_SI.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x_SI.device) < (8, 0):
        return False
    return all(size % 8 == 0 for size in weight_EIO.shape[1:])  # rows aligned to 16 bytes
