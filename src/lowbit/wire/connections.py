"""The TCP connections between ranks: over Gloo, several for a group, what they lose, how they control congestion.

With several, a lost packet slows only a part of what is sent, because TCP halves its rate after a loss: each carries a
piece of every large message. They are Gloo groups. Both ends cut a message by its size class (`lowbit.wire.tags`), so a
wrong length never changes a piece's place. Gloo does not show its connections, so they are found among the open files
of the process (Linux only).
"""

import contextlib
import os
import socket
import struct
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lowbit import escape
from lowbit.escape import shown
from lowbit.wire import tags
from lowbit.wire.agreement import agree
from lowbit.wire.errors import PeerError, first_line
from lowbit.wire.pytorch import is_known, unwrapped_group
from lowbit.wire.store import bounded

Carrier = Any  # a group, or a Gloo backend, whose types lack `send` and `recv`
MOST_CONNECTIONS = 32
LEAST_PIECE = 1 << 14  # a smaller piece arrives no sooner: TCP sends as much at once

log = escape.logger(__name__)

_for_messages: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_more: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()
_used: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def gloo_of(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    """Return a group of the same ranks that has Gloo between CPUs: itself, or one that is made next to it, once.

    Every rank of the group calls this. The new one is only for messages: `torch.distributed` does not know it, so that
    it is gone with the group, and needs no `destroy_process_group`.

    Raises:
        AgreementError: a rank did not come within `timeout` seconds.
        PeerError: the ranks could not connect.
    """
    backends = dist.get_backend_config(group)
    if "cpu:gloo" in backends.split(","):
        return group
    if group not in _for_messages:
        agree(group, "Gloo", timeout, topic="group for messages")  # names ranks that do not come
        try:
            _for_messages[group] = bounded(partial(_new_gloo, group, timeout), timeout)
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(
                f"the Gloo group next to that of {backends} did not connect within {timeout:g} s ({first_line(error)})"
                "; allowed: firewalls that let the ranks connect to each other on all ports, and GLOO_SOCKET_IFNAME "
                "with the network interface to use", -1,
            ) from None  # fmt: skip
        if group.rank() == 0:
            log.warning(
                "messages of pipelines go over a Gloo group, made next to that of %s (%d ranks); tensors on a GPU pass "
                "through the memory of the host", backends, group.size(),
            )  # fmt: skip
    return _for_messages[group]


def _new_gloo(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    # Not by `new_group`: all ranks of the job would have to call it, or its name would depend on their other groups.
    store: Any = PrefixStore("lowbit/gloo", group.get_group_store())
    made: Any = dist.ProcessGroup(store, group.rank(), group.size())
    gloo: Any = dist.ProcessGroupGloo
    kind = dist.ProcessGroup.BackendType.GLOO
    made._set_default_backend(kind)
    made._register_backend(torch.device("cpu"), kind, gloo(store, made.rank(), made.size(), timedelta(seconds=timeout)))
    return made


def connections_of(group: dist.ProcessGroup) -> list[Carrier]:
    """Return everything that has connections for a group: itself, and what `connect_more` has added."""
    return [group, *_more.get(group, ())]


def connect_more(group: dist.ProcessGroup | None, count: int, *, timeout: float = 120.0) -> None:
    """Send a group's messages over several connections for each pair of ranks from now on; every rank calls this.

    Call it when no message of more than 4 KiB is under way or expected. A new connection takes about seven round
    trips. Connections that are not needed any more stay open.

    Args:
        group: ranks over Gloo, or with the Gloo group that pipelines make next to theirs; None: the default group.
        count: connections for each pair of ranks, 1 to 32; the same on all ranks.
        timeout: seconds to wait for the other ranks.

    Raises:
        ValueError: `count` is not allowed, or the group has no Gloo.
        AgreementError: the ranks pass different counts.
        RuntimeError, TimeoutError: a rank did not connect in time.
    """
    if type(count) is not int or not 1 <= count <= MOST_CONNECTIONS:
        raise ValueError(f"count is {shown(count)}; allowed: an integer from 1 to {MOST_CONNECTIONS}")
    group = unwrapped_group(group)
    group = gloo_of(group, timeout) if is_known(group) else group
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
    # The group's own interface: Gloo's default is the one that the host's name resolves to.
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
        # Each channel begins at another connection: messages of few pieces would all take the first ones.
        yield carriers[(channel + i) % used], slice(start, start + size)


_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_NAME_BYTES = 16
# `struct tcp_info` of <linux/tcp.h>: total_retrans, data_segs_out of Linux 4.6 or later, dsack_dups of 4.19 or later
_INFO_BYTES, _RETRANSMITTED, _SEGMENTS, _NEEDLESS = 220, 100, 156, 216
FASTER = "bbr"
"""Congestion control that does not take a lost packet for a sign of congestion."""
ADVICE = f"sudo modprobe tcp_{FASTER} && sudo sysctl -w net.ipv4.tcp_congestion_control={FASTER} on every machine"
_LOSSY = 5e-5  # share of segments sent again from which on TCP is much slower than a distant link
_FEWEST = 10  # segments sent again before the share means something


class Segments(NamedTuple):
    """TCP segments with data that connections have sent, and how many of them were sent again and had to be."""

    sent: int
    again: int

    def since(self, before: "Segments") -> float:
        """Share of segments that were sent again; 0 if none was sent."""
        return max(0.0, (self.again - before.again) / max(1, self.sent - before.sent))


def is_lossy(share: float, again: int) -> bool:
    """Whether a link loses so much that it matters: a share of segments sent again, and their number."""
    return share >= _LOSSY and again >= _FEWEST


def can_count() -> bool:
    """Whether this machine counts the segments that its connections send again."""
    return hasattr(socket, "TCP_INFO") and os.path.isdir("/proc/self/fd")


def segments() -> Segments:
    """Count the segments of all connections to other machines."""
    sent = again = 0
    for connection in _connections():
        with contextlib.suppress(OSError, struct.error):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            again += struct.unpack_from("I", info, _RETRANSMITTED)[0]
            if len(info) >= _INFO_BYTES:  # the first copy had arrived: it was late, not lost
                again -= struct.unpack_from("I", info, _NEEDLESS)[0]
            sent += struct.unpack_from("I", info, _SEGMENTS)[0]
    return Segments(sent, again)


def congestion_control() -> str:
    """Return the congestion control of most connections to other machines, such as "cubic"; "" if there are none."""
    names: Counter[str] = Counter()
    for connection in _connections():
        with contextlib.suppress(OSError):
            name = connection.getsockopt(socket.IPPROTO_TCP, _CONGESTION, _NAME_BYTES)
            names[name.split(b"\0")[0].decode(errors="replace")] += 1
    return names.most_common(1)[0][0] if names else ""


def ends() -> list[list[str]]:
    """Return both ends of all connections to other machines: address and port here, and those of the peer."""
    found: list[list[str]] = []
    for connection in _connections():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(list(_ends(connection)))
    return found


def set_congestion_control(name: str, others: Collection[Sequence[str]] | None = None) -> bool:
    """Change the congestion control of what this process sends; returns whether all connections, if any, have it now.

    `others`: what `ends` returns in other processes; only connections to these are changed. None: all.
    """
    known = None if others is None else {tuple(pair) for pair in others}
    outcomes: list[bool] = []
    for connection in _connections():
        try:
            if known is None or _ends(connection)[::-1] in known:
                connection.setsockopt(socket.IPPROTO_TCP, _CONGESTION, name.encode())
                outcomes.append(True)
        except OSError:
            outcomes.append(False)
    return bool(outcomes) and all(outcomes)


def _connections() -> Iterator[socket.socket]:
    """Yield the TCP connections between this machine and others, each open during its turn."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as connection:
                        is_tcp = connection.type == socket.SOCK_STREAM and connection.family in _INTERNET
                        if is_tcp and connection.getpeername()[0] != connection.getsockname()[0]:
                            yield connection


def _ends(connection: socket.socket) -> tuple[str, str]:
    """Return address and port here and of the peer; an IPv4 address may be written as an IPv6 one on one side only."""
    here, there = (
        f"{address.removeprefix('::ffff:')} {port}"
        for address, port, *_ in (connection.getsockname(), connection.getpeername())
    )
    return here, there
