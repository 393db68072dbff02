"""Whole runs of `lowbit train` on hosts of their own, and what the hosts' network interfaces have counted."""

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from lowbit.wire import messages
from lowbit_lab.network import SlowLink, delay
from lowbit_run.train import TrainConfig, train
from tests.forked import CONTEXT

_HEADERS = 66
"""Bytes of a packet that are no payload: Ethernet 14, IPv4 20, TCP 32, with its time stamps."""
_OWN_NAME = 0x04000000  # CLONE_NEWUTS


def train_on_hosts(
    config: TrainConfig | Sequence[TrainConfig], link: SlowLink, folder: Path, *, timeout: float = 200
) -> list[int]:
    """Train with a rank on each host; returns the bytes of TCP's streams that each host has sent meanwhile.

    With several configurations, each host has a run of its own. Links are probed with 256 KiB: the usual 22 MB of a
    fast link would hide all else that a small run sends.
    """
    before = [sent_bytes(link, host) for host in range(link.hosts)]
    processes = []
    for rank in range(link.hosts):
        environment = link.environment(rank)
        own = config if isinstance(config, TrainConfig) else config[rank]
        if own is not config:
            environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": link.address(rank)}
        namespace = link._namespace(rank)
        environment["HOST"] = link.address(rank)
        work = (own, namespace.pid, namespace.kinds, environment, str(folder / f"rank-{rank}.log"))
        processes.append(CONTEXT.Process(target=_train, args=work, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(timeout)
        process.kill()
    logs = "\n".join((folder / f"rank-{rank}.log").read_text() for rank in range(link.hosts))
    assert [process.exitcode for process in processes] == [0] * link.hosts, logs
    return [sent_bytes(link, host) - first for host, first in enumerate(before)]


def sent_bytes(link: SlowLink, host: int) -> int:
    """Bytes that a host has sent on TCP's connections, as its interface counts."""
    nbytes, packets = link.sent(host)
    return nbytes - _HEADERS * packets


def _train(config: TrainConfig, pid: int, kinds: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    for kind in kinds:
        delay.enter(pid, kind)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(environment)
    _rename_host(environment["HOST"])
    messages._SIZES = (1 << 18,)
    try:
        train(config)
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        raise


def _rename_host(name: str) -> None:
    """Let this process alone have a host of another name: torchft tells other replicas the name of its host."""
    if ctypes.CDLL(None, use_errno=True).unshare(_OWN_NAME):
        raise OSError(ctypes.get_errno(), "cannot have a host name of its own")
    socket.sethostname(name)
