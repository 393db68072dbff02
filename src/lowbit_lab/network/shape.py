"""A slow link on one machine, with real packets: network namespaces joined by shaped virtual Ethernet.

Two hosts are the two ends of one veth pair; more hosts have veth pairs to a bridge in a namespace of its own. A token
bucket filter (``tc ... tbf``) on both ends of every pair limits each direction independently, as on a full-duplex
cable. The packets travel through the kernel's real TCP, at the real rate, in real time. The routes
of all hosts set the congestion control of the link, CUBIC by default.

The namespaces have no names and leave no files: each lives as long as its keeper process and the programs in it. A
keeper notices when its owner is gone, for whatever reason, kills the rest and ends. So nothing has to be cleaned up
after a crash, and two runs on one machine cannot interfere.

A token bucket can neither delay nor lose packets, nor give each direction its own rate. For a link that does, packets
go through a process that delays them (`lowbit_lab.network.distance`), over a second interface of each host, to the same
addresses.

A thread follows the changes of a link, and programs on the hosts are its other traffic (`Traffic`). An error there
is logged, and raised by what is next done with the link, at the latest when its context ends.

Root may do all this; other users may inside a user namespace, if the kernel permits it.
"""

import contextlib
import dataclasses
import functools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbit_lab.network import delay
from lowbit_lab.network.distance import Distance
from lowbit_lab.network.link import Link
from lowbit_lab.network.namespaces import INTERFACE, NETWORK, Helper, LinkUnavailable, Namespace, cable, open_namespaces

log = logging.getLogger(__name__)

_MAX_HOSTS = 64
_LARGEST_SEGMENT = 65536  # the kernel's default
_SECONDS_TO_END = 5.0
_PROBE = str(Path(__file__).with_name("probe.py"))
_FIRST_PORT = 5201
_SETTLE_SECONDS = 0.3
_SETTLE_ROUND_TRIPS = 20  # until TCP reaches the rate of a distant link
_PATIENCE = 40.0  # seconds for connecting, and for packets still under way at the end


def burst_bytes(rate_mbit: float) -> int:
    """Return the size of the token bucket.

    A 1 MB bucket lets whole messages through unshaped at 100 Mbit/s and makes FP32 look 2.4 times as fast as it is; a
    32 KB bucket cannot be refilled often enough to reach 10 Gbit/s.
    """
    return 32 * 1024 if rate_mbit <= 1000 else 256 * 1024


class SlowLink:
    """Hosts on this machine, joined by a link of a chosen rate and distance.

    Args:
        hosts: Number of hosts, 2 to 64.
        rate_mbit, fields: Fields of the `Link` between them.

    Attributes:
        link: The link that was set last, with its later changes.

    Raises:
        LinkUnavailable: On entering the context, or later for a link with a distance: the machine does not permit it.
        TypeError, ValueError: A wrong number of hosts, or a wrong link.

    Example::

        with SlowLink(rate_mbit=100, rtt_ms=40) as link:
            server = link.popen(0, ["iperf3", "-s", "-1"])
            client = link.popen(1, ["iperf3", "-c", link.address(0)])
            client.wait()
    """

    def __init__(self, hosts: int = 2, rate_mbit: float | None = 100, **fields: Any) -> None:
        if isinstance(hosts, bool) or not isinstance(hosts, int) or not 2 <= hosts <= _MAX_HOSTS:
            raise ValueError(f"hosts must be an integer from 2 to {_MAX_HOSTS}, got {hosts!r}")
        self.hosts = hosts
        self.link = Link(rate_mbit, **fields)
        self._cut: set[int] = set()
        self._distance: Distance | None = None
        self._namespaces: list[Namespace] = []
        self._processes: list[subprocess.Popen] = []
        self._traffic: list[Traffic] = []
        self._changing = threading.RLock()  # the changes of the link and the caller use the same processes
        self._later: threading.Thread | None = None
        self._stop = threading.Event()
        self._problem: Exception | None = None

    @staticmethod
    @functools.cache
    def available(*, distance: bool = False) -> str | None:
        """Try once whether this machine permits a shaped link (with a distance); return None or the reason why not."""
        if sys.platform != "linux":
            return "network namespaces exist on Linux only"
        try:
            with SlowLink(rtt_ms=float(distance)):
                return None
        except LinkUnavailable as error:
            return str(error)

    def __enter__(self) -> "SlowLink":
        try:
            self._namespaces.extend(open_namespaces(self.hosts + (self.hosts > 2)))
            self._join()
            self.set_link(self.link)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._check()
        finally:
            self.close()

    def close(self) -> None:
        """End the processes (SIGTERM, then SIGKILL) and the namespaces. A second call does nothing."""
        self._stop_changes()
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
        while self._traffic:
            self._traffic.pop().close()
        if self._distance:
            self._distance.close()
            self._distance = None
        while self._namespaces:
            self._namespaces.pop().close()
        while self._processes:  # the keepers have killed the remaining ones
            self._processes.pop().wait()
        self._problem = None

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host; it exists in the link only."""
        self._namespace(host)
        return f"{NETWORK}.{host + 1}"

    def interface(self, host: int) -> str:
        """Return the name of a host's network interface, for ``GLOO_SOCKET_IFNAME``."""
        self._namespace(host)
        return INTERFACE

    def environment(self, host: int) -> dict[str, str]:
        """Return the variables of the environment, as of torchrun, of a host's only rank, which has the same number."""
        return {
            "RANK": str(host), "WORLD_SIZE": str(self.hosts), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": self.interface(host),
        }  # fmt: skip

    def sent(self, host: int) -> tuple[int, int]:
        """Return the bytes, headers included, and the packets that a host has sent, as its interface counts them."""
        text = self.popen(host, ["cat", "/proc/net/dev"], stdout=subprocess.PIPE, text=True).communicate()[0]
        lines = (line.replace(":", " ").split() for line in text.splitlines())
        return next((int(words[9]), int(words[10])) for words in lines if words[0] == self.interface(host))

    def popen(
        self, host: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> subprocess.Popen:
        """Start a program on a host: ``subprocess.Popen`` with the same arguments and signals.

        It sees this machine's files, but only its own network. It ends with the link at the latest.
        """
        command = [*self._namespace(host).enter, *argv]
        self._check()
        process = subprocess.Popen(command, env=None if env is None else dict(env), **kwargs)
        self._processes = [p for p in self._processes if p.returncode is None]
        self._processes.append(process)
        return process

    def set_rate(self, rate_mbit: float | None) -> None:
        """Change the rate of every end in both directions, from now on, without later changes. None: no limit."""
        self.set_link(dataclasses.replace(self.link, rate_mbit=rate_mbit, back_mbit=None, changes=()))

    def set_link(self, link: Link) -> None:
        """Change the link from now on, and begin to follow its later changes.

        Addresses stay, and connections with their congestion control.

        Raises:
            LinkUnavailable: The machine does not permit the link's distance, or lacks its congestion control.
        """
        self._check()
        self._stop_changes()
        for _, stage in link.stages:
            self._namespaces[0].check_congestion_control(stage.congestion)
        began = time.monotonic()
        self._apply(link.stages[0][1], link)
        self.link = link
        if link.changes:
            self._later = threading.Thread(target=self._follow, args=(link, began), name="changes", daemon=True)
            self._later.start()

    def _follow(self, link: Link, began: float) -> None:
        """Make each change of the link at its time, until told to stop."""
        try:
            for seconds, stage in link.changes:
                if self._stop.wait(began + seconds - time.monotonic()):
                    return
                self._apply(stage, link)
        except Exception as error:
            log.error("the link did not change as it should: %s", error)
            self._problem = error

    def _stop_changes(self) -> None:
        if self._later:
            self._stop.set()
            self._later.join()
            self._later = None
            self._stop.clear()

    def _check(self) -> None:
        """Raise what went wrong since the link was set."""
        if self._problem:
            raise LinkUnavailable(f"the link did not change as it should: {self._problem}") from self._problem
        for traffic in self._traffic:
            traffic.check()

    def _apply(self, stage: Link, whole: Link) -> None:
        """Change the link to one stage of a whole with its changes."""
        hosts = range(self.hosts)
        with self._changing:
            if whole.far and not self._distance:
                self._distance = Distance(self._namespaces[: self.hosts])
                self._distance.cut(self._cut)
            for host in hosts:
                source = f"dev {INTERFACE} src {self.address(host)}"
                self._namespaces[host].ip(f"route replace {NETWORK}.0/24 {source} congctl {stage.congestion}")
            if whole.far and self._distance:
                self._distance.lead(stage)
            else:
                for namespace, interface in self._ends():
                    _shape(namespace, interface, stage, whole)
                if self._distance:
                    self._distance.leave()
            self._share(stage.others)

    def _share(self, others: int) -> None:
        """Start or end the other connections of each host."""
        if others != (self._traffic[0].count if self._traffic else 0):
            while self._traffic:
                self._traffic.pop().close()
            hosts = self._namespaces[: self.hosts] if others else []
            for i, host in enumerate(hosts):
                self._traffic.append(Traffic(host, self.address(i), self.address((i + 1) % self.hosts), others))
            for traffic in self._traffic:
                traffic.await_connections()

    def cut(self, host: int) -> None:
        """Drop every packet to and from a host, until `restore`. A second call does nothing.

        No end notices at once: TCP sees no reset, no "unreachable" and no lost carrier. With two hosts, both are cut
        off.
        """
        self._namespace(host)
        self._cut.add(host)
        self._connect(host)

    def restore(self, host: int) -> None:
        """Connect a host that was cut off. TCP continues when it next retransmits."""
        self._namespace(host)
        self._cut.discard(host)
        self._connect(host)

    def enter(self, host: int) -> None:
        """Move this process to a host for good; only for a fork without a second thread.

        Raises:
            OSError: the kernel does not permit it.
        """
        for kind in self._namespace(host).kinds:
            delay.enter(self._namespace(host).pid, kind)

    def _connect(self, host: int) -> None:
        """Plug in the cable of a host, or pull it out if the host is cut off."""
        with self._changing:
            if self.hosts > 2:
                self._namespaces[-1].ip(f"link set port{host} {'nomaster' if host in self._cut else 'master switch'}")
            else:  # one cable
                for namespace in self._namespaces:
                    # Without ARP an interface sends to its own hardware address, and the other end drops the packets.
                    namespace.ip(f"link set {INTERFACE} arp {'off' if self._cut else 'on'}")
            if self._distance:
                self._distance.cut(self._cut)

    def _namespace(self, host: int) -> Namespace:
        if not self._namespaces:
            raise RuntimeError("the link is not open: use it as `with SlowLink(...) as link:`")
        if not 0 <= host < self.hosts:
            raise ValueError(f"host must be from 0 to {self.hosts - 1}, got {host!r}")
        return self._namespaces[host]

    def _ends(self) -> list[tuple[Namespace, str]]:
        """Return every interface that sends into a cable."""
        ports = [(self._namespaces[-1], f"port{host}") for host in range(self.hosts if self.hosts > 2 else 0)]
        return [(namespace, INTERFACE) for namespace in self._namespaces[: self.hosts]] + ports

    def _join(self) -> None:
        """Make the cables, and give every host its address."""
        hosts, switch = self._namespaces[: self.hosts], self._namespaces[-1]
        if self.hosts == 2:
            cable(hosts[0], INTERFACE, hosts[1])
        else:
            switch.ip("link add switch type bridge", "link set switch up")
            for i, host in enumerate(hosts):
                cable(switch, f"port{i}", host)
                switch.ip(f"link set port{i} master switch up")
        for i, host in enumerate(hosts):
            host.ip(f"address add {NETWORK}.{i + 1}/24 dev {INTERFACE}", f"link set {INTERFACE} up")


def _shape(namespace: Namespace, interface: str, link: Link, whole: Link) -> None:
    """Limit the rate at which one interface sends, as one stage of a whole link does."""
    kind = "noqueue"
    if link.rate_mbit is not None:
        bits, burst = round(link.rate_mbit * 1e6), burst_bytes(link.rate_mbit)
        kind = f"tbf rate {bits}bit burst {burst} latency {link.most_waiting_ms:g}ms"
    # TCP hands over trains of packets, which a network card would split. The filter must split those larger than its
    # bucket, which costs more than half of the kernel's work for the link. A connection keeps the size it began with.
    bursts = [burst_bytes(stage.rate_mbit) * 3 // 4 for _, stage in whole.stages if stage.rate_mbit is not None]
    namespace.ip(f"link set {interface} gso_max_size {min([_LARGEST_SEGMENT, *bursts])}")
    namespace.run(["tc", "qdisc", "replace", "dev", interface, "root", *kind.split()])


class Traffic(Helper):
    """Other traffic that shares a link: a program (`probe.py share`) that sends and receives as fast as it can.

    Args:
        host: where it is. address: of this host. peer: address to send to. count: connections.
    """

    def __init__(self, host: Namespace, address: str, peer: str, count: int) -> None:
        self.count = count
        super().__init__("the other traffic", [_PROBE, "share", address, peer, str(count)], within=host.enter)

    def await_connections(self) -> None:
        """Return once its connections are open; LinkUnavailable: they cannot be opened."""
        if problem := self._problem("ok"):
            raise LinkUnavailable(f"no other traffic: {problem.splitlines()[-1]}")

    def check(self) -> None:
        """Raise LinkUnavailable if it has ended."""
        if self._process.poll() is not None:
            raise LinkUnavailable(f"the other traffic ended, with exit code {self._process.returncode}")


def goodput(link: SlowLink, routes: Sequence[tuple[int, int]], seconds: float) -> list[float]:
    """Measure Mbit/s of all (sender, receiver) routes at the same time.

    This takes 20 round trips more than ``seconds``, in which TCP reaches the rate of a distant link.

    Raises:
        RuntimeError: A probe failed; the message is the probe's.
    """
    receivers, senders = [], []
    more = _SETTLE_ROUND_TRIPS * link.link.rtt_ms / 1e3
    times = [str(_SETTLE_SECONDS + more), str(seconds + more)]
    for port, (sender, receiver) in enumerate(routes, _FIRST_PORT):
        tail = [link.address(receiver), str(port), *times]
        receivers.append(_probe(link, receiver, ["receive", *tail]))
        senders.append(_probe(link, sender, ["send", *tail]))
    results = [_finish(receiver, seconds + more) for receiver in receivers]
    for sender in senders:
        _finish(sender, seconds + more)
    return [float(result) for result in results]


def round_trip(link: SlowLink, *, first: int = 0, second: int = 1) -> float:
    """Measure the milliseconds that a byte takes to another host and back, as the median of nine.

    Raises:
        RuntimeError: A probe failed; the message is the probe's.
    """
    tail = [link.address(second), str(_FIRST_PORT)]
    echo = _probe(link, second, ["echo", *tail])
    milliseconds = float(_finish(_probe(link, first, ["ping", *tail]), 0))
    _finish(echo, 0)
    return milliseconds


def _probe(link: SlowLink, host: int, arguments: list[str]) -> subprocess.Popen:
    argv = [sys.executable, "-I", "-S", _PROBE, *arguments]
    return link.popen(host, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen, seconds: float) -> str:
    output, error = process.communicate(timeout=seconds + _PATIENCE)
    if process.returncode:
        raise RuntimeError(f"network probe failed: {' '.join(error.strip().splitlines()[-1:])}")
    return output
