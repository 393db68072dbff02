"""The distance between hosts: a process that delays their packets (`delay.py`), and the routes that lead there."""

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lowbit.network.delay import DEVICE
from lowbit.network.link import Link
from lowbit.network.namespaces import NETWORK, LinkUnavailable, Namespace

log = logging.getLogger(__name__)

_PROGRAM = str(Path(__file__).with_name("delay.py"))
_SECONDS_TO_ANSWER = 10.0
_PRIORITY = -20
_QUEUED_PACKETS = 10_000  # in front of the delay line, while other processes have the processor


class Distance:
    """A second interface of each host, whose packets go through one process that delays them.

    Args:
        hosts: their namespaces. Addresses stay those of the first interface.

    Raises:
        LinkUnavailable: this machine does not permit it.
    """

    def __init__(self, hosts: Sequence[Namespace]) -> None:
        self._hosts = hosts
        self._process = subprocess.Popen(
            [*hosts[0].enter, sys.executable, "-I", "-S", _PROGRAM, *(str(h.pid) for h in hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the owner's business
        )
        try:
            self._await_ok()
            self._hurry()
            for host in hosts:
                host.ip(f"link set {DEVICE} txqueuelen {_QUEUED_PACKETS} up")
        except BaseException:
            self.close()
            raise

    def lead(self, link: Link) -> None:
        """Let all packets take this way, as long and as wide as the link is."""
        there = _seconds_per_byte(link.rate_mbit)
        back = _seconds_per_byte(link.back_mbit or link.rate_mbit)
        self._tell(
            rates=[(there, back), *[(back, there)] * (len(self._hosts) - 1)],
            delay=link.rtt_ms / 2e3,
            jitter=link.jitter_ms / 1e3,
            queue=link.most_waiting_ms / 1e3,
            loss=link.loss,
        )
        for number, host in enumerate(self._hosts, 1):
            host.ip(
                f"link set {DEVICE} gso_max_size {_train_bytes(link)} gso_max_segs {1 if link.loss else 65535}",
                # More precise than the route of the first interface.
                f"route replace {NETWORK}.0/25 dev {DEVICE} src {NETWORK}.{number}",
            )

    def leave(self) -> None:
        """Let packets take the first interfaces again."""
        for host in self._hosts:
            host.ip(f"route flush dev {DEVICE}")

    def cut(self, hosts: Collection[int]) -> None:
        """Let every packet to and from these hosts vanish, and no others."""
        self._tell(cut=list(hosts))

    def close(self) -> None:
        """End the process, and with it the interfaces. Twice is harmless."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_SECONDS_TO_ANSWER)  # its input ends, and so does it
        self._process.kill()
        self._process.wait()

    def _hurry(self) -> None:
        """Go first: a packet must not arrive late, or find a queue that is none, because the hosts compute."""
        try:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _PRIORITY)
        except PermissionError:
            log.warning("a link with a distance shares the processor with all others: no priority without root")

    def _tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that it does not answer tells why
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        self._await_ok()

    def _await_ok(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if not select.select([self._process.stdout], [], [], _SECONDS_TO_ANSWER)[0]:
            raise LinkUnavailable(f"the process that delays packets has not answered for {_SECONDS_TO_ANSWER:g} s")
        if self._process.stdout.readline() != "ok\n":
            reason = self._process.stderr.read().strip().splitlines()[-1:]
            raise LinkUnavailable(
                f"no link with a distance: {''.join(reason)}. It takes TUN devices: load the kernel module `tun`, "
                "and let /dev/net/tun be read and written."
            )


def _seconds_per_byte(rate_mbit: float | None) -> float:
    return 8e-6 / rate_mbit if rate_mbit else 0.0


def _train_bytes(link: Link) -> int:
    """Largest train of packets: 16 KB saves many reads; from 131 Mbit/s on it is what a millisecond carries."""
    if link.rate_mbit is None:
        return 65536
    return min(65536, max(16384, round(link.rate_mbit * 125)))
