"""What a ``SlowLink`` really carries, measured with plain sockets and nothing of PyTorch."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowbit.network.shape import SlowLink

_PROBE = str(Path(__file__).with_name("probe.py"))
_FIRST_PORT = 5201


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Mbit/s of TCP payload between two hosts: each direction by itself, then both at once."""

    forward: float
    backward: float
    forward_with_backward: float
    backward_with_forward: float


def measure(link: SlowLink, *, first: int = 0, second: int = 1, seconds: float = 1.0) -> Goodput:
    """Measure the link between two hosts in three runs of ``seconds``.

    Raises:
        RuntimeError: A probe failed; the message is its own.
    """
    there, back = (first, second), (second, first)
    (forward,) = goodput(link, [there], seconds)
    (backward,) = goodput(link, [back], seconds)
    both = goodput(link, [there, back], seconds)
    return Goodput(
        forward=forward,
        backward=backward,
        forward_with_backward=both[0],
        backward_with_forward=both[1],
    )


def goodput(link: SlowLink, routes: Sequence[tuple[int, int]], seconds: float) -> list[float]:
    """Mbit/s of every (sender, receiver) route, all of them at the same time.

    Raises:
        RuntimeError: A probe failed; the message is its own.
    """
    receivers, senders = [], []
    for port, (sender, receiver) in enumerate(routes, _FIRST_PORT):
        tail = [link.address(receiver), str(port), str(seconds)]
        receivers.append(_probe(link, receiver, ["receive", *tail]))
        senders.append(_probe(link, sender, ["send", *tail]))
    results = [_finish(receiver, seconds) for receiver in receivers]
    for sender in senders:
        _finish(sender, seconds)
    return [float(result) for result in results]


def _probe(link: SlowLink, host: int, arguments: list[str]) -> subprocess.Popen:
    argv = [sys.executable, "-I", "-S", _PROBE, *arguments]
    return link.popen(host, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen, seconds: float) -> str:
    output, error = process.communicate(timeout=seconds + 20)
    if process.returncode:
        raise RuntimeError(f"network probe failed: {error.strip().splitlines()[-1:]}")
    return output
