"""A really slow link on one machine: network namespaces joined by shaped virtual Ethernet.

Two hosts are the two ends of one veth pair; more hosts are veth pairs into a bridge, which is a
namespace of its own. A token bucket filter (``tc ... tbf``) on both ends of every pair limits each
direction by itself, as a full-duplex cable does. The packets travel through the kernel's real TCP,
at the real rate, in real time. Congestion control is CUBIC, Linux's default, or else Reno.

The namespaces have no names and leave no files: each lives as long as its keeper process and what
runs in it. A keeper notices when its owner has gone, for whatever reason, kills the rest and ends.
So nothing has to be cleaned up after a crash, and two runs on one machine cannot meet.

Root may do all this. Others may inside a user namespace, where the kernel permits those.
"""

import contextlib
import ctypes
import functools
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

_KEEPER = str(Path(__file__).with_name("keeper.py"))
_INTERFACE = "eth0"
_NETWORK = "198.18.0"  # 198.18.0.0/15 is set aside for network benchmarks (RFC 2544)
_MAX_HOSTS = 64
_QUEUE = "50ms"  # what may wait in a link's queue before packets are dropped
_LARGEST_SEGMENT = 65536  # the kernel's default
_CONGESTION_CONTROL = ("cubic", "reno")  # the first that the kernel permits
_SECONDS_TO_END = 5.0


class LinkUnavailable(RuntimeError):
    """This machine does not let us make a shaped link; the message says why."""


def burst_bytes(rate_mbit: float) -> int:
    """Size of the token bucket. It decides whether the link is honest.

    A 1 MB bucket lets whole messages through unshaped at 100 Mbit/s and makes FP32 look 2.4 times
    as fast as it is; a 32 KB bucket cannot be refilled often enough to reach 10 Gbit/s.
    """
    return 32 * 1024 if rate_mbit <= 1000 else 256 * 1024


class SlowLink:
    """Hosts on this machine, joined by a link of a chosen rate.

    Args:
        hosts: How many hosts, 2 to 64.
        rate_mbit: Mbit/s of Ethernet in each direction at each host, of which TCP carries 95.6 %.
            None: no limit.

    Raises:
        LinkUnavailable: On entering the context: the machine does not permit it.
        ValueError: A number of hosts or a rate that makes no sense.

    Example::

        with SlowLink(rate_mbit=100) as link:
            server = link.popen(0, ["iperf3", "-s", "-1"])
            client = link.popen(1, ["iperf3", "-c", link.address(0)])
            client.wait()
    """

    def __init__(self, hosts: int = 2, rate_mbit: float | None = 100) -> None:
        if isinstance(hosts, bool) or not isinstance(hosts, int) or not 2 <= hosts <= _MAX_HOSTS:
            raise ValueError(f"hosts must be an integer from 2 to {_MAX_HOSTS}, got {hosts!r}")
        _check_rate(rate_mbit)
        self.hosts = hosts
        self.rate_mbit = rate_mbit
        self._cut: set[int] = set()
        self._namespaces: list[_Namespace] = []
        self._processes: list[subprocess.Popen] = []

    @staticmethod
    def available() -> str | None:
        """Why this machine permits no shaped link; None where it does. Tries it once."""
        return _why_unavailable()

    def __enter__(self) -> "SlowLink":
        try:
            self._namespaces.extend(_open_namespaces(self.hosts + (self.hosts > 2)))
            self._join()
            self.set_rate(self.rate_mbit)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes (SIGTERM, then SIGKILL) and the namespaces. Twice is harmless."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
        while self._namespaces:
            self._namespaces.pop().close()
        while self._processes:  # the keepers have killed whatever was left: collect it
            self._processes.pop().wait()

    def address(self, host: int) -> str:
        """The IPv4 address of a host. It exists inside the link only."""
        self._namespace(host)
        return f"{_NETWORK}.{host + 1}"

    def interface(self, host: int) -> str:
        """The name of a host's network interface, as ``GLOO_SOCKET_IFNAME`` wants it."""
        self._namespace(host)
        return _INTERFACE

    def popen(
        self, host: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> subprocess.Popen:
        """Start a program on a host: ``subprocess.Popen`` with the same arguments and signals.

        It sees this machine's files, and its own network only. It ends with the link at the latest.
        """
        command = [*self._namespace(host).enter, *argv]
        process = subprocess.Popen(command, env=None if env is None else dict(env), **kwargs)
        self._processes = [p for p in self._processes if p.returncode is None]
        self._processes.append(process)
        return process

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change the rate of every end, from now on. None takes the limit away."""
        _check_rate(rate_mbit)
        for namespace, interface in self._ends():
            namespace.tc(interface, rate_mbit)
        self.rate_mbit = rate_mbit

    def cut(self, host: int) -> None:
        """Let every packet to and from a host vanish, until `restore`. Twice is harmless.

        No end notices: no reset, no "unreachable", no lost carrier, nothing that TCP learns of at once. Of two hosts,
        both are cut off.
        """
        self._namespace(host)
        self._cut.add(host)
        self._connect(host, False)

    def restore(self, host: int) -> None:
        """Join a host that was cut off again. TCP goes on when it next sends something again."""
        self._namespace(host)
        self._cut.discard(host)
        if self.hosts > 2 or not self._cut:  # two hosts have one cable
            self._connect(host, True)

    def enter(self, host: int) -> None:
        """Move this process to a host, for good: for a fork that has no second thread.

        Raises:
            OSError: the kernel does not permit it.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in self._namespace(host).kinds:
            with open(f"/proc/{self._namespace(host).pid}/ns/{kind}") as file:
                if libc.setns(file.fileno(), 0):
                    raise OSError(
                        ctypes.get_errno(), f"cannot enter the {kind} namespace of host {host}"
                    )

    def _connect(self, host: int, connected: bool) -> None:
        if self.hosts > 2:
            self._namespaces[-1].ip(
                f"link set port{host} {'master switch' if connected else 'nomaster'}"
            )
            return
        for namespace in self._namespaces:
            # Without ARP an interface takes its own hardware address for everybody's: the other end drops the packets.
            namespace.ip(f"link set {_INTERFACE} arp {'on' if connected else 'off'}")

    def _namespace(self, host: int) -> "_Namespace":
        if not self._namespaces:
            raise RuntimeError("the link is not open: use it as `with SlowLink(...) as link:`")
        if not 0 <= host < self.hosts:
            raise ValueError(f"host must be from 0 to {self.hosts - 1}, got {host!r}")
        return self._namespaces[host]

    def _ends(self) -> Iterator[tuple["_Namespace", str]]:
        """Every interface that sends into a cable."""
        for host in range(self.hosts):
            yield self._namespaces[host], _INTERFACE
            if self.hosts > 2:
                yield self._namespaces[-1], f"port{host}"

    def _join(self) -> None:
        """Make the cables and give every host its address."""
        hosts, switch = self._namespaces[: self.hosts], self._namespaces[-1]
        if self.hosts == 2:
            _cable(hosts[0], _INTERFACE, hosts[1])
        else:
            switch.ip("link add switch type bridge", "link set switch up")
            for i, host in enumerate(hosts):
                _cable(switch, f"port{i}", host)
                switch.ip(f"link set port{i} master switch up")
        for i, host in enumerate(hosts):
            host.ip(
                f"address add {_NETWORK}.{i + 1}/24 dev {_INTERFACE}",
                f"link set {_INTERFACE} up",
            )
            host.settle_congestion_control()


class _Namespace:
    """One network namespace, kept by one process.

    Args:
        unshare: The command that makes the namespace and runs what follows it there.
        enter: The options of ``nsenter`` beside the process and ``--net``.
    """

    def __init__(self, unshare: Sequence[str], enter: Sequence[str]) -> None:
        self.keeper = subprocess.Popen(
            [*unshare, sys.executable, "-I", "-S", _KEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the owner's business
        )
        assert self.keeper.stdout is not None
        assert self.keeper.stderr is not None
        if self.keeper.stdout.readline() != "ready\n":
            reason = self.keeper.stderr.read().strip()
            self.close()
            raise LinkUnavailable(f"a network namespace is not permitted ({reason})")
        self.pid = self.keeper.pid
        self.enter = ["nsenter", f"--target={self.pid}", *enter, "--net", "--"]
        self.kinds = ("user", "net") if enter else ("net",)

    def close(self) -> None:
        """Let the keeper empty the namespace and leave."""
        self.keeper.communicate()  # closes its standard input

    def ip(self, *commands: str) -> None:
        """Run ``ip`` commands inside."""
        self._run(["ip", "-batch", "-"], "\n".join(commands) + "\n")

    def tc(self, interface: str, rate_mbit: float | None) -> None:
        """Shape what one interface sends."""
        kind, largest = "noqueue", _LARGEST_SEGMENT
        if rate_mbit is not None:
            bits, burst = round(rate_mbit * 1e6), burst_bytes(rate_mbit)
            kind = f"tbf rate {bits}bit burst {burst} latency {_QUEUE}"
            # TCP hands over trains of packets, which a network card takes apart. The filter has to take apart those
            # that are larger than its bucket, at more than half of the kernel's whole work for the link.
            largest = min(largest, burst * 3 // 4)
        self.ip(f"link set {interface} gso_max_size {largest}")
        self._run(["tc", "qdisc", "replace", "dev", interface, "root", *kind.split()])

    def settle_congestion_control(self) -> None:
        """Take the usual one, whatever this machine has: BBR, for one, guesses a link's rate anew after every pause."""
        for name in _CONGESTION_CONTROL:
            with contextlib.suppress(LinkUnavailable):
                self._run(["tee", "/proc/sys/net/ipv4/tcp_congestion_control"], name)
                if name != _CONGESTION_CONTROL[0]:
                    log.info("links use %s: %s is not permitted here", name, _CONGESTION_CONTROL[0])
                return
        log.warning(
            "links have this machine's TCP congestion control: %s are not permitted",
            _CONGESTION_CONTROL,
        )

    def _run(self, argv: Sequence[str], text: str = "") -> None:
        command = [*self.enter, *argv]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LinkUnavailable(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")


def _cable(first: _Namespace, interface: str, second: _Namespace) -> None:
    """A veth pair from ``interface`` in the first namespace to the interface of the second."""
    first.ip(f"link add {interface} type veth peer name {_INTERFACE} netns {second.pid}")


def _open_namespaces(count: int) -> list[_Namespace]:
    """Make namespaces, as root or, failing that, inside one new user namespace."""
    for program in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(program) is None:
            raise LinkUnavailable(f"no `{program}` on this machine (packages iproute2, util-linux)")
    reason = "not root"
    if os.geteuid() == 0:
        try:
            return _open_all(count, privileged=True)
        except LinkUnavailable as error:
            reason = str(error)
    try:
        return _open_all(count, privileged=False)
    except LinkUnavailable as error:
        raise LinkUnavailable(
            f"no shaped link: {reason}, and without root: {error}. "
            "Run as root, or allow user namespaces."
        ) from None


def _open_all(count: int, *, privileged: bool) -> list[_Namespace]:
    """Make all the namespaces in one of the two ways, or none."""
    opened: list[_Namespace] = []
    unshare, enter = ["unshare", "--net"], []
    if not privileged:
        unshare = ["unshare", "--user", "--map-root-user", "--net"]
        enter = ["--user", "--preserve-credentials"]
    try:
        for _ in range(count):
            opened.append(_Namespace(unshare, enter))
            if not privileged:  # the others join the user namespace of the first
                unshare = ["nsenter", f"--target={opened[0].pid}", *enter, "--", "unshare", "--net"]
            # Some systems grant the namespace but no rights in it: find out here.
            opened[-1].ip("link set lo up")
    except BaseException:
        for namespace in opened:
            namespace.close()
        raise
    return opened


def _check_rate(rate_mbit: float | None) -> None:
    if rate_mbit is None:
        return
    if isinstance(rate_mbit, bool) or not isinstance(rate_mbit, (int, float)):
        raise TypeError(f"rate_mbit must be a number of Mbit/s or None, got {rate_mbit!r}")
    if not (math.isfinite(rate_mbit) and rate_mbit > 0):
        raise ValueError(f"rate_mbit must be positive and finite, or None, got {rate_mbit!r}")


@functools.cache
def _why_unavailable() -> str | None:
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    try:
        with SlowLink(hosts=2, rate_mbit=100):
            return None
    except LinkUnavailable as error:
        return str(error)
