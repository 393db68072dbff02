"""Processes that follow a benchmark's orders, on the hosts of a slow link or on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import IO, Any

from lowbit_lab.bench.worker import CONGESTION
from lowbit_lab.network import Link, LinkUnavailable, SlowLink, goodput, round_trip

UNLIMITED = Link(None)
_CONNECTING = Link(1000.0)
_PROBE_SECONDS = 1.0

OnProgress = Callable[[Any], None]


class Workers:
    """Processes that follow orders; a context manager that ends them all. Their side is `lowbit_lab.bench.worker`.

    Args:
        program: the module that each of them runs.
        count: number of processes.
        grouped: whether they join one process group.
        network: an open link, whose host i gets process i; None: all on this machine's loopback.
        environment: further environment variables for them.
        per_host: processes on each host; neighbours share one.
    """

    def __init__(
        self,
        program: str,
        count: int = 1,
        *,
        grouped: bool = False,
        network: SlowLink | None = None,
        environment: Mapping[str, str] | None = None,
        per_host: int = 1,
    ) -> None:
        self._program, self._count, self._grouped, self._network = program, count, grouped, network
        self._per_host = per_host
        self._environment = environment or {}
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        self._files = contextlib.ExitStack()
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> Workers:
        port = "29500" if self._network else str(_free_port())
        try:
            for index in range(self._count):
                self._start(index, port)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, method: str, /, *, on_progress: OnProgress | None = None, **arguments: Any) -> list[Any]:
        """Give all processes an order and collect their answers, by process.

        Args:
            method: of the program's object; arguments: its keyword arguments, JSON values.
            on_progress: called with progress reports of the processes, in threads.
        """
        answers = [
            self._threads.submit(self._exchange, index, method, arguments, on_progress) for index in range(self._count)
        ]
        for answer in as_completed(answers):
            answer.result()  # raises the first failure: the other processes may wait for the one that failed
        return [answer.result() for answer in answers]

    def share(self, method: str, orders: Sequence[Mapping[str, Any]], on_progress: OnProgress) -> Iterator[Any]:
        """Give each order to the next process that is free, and yield answers as they come."""
        free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(self._count):
            free.put(index)

        def give(order: Mapping[str, Any]) -> Any:
            index = free.get()
            try:
                return self._exchange(index, method, order, on_progress)
            finally:
                free.put(index)

        for answer in as_completed([self._threads.submit(give, order) for order in orders]):
            yield answer.result()

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._files.close()
        self._processes.clear()

    def _start(self, index: int, port: str) -> None:
        environment = os.environ | self._environment | {"LOWBIT_WORKER": str(index)}
        if self._grouped:
            environment |= {"RANK": str(index), "LOCAL_RANK": str(index)}
            environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self._count))
            environment |= {"MASTER_ADDR": self._network.address(0) if self._network else "127.0.0.1"}
            environment |= {"MASTER_PORT": port}
        file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._errors.append(self._files.enter_context(file))  # `close` closes it
        argv = [sys.executable, "-m", self._program]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file, "text": True}
        if self._network:
            host = index // self._per_host
            environment["GLOO_SOCKET_IFNAME"] = self._network.interface(host)
            process = self._network.popen(host, argv, env=environment, **pipes)
        else:
            process = subprocess.Popen(argv, env=environment, **pipes)
        self._processes.append(process)

    def _exchange(self, index: int, method: str, arguments: Mapping[str, Any], on_progress: OnProgress | None) -> Any:
        """Give a process an order, and return its answer."""
        process = self._processes[index]
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # reading the answer finds out why the process ended
            process.stdin.write(json.dumps([method, arguments]) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            match json.loads(line):
                case {"progress": value}:
                    if on_progress:
                        on_progress(value)
                case {"error": reason}:
                    raise self._failure(index, reason)
                case {"result": result}:
                    return result
        process.wait()
        raise self._failure(index, self._exit_message(index))

    def _failure(self, index: int, reason: str) -> ChildProcessError:
        return ChildProcessError(f"{'rank' if self._grouped else 'process'} {index} failed: {reason}")

    def _exit_message(self, index: int) -> str:
        """Return the exit status of a process that has ended, and the last line of its standard error."""
        self._errors[index].seek(0)
        lines = self._errors[index].read().strip().splitlines()
        return f"exit status {self._processes[index].returncode}" + (f", {lines[-1]}" if lines else "")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started(
    program: str, count: int, links: Sequence[Link], *, per_host: int = 1
) -> Iterator[tuple[SlowLink | None, Workers]]:
    """Start ranks on the hosts of a link that `set_link` changes; on loopback if this machine permits no limits.

    `per_host` neighbours share a host.

    If one of `links` is limited, the ranks connect on a limited link, which fixes the size of TCP's trains of packets.
    Those of an unlimited link are larger than the token bucket of a limited one, which then drops packets: FP32 at
    1 Gbit/s was five times too slow.
    """
    from lowbit.wire.pytorch import check_torch

    check_torch()
    limited = [link for link in links if link != UNLIMITED]
    if limited and (reason := SlowLink.available()):
        raise LinkUnavailable(f"{reason} `--link unlimited` measures without a limit.")
    far = next((link for link in limited if link.far), None)
    if far and (reason := SlowLink.available(distance=True)):
        raise LinkUnavailable(f"{reason} `--link {Link(far.rate_mbit)}` measures without a distance.")
    if SlowLink.available():
        with Workers(program, count, grouped=True) as ranks:
            yield None, ranks
    else:
        first = UNLIMITED if set(links) == {UNLIMITED} else _CONNECTING
        with (
            SlowLink(count // per_host, first.rate_mbit) as network,
            Workers(program, count, grouped=True, network=network, per_host=per_host) as ranks,
        ):
            yield network, ranks


def set_link(network: SlowLink | None, link: Link, ranks: Workers | None = None) -> dict[str, Any]:
    """Change the link between the ranks, and return its fields of a row.

    The connections that `ranks` have get the link's congestion control; routes give it to new ones only.

    They are `link` (its text), `link_mbit` (None: unlimited), `link_rtt_ms`, and as measured with plain sockets
    `goodput_mbit` (payload from rank 0 to rank 1) and `rtt_ms`, both None on loopback.
    """
    about: dict[str, Any] = dict.fromkeys(("goodput_mbit", "rtt_ms"))
    if network is not None:
        network.set_link(link)
        if ranks is not None:
            ranks.ask(CONGESTION, name=link.congestion)
        about["goodput_mbit"] = goodput(network, [(0, 1)], _PROBE_SECONDS)[0]
        about["rtt_ms"] = round_trip(network)
    return {"link": str(link), "link_mbit": link.rate_mbit, "link_rtt_ms": link.rtt_ms, **about}
