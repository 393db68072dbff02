"""Emulate the distance between hosts: a process delays their packets (`delay.py`), and routes lead through it."""

import contextlib
import json
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lowbit_lab.network.delay import DEVICE
from lowbit_lab.network.link import Link
from lowbit_lab.network.namespaces import NETWORK, Helper, LinkUnavailable, Namespace

log = logging.getLogger(__name__)

_PROGRAM = str(Path(__file__).with_name("delay.py"))
_PRIORITY = -20
_QUEUED_PACKETS = 10_000  # that may wait for the delay line while other processes have the processor


class Distance(Helper):
    """Gives each host a second interface with the address of the first, whose packets go through one process.

    Raises:
        LinkUnavailable: this machine does not permit it.
    """

    def __init__(self, hosts: Sequence[Namespace]) -> None:
        self._hosts = hosts
        argv = [_PROGRAM, *(str(host.pid) for host in hosts)]
        super().__init__("the process that delays packets", argv, within=hosts[0].enter)
        try:
            self._await_ok()
            try:  # packets are then not late or dropped because the hosts compute
                os.setpriority(os.PRIO_PROCESS, self.pid, _PRIORITY)
                # Where sessions share the processors (autogroup), a process's own priority counts in its session only.
                if (group := Path(f"/proc/{self.pid}/autogroup")).exists():
                    group.write_text(str(_PRIORITY))
            except PermissionError:
                log.warning("without root, the process that delays packets has no priority: delays may be longer")
            for host in hosts:
                host.ip(f"link set {DEVICE} txqueuelen {_QUEUED_PACKETS} up")
        except BaseException:
            self.close()
            raise

    def lead(self, link: Link) -> None:
        """Route all packets through the process, with the rates and the distance of `link`."""
        rates = link.rate_mbit, link.back_mbit or link.rate_mbit
        forth, back = (8e-6 / rate if rate else 0.0 for rate in rates)  # seconds per byte
        self._order(
            rates=[(forth, back), *[(back, forth)] * (len(self._hosts) - 1)],
            delay=link.rtt_ms / 2e3,
            jitter=link.jitter_ms / 1e3,
            queue=link.most_waiting_ms / 1e3,
            loss=link.loss,
            burst=link.burst,
            reorder=link.reorder,
        )
        segments = 1 if link.loss or link.reorder else 65535
        # The largest train of packets: 16 KB saves many reads; from 131 Mbit/s on, a millisecond's bytes.
        train = 65536 if link.rate_mbit is None else min(65536, max(16384, round(link.rate_mbit * 125)))
        for number, host in enumerate(self._hosts):
            host.ip(
                f"link set {DEVICE} gso_max_size {train} gso_max_segs {segments}",
                # A longer prefix than the first interface's route, so it takes precedence.
                f"route replace {NETWORK}.0/25 dev {DEVICE} src {NETWORK}.{number + 1} congctl {link.congestion}",
            )

    def leave(self) -> None:
        """Route packets through the first interfaces again."""
        for host in self._hosts:
            host.ip(f"route flush dev {DEVICE}")

    def cut(self, hosts: Collection[int]) -> None:
        """Drop every packet to and from these hosts, and no others."""
        self._order(cut=list(hosts))

    def _order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_await_ok` reports why it ended
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        self._await_ok()

    def _await_ok(self) -> None:
        if problem := self._problem("ok"):
            raise LinkUnavailable(
                f"no link with a distance: {problem.splitlines()[-1]}. It needs TUN devices: load the kernel module "
                "`tun`, and let /dev/net/tun be read and written."
            )
