"""The ranks of a benchmark: processes on the hosts of a slow link, or on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Any

from lowbit.network import Link, LinkUnavailable, SlowLink, goodput, round_trip
from lowbit.ranks.pytorch import check_torch

UNLIMITED = Link(None)
_CONNECTING = Link(1000.0)
_PROBE_SECONDS = 1.0


class Ranks:
    """One process for each rank of a job, which finds the others; a context manager that ends them all.

    Args:
        link: an open link, whose host i gets rank i; None: all on this machine's loopback.
        count: how many.
        program: module that each of them runs.
    """

    def __init__(self, link: SlowLink | None, count: int, program: str = "lowbit.bench.rank") -> None:
        self._link, self._count, self._program = link, count, program
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        self._files = contextlib.ExitStack()

    def __enter__(self) -> Ranks:
        port = "29500" if self._link else str(_free_port())
        try:
            for rank in range(self._count):
                self._start(rank, port)
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

    def ask(self, method: str, **arguments: Any) -> list[Any]:
        """Give all ranks an order (of `lowbit.bench.rank`) and collect their answers, by rank.

        Raises:
            ChildProcessError: a rank failed; the message says how.
        """
        self.tell(json.dumps([method, arguments]))
        results: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(results) < self._count:  # whoever fails first ends the waiting
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    results[key.data] = self._answer(key.data)
        return [results[rank] for rank in range(self._count)]

    def tell(self, line: str) -> None:
        """Write a line to the standard input of all ranks."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # waiting for it will tell why it ended
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def ended(self) -> bool:
        """Whether all ranks have ended, and well.

        Raises:
            ChildProcessError: one ended with an error; the message has its last words.
        """
        codes = [process.poll() for process in self._processes]
        for rank, code in enumerate(codes):
            if code:
                raise _failure(rank, self._last_words(rank))
        return None not in codes

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()  # what they hold is thrown away, or on disk
        for process in self._processes:
            process.communicate()
        self._files.close()
        self._processes.clear()

    def _start(self, rank: int, port: str) -> None:
        count = str(self._count)
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": self._link.address(0) if self._link else "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._errors.append(self._files.enter_context(file))  # `close` closes it
        argv = [sys.executable, "-m", self._program]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file, "text": True}
        if self._link:
            environment["GLOO_SOCKET_IFNAME"] = self._link.interface(rank)
            process = self._link.popen(rank, argv, env=environment, **pipes)
        else:
            process = subprocess.Popen(argv, env=environment, **pipes)
        self._processes.append(process)

    def _answer(self, rank: int) -> Any:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self._processes[rank].wait()
            raise _failure(rank, self._last_words(rank))
        answer = json.loads(line)
        if "error" in answer:
            raise _failure(rank, answer["error"])
        return answer["result"]

    def _last_words(self, rank: int) -> str:
        """The end of what a rank that has ended said on standard error, and its exit status."""
        self._errors[rank].seek(0)
        said = self._errors[rank].read().strip().splitlines()
        return f"exit status {self._processes[rank].returncode}" + (f", {said[-1]}" if said else "")


def _failure(rank: int, reason: str) -> ChildProcessError:
    return ChildProcessError(f"rank {rank} failed: {reason}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started(
    count: int, links: Sequence[Link], program: str = "lowbit.bench.rank"
) -> Iterator[tuple[SlowLink | None, Ranks]]:
    """Ranks on the hosts of a link that `set_link` changes; on loopback if no link has to be limited or can be.

    Where one of `links` is limited, the ranks connect on a limited one: that fixes how large the trains of packets are
    that TCP hands over. Made on an unlimited link they are larger than the bucket of a limited one, which then drops
    some of what it has to take apart: FP32 at 1 Gbit/s was five times too slow.

    Raises:
        TorchVersionError: this PyTorch is not known to work.
        LinkUnavailable: one of `links` is limited, or has a distance, and this machine does not permit that.
    """
    check_torch()
    check_available(links)
    if SlowLink.available():
        with Ranks(None, count, program) as ranks:
            yield None, ranks
    else:
        first = UNLIMITED if set(links) == {UNLIMITED} else _CONNECTING
        with SlowLink(count, first.rate_mbit) as network, Ranks(network, count, program) as ranks:
            yield network, ranks


def check_available(links: Sequence[Link]) -> None:
    """Check that this machine permits links, before anything starts.

    Raises:
        LinkUnavailable: it does not; the message says why, and how to go on.
    """
    limited = [link for link in links if link != UNLIMITED]
    if limited and (reason := SlowLink.available()):
        raise LinkUnavailable(f"{reason} `--link unlimited` measures without a limit.")
    far = next((link for link in limited if link.far), None)
    if far and (reason := SlowLink.available(distance=True)):
        raise LinkUnavailable(f"{reason} `--link {Link(far.rate_mbit)}` measures without a distance.")


def set_link(network: SlowLink | None, link: Link) -> dict[str, Any]:
    """Change what joins the ranks; returns what rows say of it.

    That is `link` (its text), `link_mbit` (None: unlimited), `link_rtt_ms`, and what plain sockets then measure:
    `goodput_mbit` (payload from rank 0 to rank 1) and `rtt_ms`, both None on loopback.
    """
    about: dict[str, Any] = dict.fromkeys(("goodput_mbit", "rtt_ms"))
    if network is not None:
        network.set_link(link)
        about["goodput_mbit"] = goodput(network, [(0, 1)], _PROBE_SECONDS)[0]
        about["rtt_ms"] = round_trip(network)
    return {"link": str(link), "link_mbit": link.rate_mbit, "link_rtt_ms": link.rtt_ms, **about}
