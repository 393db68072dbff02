"""Hierarchical sums: at full precision inside a node, in few bits between nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.wire import pytorch


@dataclass(frozen=True)
class Nodes:
    """Two groups of this rank: the ranks of its node, and the ranks with the same position on every node."""

    inside: dist.ProcessGroup
    between: dist.ProcessGroup


_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, float], Nodes]] = weakref.WeakKeyDictionary()


def nodes_of(group: dist.ProcessGroup, node_size: int, timeout: float) -> Nodes:
    """Return the groups for nodes of `node_size` successive ranks. All ranks make the first call, which creates them.

    `timeout`: limit of PyTorch's own work in the groups, in seconds; Gloo's reduce-scatter has no other limit.
    """
    cached, key = _nodes.setdefault(group, {}), (node_size, timeout)
    if key not in cached:
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        first, place = rank - rank % node_size, rank % node_size
        inside, between = ranks[first : first + node_size], ranks[place::node_size]
        cached[key] = Nodes(_new_group(inside, timeout), _new_group(between, timeout))
    return cached[key]


def sum_by_nodes(x: Tensor, nodes: Nodes, between: Callable[[Tensor], None], timeout: float) -> None:
    """Replace `x` (flat, contiguous, any float dtype) by its sum over all ranks.

    Bytes that leave each node, for n elements: those of `between` for n, divided among the ranks of the node. Inside
    a node of s ranks PyTorch's reduce-scatter and all-gather move 8 (s - 1) / s n bytes a rank.

    Args:
        between: replaces a float32 tensor by its sum over `nodes.between`, the same on all of its ranks. If it divides
            the sum, the result is divided as well.
        timeout: seconds for each of the sums inside a node.
    """
    size = dist.get_world_size(nodes.inside)
    length = -(-x.numel() // size)
    whole = torch.zeros(size * length, device=x.device)
    whole[: x.numel()].copy_(x)
    part = torch.empty(length, device=x.device)
    pytorch.finish(pytorch.sum_scatter(part, whole, nodes.inside), nodes.inside, timeout)
    between(part)
    pytorch.finish(pytorch.gather(whole, part, nodes.inside, async_op=True), nodes.inside, timeout)
    x.copy_(whole[: x.numel()])


def _new_group(ranks: list[int], timeout: float) -> dist.ProcessGroup:
    group = dist.new_group(ranks=ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
