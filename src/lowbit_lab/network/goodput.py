"""Measure goodput and round trips of a ``SlowLink`` with plain sockets, without PyTorch."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lowbit_lab.network.shape import SlowLink

_PROBE = str(Path(__file__).with_name("probe.py"))
_FIRST_PORT = 5201
_SETTLE_SECONDS = 0.3
_SETTLE_ROUND_TRIPS = 20  # until TCP reaches the rate of a distant link
_PATIENCE = 40.0  # seconds for connecting, and for packets still under way at the end


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
