"""Carries packets between distant hosts: ``python delay.py PID...``, with one process of each host's namespace.

This is a program of its own that needs the standard library only. It makes a TUN device in the namespace of each
process, reads the IPv4 packets that a host sends there, and writes them to their destination at the time at which a
link with the given rates and distance would deliver them. A packet leaves a host when its bytes have passed at the
rate, after earlier packets; one that would wait longer than the queue permits is dropped. Then it travels for half a
round trip. Two hosts are the ends of one cable, so only the sender's rate counts. More hosts meet at a switch, which
sends to each at that host's own rate, with a queue for each.

The kernel sends trains of TCP packets (TSO). A train takes as long as its packets with all their headers, and arrives
with their last byte. For links that lose packets, `distance` keeps the kernel from making trains, so that packets are
lost one by one. Every path has its own random generator with a fixed seed: every run loses the same packets.

If this process had to wait for a processor, it sees packets late. It does not delay them for that, since a link that
was busy meanwhile would have carried them. It takes about a tenth of a processor at 100 Mbit/s, a sixth at 1 Gbit/s.

It reads orders from standard input, one line of JSON each: ``cut`` (hosts that nothing reaches), or otherwise ``rates``
(seconds per byte up and down for each host), ``delay``, ``jitter``, ``queue`` (seconds), ``loss`` and ``reorder``
(shares) and ``burst`` (packets lost in a row on average), which must come before the first packet. It answers each with
``ok``, and ends when its input ends.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from typing import Any

DEVICE = "far0"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_PROTOCOL_INFO, _OFFLOAD_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO6 = 0x01, 0x02, 0x04
_HEADER_BYTES = 10  # of offloading: flags, kind, header bytes, segment bytes, checksum's start and offset
_ETHERNET_BYTES = 14  # a token bucket counts them with an IP packet, so this makes both kinds of link equal
_LARGEST = _HEADER_BYTES + 65536
_AT_ONCE = 64  # packets read from a host before the others get their turn
_AT_ONCE_SECONDS = 1e-4  # a wait as short as this does not count
_NETWORK = bytes([198, 18, 0])  # `namespaces.NETWORK`: all but the last byte of every host's address
_DESTINATION = _HEADER_BYTES + 16


class Line:
    """Packets under way between hosts. `tuns`: file descriptors of the hosts' TUN devices."""

    def __init__(self, tuns: list[int]) -> None:
        self.tuns = tuns
        self._events: list[tuple[float, int, bool, int, int, bytes]] = []  # time, order, arrived
        self._order = itertools.count()
        self._up_free, self._down_free = [0.0] * len(tuns), [0.0] * len(tuns)
        self._arrival: dict[tuple[int, int], float] = {}  # time of the last arrival on each path
        self._cut: set[int] = set()

    def obey(self, order: dict[str, Any]) -> None:
        """Obey an order; packets under way are not affected."""
        if "cut" in order:
            self._cut = set(order["cut"])
            return
        self._rates = order["rates"]
        self._delay, self._jitter = order["delay"], order["jitter"]
        self._queue, self._reorder, self._burst = order["queue"], order["reorder"], order["burst"]
        # Of all packets, `loss` are lost: independently, or a burst begins at each other packet with this probability.
        loss = order["loss"]
        self._loss = loss if self._burst == 1 else loss / (1 - loss) / self._burst
        self._in_burst: set[tuple[int, int]] = set()  # paths whose last packet was lost
        hosts = range(len(self.tuns))
        self._chance = {path: random.Random(repr(path)) for path in itertools.product(hosts, hosts)}

    def take(self, source: int, now: float, late: float) -> None:
        """Read packets that a host sends. late: seconds that some may have waited for this program."""
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self.tuns[source], _LARGEST)
            except BlockingIOError:
                return
            if packet[_HEADER_BYTES] >> 4 != 4:
                continue  # IPv6 neighbour discovery, which nothing needs
            if packet[_DESTINATION : _DESTINATION + 3] != _NETWORK:
                continue
            destination = packet[_DESTINATION + 3] - 1
            if 0 <= destination < len(self.tuns) and not self._cut & {source, destination}:
                self._send(now, late, source, destination, packet)

    def _send(self, now: float, late: float, source: int, destination: int, packet: bytes) -> None:
        """Schedule the moment at which a packet leaves its host."""
        begin = self._up_free[source]
        if begin < now - late:  # a link that was busy continues after its last packet
            begin = now
        if begin - now > self._queue:
            return
        end = self._up_free[source] = begin + ethernet_bytes(packet) * self._rates[source][0]
        if len(self.tuns) > 2:
            self._expect(end, False, source, destination, packet)
        else:
            self._travel(end, source, destination, packet)

    def _switch(self, now: float, source: int, destination: int, packet: bytes) -> None:
        """Schedule the moment at which a packet leaves the switch."""
        begin = max(now, self._down_free[destination])
        if begin - now > self._queue:
            return
        end = self._down_free[destination] = begin + ethernet_bytes(packet) * self._rates[destination][1]
        self._travel(end, source, destination, packet)

    def _travel(self, now: float, source: int, destination: int, packet: bytes) -> None:
        """Schedule a packet's arrival after the delay, unless it is lost."""
        path = source, destination
        chance, arrival = self._chance[path], now + self._delay
        if self._loss:
            draw = chance.random()
            lost = draw < 1 - 1 / self._burst if path in self._in_burst else draw < self._loss
            (self._in_burst.add if lost and self._burst > 1 else self._in_burst.discard)(path)
            if lost:
                return
        if self._jitter:
            arrival += chance.uniform(-self._jitter, self._jitter)
        arrival = max(arrival, self._arrival.get(path, 0.0))
        if self._reorder and chance.random() < self._reorder:
            arrival += self._delay / 4  # packets that follow may overtake this one
        else:
            self._arrival[path] = arrival
        self._expect(arrival, True, source, destination, packet)

    def _expect(self, at: float, arrived: bool, source: int, destination: int, packet: bytes) -> None:
        heapq.heappush(self._events, (at, next(self._order), arrived, source, destination, packet))

    def move(self) -> float | None:
        """Move all packets that are due; return the seconds until the next is due (None: nothing is under way)."""
        while self._events:
            wait = self._events[0][0] - time.monotonic()
            if wait > 0:
                return wait
            at, _, arrived, source, destination, packet = heapq.heappop(self._events)
            if self._cut & {source, destination}:
                continue
            if not arrived:
                self._switch(at, source, destination, packet)
            else:
                with contextlib.suppress(OSError):  # a host whose device is down receives nothing
                    os.write(self.tuns[destination], packet)
        return None


def ethernet_bytes(packet: bytes) -> int:
    """Return the Ethernet bytes of a packet; of a train, those of all its packets with their own headers."""
    kind, segment = packet[1], int.from_bytes(packet[4:6], sys.byteorder)
    size = len(packet) - _HEADER_BYTES
    if not kind:
        return size + _ETHERNET_BYTES
    ip = 4 * (packet[_HEADER_BYTES] & 15)
    headers = ip + 4 * (packet[_HEADER_BYTES + ip + 12] >> 4)
    count = -(-(size - headers) // segment)
    return size + (count - 1) * headers + count * _ETHERNET_BYTES


def enter(pid: int, kind: str) -> None:
    """Move this process to a namespace of another one: "net" or "user"."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/{kind}") as namespace:
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of process {pid}")


def open_tun(pid: int) -> int:
    """Enter the network namespace of a process and make a TUN device there; returns its file descriptor."""
    enter(pid, "net")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TUN | _NO_PROTOCOL_INFO | _OFFLOAD_HEADER
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _CHECKSUM | _TSO4 | _TSO6)
    return tun


def run(line: Line) -> None:
    """Carry packets until standard input ends."""
    hosts = {tun: host for host, tun in enumerate(line.tuns)}
    watched, orders, taken = [0, *hosts], b"", time.monotonic()
    while True:
        wait = line.move()
        begin = time.monotonic()
        readable = select.select(watched, [], [], wait)[0]
        now = time.monotonic()
        # More packets came while the last ones were being handled.
        if now - begin < _AT_ONCE_SECONDS:
            late = now - taken
        else:
            late = 0.0 if wait is None else max(0.0, now - begin - wait)
        taken = now
        for ready in readable:
            if ready:
                line.take(hosts[ready], now, late)
                continue
            if not (more := os.read(0, 1 << 16)):
                return
            *whole, orders = (orders + more).split(b"\n")
            for order in whole:
                line.obey(json.loads(order))
                print("ok", flush=True)


def main() -> None:
    """Make the devices, print ``ok``, and carry packets."""
    try:
        tuns = [open_tun(int(pid)) for pid in sys.argv[1:]]
    except OSError as error:
        sys.exit(str(error))
    print("ok", flush=True)
    run(Line(tuns))


if __name__ == "__main__":
    main()
