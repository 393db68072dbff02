"""Join the other ranks: the process group, and the network interface that leads to them."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from lowbit.config import ConfigError
from lowbit.job.meeting import MeetingError, meet, prove
from lowbit.job.peers import Peers
from lowbit.wire.checksum import ATTEMPT, begin_attempt, run_secret
from lowbit.wire.groups import default_group, next_round
from lowbit.wire.store import bounded

_meetings = itertools.count()  # numbers this process's meetings: each uses its own part of the store
_LEAVE_SECONDS = 5.0  # most seconds to destroy the group after an error
_SIOCGIFADDR = 0x8915  # Linux ioctl: get the IPv4 address of an interface


def world() -> tuple[int, int]:
    """Return this rank and the number of ranks, from the process group or the environment; (0, 1) without either.

    Raises:
        ConfigError: only some of the variables that a launcher sets are there, or their values are invalid.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if os.environ.get(name)]
    if not given or given == ["MASTER_ADDR"] or given == ["MASTER_ADDR", "MASTER_PORT"]:
        return 0, 1
    if missing := [name for name in names if name not in given]:
        raise ConfigError(
            f"the environment has {', '.join(given)} but not {', '.join(missing)}; "
            "allowed: all (torchrun sets them) or none"
        )
    try:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        text = f"RANK is {os.environ['RANK']!r} and WORLD_SIZE {os.environ['WORLD_SIZE']!r}; allowed: integers"
        raise ConfigError(text) from None
    if not 0 <= rank < ranks:
        raise ConfigError(f"RANK is {rank}; allowed with WORLD_SIZE {ranks}: 0 to {ranks - 1}")
    return rank, ranks


@contextlib.contextmanager
def joined(timeout: float, *, backend: str = "gloo", patience: float | None = None) -> Iterator[None]:
    """Use the existing default process group, or make one from the environment for this block.

    Every wait has a limit: calls of the group and of its store have their own; for everything else a watchdog ends this
    process once another rank has been silent for `timeout` seconds or has failed (`lowbit.job.peers`).

    Args:
        timeout: seconds within which the failure of a peer ends every rank.
        backend: "gloo" or "nccl" for tensors on GPUs; Gloo carries those on the CPU in either case.
        patience: seconds to wait for all ranks to come; None: `timeout`.

    Raises:
        ConnectionError: the other ranks did not come in time, or one of them does not know the run's secret.
        PeerError: another rank was the cause of an error in the block.
    """
    rank, ranks = world()
    if dist.is_initialized():
        group = default_group()
        unused = PrefixStore(f"lowbit/peers/{next_round(group, 'peers')}", group.get_group_store())
        with _watched(unused, rank, ranks, timeout):
            yield
        return
    backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    patience = patience or timeout
    alone = "RANK" not in os.environ
    store = HashStore() if alone else meet(rank, ranks, timeout=timeout, patience=patience, number=next(_meetings))
    # By default Gloo uses the interface that the host's own name resolves to, from which peers are often unreachable.
    if not alone and "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(os.environ["MASTER_ADDR"])):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        with _watched(store, rank, ranks, timeout) as peers:
            if not alone:
                known = None if peers is None or ATTEMPT in os.environ else peers.enter
                begin_attempt(prove(store, rank, ranks, secret=run_secret(), patience=patience, known=known))
                if peers is not None:
                    peers.settle()
            connect(backend, PrefixStore("group", store), rank, ranks, timedelta(seconds=0.8 * timeout))
            yield
    except BaseException:
        with contextlib.suppress(Exception):  # destructors of a broken group can wait for peers that are gone
            bounded(_leave, _LEAVE_SECONDS)
        raise
    _leave()


def connect(backend: str, store: Store, rank: int, ranks: int, limit: timedelta) -> None:
    """Make the default group of all ranks that have met; MeetingError if they do not reach each other in time."""
    join = partial(dist.init_process_group, backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        bounded(join, limit.total_seconds())  # Gloo itself keeps trying for five times as long
    except (dist.DistError, RuntimeError, TimeoutError) as error:
        raise MeetingError(
            f"rank {rank} did not connect to all {ranks} ranks within {limit.total_seconds():g} s: "
            f"{str(error).splitlines()[0]}; allowed: firewalls that let the ranks connect to each other, on all ports"
        ) from error


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _watched(store: Store, rank: int, ranks: int, timeout: float) -> Iterator[Peers | None]:
    if ranks == 1:
        yield None
        return
    peers = Peers(store, rank=rank, ranks=ranks, timeout=timeout, secret=run_secret())
    with peers.explaining():
        yield peers


def interfaces() -> dict[str, str]:
    """Return the first IPv4 address of each network interface that has one."""
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def address_towards(host: str) -> str:
    """Return this machine's source address for packets to an IPv4 host; empty if there is no route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # no packet is sent
        return probe.getsockname()[0]
    return ""


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface for packets to an IPv4 host; None if it cannot be found."""
    with contextlib.suppress(OSError):
        address, target = address_towards(host), socket.gethostbyname(host)
        if target.startswith("127.") or target == address:
            # The first rank's machine would use loopback to reach itself, where no other machine can reach it.
            address = target
        return next((name for name, own in interfaces().items() if own == address), None)
    return None
