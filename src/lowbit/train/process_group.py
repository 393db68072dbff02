"""Joining the other ranks: the process group, and the network interface that leads to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lowbit.train.section import ConfigError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def world() -> tuple[int, int]:
    """This rank and the number of ranks, of the process group or as the launcher tells: (0, 1) without either.

    Raises:
        ConfigError: half an environment: some of the variables that a launcher sets, but not all.
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
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def joined(timeout: float, *, backend: str = "gloo") -> Iterator[None]:
    """Be part of the default process group: the one there is, or one made from the environment for this block.

    Args:
        timeout: seconds in which the failure of a peer is to end every rank: most of it for an operation that waits for
            the peer, the rest to find out which one it was.
        backend: for what lies on GPUs, "gloo" or "nccl"; beside it, Gloo carries what lies on the CPU.

    Raises:
        ConnectionError: the other ranks did not come in time.
    """
    if dist.is_initialized():
        yield
        return
    rank, ranks = world()
    backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    limit = timedelta(seconds=0.8 * timeout)
    try:
        if ranks == 1 and "RANK" not in os.environ:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            _choose_interface()
            dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=limit)
    except (dist.DistError, RuntimeError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConnectionError(
            f"rank {rank} did not meet all {ranks} ranks at {where} within {timeout:g} s: "
            f"{str(error).splitlines()[0]}"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def new_group(ranks: list[int] | None = None) -> dist.ProcessGroup | None:
    """A process group of these ranks (None: all), to be called on every rank; None where this rank is not in it."""
    group = dist.new_group(ranks=ranks)
    return group if isinstance(group, dist.ProcessGroup) else None


def _choose_interface() -> None:
    """Tell Gloo which interface leads to the other ranks, unless the user does.

    Left to itself it takes the one that the host's own name resolves to, which often leads nowhere.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ and (
        name := interface_towards(os.environ["MASTER_ADDR"])
    ):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(host: str) -> str | None:
    """Name of the interface that packets to an IPv4 host leave by; None if that can not be told."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # no packet is sent
        mine = probe.getsockname()[0]
        target = socket.gethostbyname(host)
        if target.startswith("127.") or target == mine:
            # The first rank's machine reaches itself by loopback, where no other machine reaches it.
            mine = target
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == mine:
                    return name
    return None
