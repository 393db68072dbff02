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

It reads orders from standard input, one line of JSON each: ``cut`` (hosts that nothing reaches), ``nat`` (hosts behind
a `Router`), or otherwise ``rates`` (seconds per byte up and down for each host), ``delay``, ``jitter``, ``queue``
(seconds), ``loss`` and ``reorder`` (shares) and ``burst`` (packets lost in a row on average), which must come before
the first packet. It answers each with ``ok``, and ends when its input ends.
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
_NEEDS_CHECKSUM = 0x01  # in the flags of the header
_HEADER_BYTES = 10  # of offloading: flags, kind, header bytes, segment bytes, checksum's start and offset
_ETHERNET_BYTES = 14  # a token bucket counts them with an IP packet, so this makes both kinds of link equal
_LARGEST = _HEADER_BYTES + 65536
_AT_ONCE = 64  # packets read from a host before the others get their turn
_AT_ONCE_SECONDS = 1e-4  # a wait as short as this does not count
_NETWORK = bytes([198, 18, 0])  # `namespaces.NETWORK`: all but the last byte of every host's address
_PROTOCOL, _IP_CHECKSUM, _SOURCE, _DESTINATION = (_HEADER_BYTES + offset for offset in (9, 10, 12, 16))
_TCP, _UDP = 6, 17
_FIRST_PORT, _MOST_PORTS, _MOST_PEERS = 40_000, 4096, 256  # of a router


class Line:
    """Packets under way between hosts. `tuns`: file descriptors of the hosts' TUN devices."""

    def __init__(self, tuns: list[int]) -> None:
        self.tuns = tuns
        self._events: list[tuple[float, int, bool, int, int, bytes]] = []  # time, order, arrived
        self._order = itertools.count()
        self._up_free, self._down_free = [0.0] * len(tuns), [0.0] * len(tuns)
        self._arrival: dict[tuple[int, int], float] = {}  # time of the last arrival on each path
        self._cut: set[int] = set()
        self._routers: dict[int, Router] = {}

    def obey(self, order: dict[str, Any]) -> None:
        """Obey an order; packets under way are not affected."""
        if "cut" in order:
            self._cut = set(order["cut"])
            return
        if "nat" in order:
            self._routers = {host: Router(bytes([*_NETWORK, host + 1])) for host in order["nat"]}
            return
        self._rates = order["rates"]
        self._delay, self._jitter = order["delay"], order["jitter"]
        self._queue, self._reorder, self._burst = order["queue"], order["reorder"], order["burst"]
        # Of all packets, `loss` are lost: a burst begins at each other packet with this probability.
        self._loss = order["loss"] / (1 - order["loss"]) / self._burst
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
            if source in self._routers and not (packet := self._routers[source].leave(packet)):
                continue
            if packet[_DESTINATION : _DESTINATION + 3] != _NETWORK:
                continue  # a private address, say
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
        if self._loss and self._is_lost(path):
            return
        if self._jitter:
            arrival += chance.uniform(-self._jitter, self._jitter)
        arrival = max(arrival, self._arrival.get(path, 0.0))
        if self._reorder and chance.random() < self._reorder:
            arrival += self._delay / 4  # packets that follow may overtake this one
        else:
            self._arrival[path] = arrival
        self._expect(arrival, True, source, destination, packet)

    def _is_lost(self, path: tuple[int, int]) -> bool:
        draw = self._chance[path].random()
        lost = draw < 1 - 1 / self._burst if path in self._in_burst else draw < self._loss
        (self._in_burst.add if lost and self._burst > 1 else self._in_burst.discard)(path)
        return lost

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
            elif destination not in self._routers or (packet := self._routers[destination].enter(packet)):
                with contextlib.suppress(OSError):  # a host whose device is down receives nothing
                    os.write(self.tuns[destination], packet)
        return None


class Router:
    """Translates the addresses of one host's TCP and UDP packets, as the router of a home does.

    A port of the host has one port of the router for all peers (endpoint-independent mapping), to which a peer may send
    what the host has sent something to before. So two hosts behind routers must both send first, which is called hole
    punching. Other packets, among them fragments, are dropped. When the router has no port left, the one that was
    unused for longest gets another owner. Otherwise, unlike most routers, this one forgets nothing.

    Args:
        address: of the router, 4 bytes, at which others see the host.
    """

    def __init__(self, address: bytes) -> None:
        self._address = address
        # Protocol, address and port of the host, least recently used first: the router's port, and peers.
        self._mappings: dict[bytes, tuple[int, dict[bytes, None]]] = {}
        self._owners: dict[int, bytes] = {}  # keys of `_mappings` by the router's port

    def leave(self, packet: bytes) -> bytes:
        """Return a packet of the host as others see it, or b"" to drop it."""
        if not (ports := _ports_at(packet)):
            return b""
        inside = packet[_PROTOCOL : _PROTOCOL + 1] + _end(packet, _SOURCE, ports)
        if found := self._mappings.pop(inside, None):
            port, peers = found
        elif len(self._mappings) < _MOST_PORTS:
            port, peers = _FIRST_PORT + len(self._mappings), {}
        else:
            port, peers = self._mappings.pop(next(iter(self._mappings)))[0], {}
        self._mappings[inside], self._owners[port] = (port, peers), inside
        peers[_end(packet, _DESTINATION, ports + 2)] = None
        if len(peers) > _MOST_PEERS:
            del peers[next(iter(peers))]
        return _rewritten(packet, _SOURCE, ports, self._address + port.to_bytes(2, "big"))

    def enter(self, packet: bytes) -> bytes:
        """Return a packet to the router as the host receives it, or b"" to drop it."""
        if not (ports := _ports_at(packet)):
            return b""
        inside = self._owners.get(int.from_bytes(packet[ports + 2 : ports + 4], "big"), b"")
        if inside[:1] != packet[_PROTOCOL : _PROTOCOL + 1]:
            return b""
        if _end(packet, _SOURCE, ports) not in self._mappings[inside][1]:
            return b""
        return _rewritten(packet, _DESTINATION, ports + 2, inside[1:])


def _ports_at(packet: bytes) -> int:
    """Return where a whole TCP or UDP packet has its ports, source first; 0 for others."""
    fragment = int.from_bytes(packet[_HEADER_BYTES + 6 : _HEADER_BYTES + 8], "big") & 0x3FFF
    if fragment or packet[_PROTOCOL] not in (_TCP, _UDP):
        return 0
    return _HEADER_BYTES + 4 * (packet[_HEADER_BYTES] & 15)


def _end(packet: bytes, address_at: int, port_at: int) -> bytes:
    return packet[address_at : address_at + 4] + packet[port_at : port_at + 2]


def _rewritten(packet: bytes, address_at: int, port_at: int, end: bytes) -> bytes:
    """Return a packet with another address and port at one end."""
    changed = bytearray(packet)
    changed[address_at : address_at + 4], changed[port_at : port_at + 2] = end[:4], end[4:]
    address = _words(end[:4]) - _words(packet[address_at : address_at + 4])
    both = address + _words(end[4:]) - _words(packet[port_at : port_at + 2])
    _adjust(changed, _IP_CHECKSUM, address)
    ports = _HEADER_BYTES + 4 * (packet[_HEADER_BYTES] & 15)
    at = ports + (16 if packet[_PROTOCOL] == _TCP else 6)
    if packet[0] & _NEEDS_CHECKSUM:  # so far it has the sum of addresses, protocol and length, not inverted
        changed[at : at + 2] = ((_words(changed[at : at + 2]) + address) % 0xFFFF).to_bytes(2, "big")
    elif any(packet[at : at + 2]):  # UDP may have none
        _adjust(changed, at, both)
    return bytes(changed)


def _adjust(packet: bytearray, at: int, change: int) -> None:
    """Update an Internet checksum for a change of the sum of words (RFC 1624)."""
    total = (0xFFFF - _words(packet[at : at + 2]) + change) % 0xFFFF
    packet[at : at + 2] = (0xFFFF - total).to_bytes(2, "big")


def _words(data: bytes | bytearray) -> int:
    """Return the sum of 16-bit words."""
    return sum(struct.unpack(f">{len(data) // 2}H", data))


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
