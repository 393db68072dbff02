"""Several connections between the ranks of a group, so that a lost packet slows only a part of what is sent.

Each carries a piece of every large message: TCP halves its rate after a loss. The connections are Gloo groups. Both
ends cut a message by its size class (`lowbit.wire.tags`), so a wrong length never changes a piece's place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lowbit.wire import tags
from lowbit.wire.agreement import agree
from lowbit.wire.groups import plain
from lowbit.wire.store import bounded

Carrier = Any  # a group, or a Gloo backend, whose types lack `send` and `recv`
MOST_CONNECTIONS = 32
LEAST_PIECE = 1 << 14  # a smaller piece arrives no sooner: TCP sends as much at once

_more: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()
_used: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def connections_of(group: dist.ProcessGroup) -> list[Carrier]:
    """Return everything that has connections for a group: itself, and what `connect_more` has added."""
    return [group, *_more.get(group, ())]


def connect_more(group: dist.ProcessGroup | None, count: int, *, timeout: float = 120.0) -> None:
    """Send a group's messages over several connections for each pair of ranks from now on; every rank calls this.

    Call it when no message of more than 4 KiB is under way or expected. A new connection takes about seven round
    trips. Connections that are not needed any more stay open.

    Args:
        group: ranks over Gloo; None: the default group.
        count: connections for each pair of ranks, 1 to 32; the same on all ranks.
        timeout: seconds to wait for the other ranks.

    Raises:
        ValueError: `count` is not allowed, or the group has no Gloo.
        AgreementError: the ranks pass different counts.
        RuntimeError, TimeoutError: a rank did not connect in time.
    """
    if type(count) is not int or not 1 <= count <= MOST_CONNECTIONS:
        raise ValueError(f"count is {count!r}; allowed: an integer from 1 to {MOST_CONNECTIONS}")
    group = plain(group)
    try:
        gloo: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        gloo = None
    if not isinstance(gloo, dist.ProcessGroupGloo):
        raise ValueError("group does not use Gloo on the CPU; allowed: a group that does")
    agree(group, {"connections": str(count)}, timeout, topic="connections")
    more = _more.setdefault(group, [])
    while len(more) < count - 1:
        more.append(bounded(partial(_connect, group, gloo, len(more), timeout), timeout))
    _used[group] = count


def _connect(group: dist.ProcessGroup, gloo: Any, number: int, timeout: float) -> Carrier:
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = gloo.options._devices[:1]
    options._threads = 1  # for collectives, which it does not run
    options._timeout = timedelta(seconds=timeout)
    store = PrefixStore(f"lowbit/connections/{number}", group.get_group_store())
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), options)


def pieces(group: dist.ProcessGroup, channel: int, nbytes: int) -> Iterator[tuple[Carrier, slice]]:
    """Yield where each piece of a message travels, and its place in the message's buffer; the same on both ends.

    The pieces cover the whole size class of `nbytes`, so those at the end may be shorter or empty.
    """
    used, capacity = _used.get(group, 1), tags.capacity(nbytes)
    if used == 1 or capacity <= LEAST_PIECE:  # small messages may be expected across a change of the number
        yield group, slice(0, None)
        return
    size = max(LEAST_PIECE, -(-capacity // used))
    carriers = connections_of(group)
    for i, start in enumerate(range(0, capacity, size)):
        yield carriers[(channel + i) % used], slice(start, start + size)
