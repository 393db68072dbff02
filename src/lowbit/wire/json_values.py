"""Gather small values from all ranks, as JSON: nothing that a peer sends is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire import pytorch
from lowbit.wire.pytorch import is_known, plain
from lowbit.wire.traffic import note_sent

MOST_BYTES = 64 << 20
"""Largest text of one rank; a limit, because a peer's announcement decides how much memory is allocated here."""
AGREEING = "values of all ranks"
"""Purpose under which `lowbit.wire.traffic` counts these values."""


def gather_json(value: Any, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks; every rank calls this.

    This takes two of PyTorch's collectives, in which every rank sends as many bytes as the longest text has. `timeout`:
    seconds for each, as for `pytorch.finish`. ValueError: a text is longer than 64 MiB (on all ranks), or not JSON.
    """
    group = plain(group)
    ranks, device = group.size(), _device(group)
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.empty(ranks, dtype=torch.int64, device=device)
    _gather(sizes, torch.tensor([text.numel()], device=device), group, timeout)
    lengths: list[int] = sizes.tolist()
    if not all(0 < length <= MOST_BYTES for length in lengths):
        raise ValueError(f"ranks state {lengths} bytes; allowed: 1 to {MOST_BYTES} each")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    texts = padded.new_empty(ranks * padded.numel())
    _gather(texts, padded, group, timeout)
    rows = texts.view(ranks, -1).cpu()
    return [
        parse_json(rows[rank, :length], f"what rank {rank} of the group stated is not JSON")
        for rank, length in enumerate(lengths)
    ]


def gather_tensor(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return all ranks' tensors, of one shape and dtype, as (ranks, *x.shape) on the CPU; every rank calls this."""
    group = plain(group)
    ranks, x = group.size(), x.to(_device(group))
    out = x.new_empty(ranks * x.numel())
    pytorch.gather(out, x.flatten(), group)
    return out.view(ranks, *x.shape).cpu()


def _gather(out: Tensor, x: Tensor, group: dist.ProcessGroup, timeout: float | None) -> None:
    note_sent(AGREEING, out.nbytes - x.nbytes)  # in a ring each rank forwards the texts of the others
    work = pytorch.gather(out, x, group, async_op=timeout is not None)
    if timeout is not None:
        pytorch.finish(work, group, timeout)


def _device(group: dist.ProcessGroup) -> torch.device:
    devices = dist.get_backend_config(group) if is_known(group) else str(group._device_types)
    if "gloo" in devices or "cpu" in devices:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def parse_json(text: Tensor, problem: str) -> Any:
    """Parse the bytes of a text on the CPU; `problem` begins the ValueError for a text that is not JSON."""
    try:
        return json.loads(text.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{problem}: {error}") from None
