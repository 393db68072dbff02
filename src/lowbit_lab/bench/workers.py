"""Processes that follow a benchmark's orders, on the hosts of a slow link or on this machine, and their progress.

Orders come on a process's standard input, one JSON list `[method, arguments]` a line. Each is answered with one line of
JSON on standard output, after lines that may report progress. Output of libraries goes to standard error.
"""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lowbit.wire.connections import congestion_control, set_congestion_control
from lowbit.wire.errors import first_line
from lowbit_lab.network import Link, LinkUnavailable, SlowLink, goodput, round_trip
from lowbit_run.job.output import end
from lowbit_run.job.process_group import joined
from lowbit_run.terminal import filtered_again
from lowbit_run.train.device import threads_per_rank
from lowbit_run.train.progress import Rhythm

UNLIMITED = Link(None)
_CONNECTING = Link(1000.0)
_PROBE_SECONDS = 1.0

TIMEOUT_SECONDS = 600.0
CONGESTION = "use_congestion_control"
"""The order that every process knows."""
_WIDE = 100  # characters of a terminal that has room for bars next to the text
_SPEED_SECONDS = 120.0

OnProgress = Callable[[Any], None]
Advance = Callable[..., None]


class Workers:
    """Processes that follow orders; a context manager that ends them all. Their side is `serve`.

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
        self._per_host, self._environment = per_host, environment or {}
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        self._files = contextlib.ExitStack()
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> "Workers":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = "29500" if self._network else str(probe.getsockname()[1])
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
        self._errors[index].seek(0)
        lines = self._errors[index].read().strip().splitlines()
        raise self._failure(index, f"exit status {process.returncode}" + (f", {lines[-1]}" if lines else ""))

    def _failure(self, index: int, reason: str) -> ChildProcessError:
        return ChildProcessError(f"{'rank' if self._grouped else 'process'} {index} failed: {reason}")


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


_answers: IO[str] | None = None


def serve(make: Callable[[], Any]) -> None:
    """Run orders on the object of `make` until standard input ends; as one of several ranks, join the others first.

    If standard input ends during an order, the benchmark is gone, and this process exits.
    """
    global _answers
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_read, args=(orders, busy), daemon=True).start()
    with ExitStack() as stack:
        if "RANK" in os.environ:
            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            cores, threads = sorted(os.sched_getaffinity(0)), threads_per_rank(ranks)
            if ranks <= len(cores):  # each has its share of the machine's cores
                os.sched_setaffinity(0, cores[rank * threads : (rank + 1) * threads])
            torch.set_num_threads(threads)
            stack.enter_context(joined(TIMEOUT_SECONDS))
        elif torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOWBIT_WORKER"]) % torch.cuda.device_count())
        worker = make()
        while line := orders.get():
            method, arguments = json.loads(line)
            answer = _follow(worker, method, arguments)
            busy.clear()
            _write(answer)
    end(0)  # at once: PyTorch's threads may still hold tensors


def _follow(worker: Any, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run an order and return {"result": ...} or {"error": one line}; an error makes the benchmark end this process."""
    try:
        order = _use_congestion_control if method == CONGESTION else getattr(worker, method)
        return {"result": order(**arguments)}
    except Exception as error:
        traceback.print_exc()
        return {"error": first_line(error)}


def _use_congestion_control(name: str) -> None:
    """Change that of all connections to other hosts."""
    set_congestion_control(name)
    if (used := congestion_control()) not in ("", name):
        raise RuntimeError(f"congestion control is {used!r}, and the kernel does not permit {name!r}")


def report_progress(value: Any) -> None:
    """Report progress to the benchmark."""
    if _answers is not None:
        _write({"progress": value})


def _read(orders: queue.SimpleQueue[str], busy: threading.Event) -> None:
    with os.fdopen(os.dup(0)) as stdin:  # unlike sys.stdin, not closed while this may be reading
        for line in stdin:
            busy.set()
            orders.put(line)
    if busy.is_set():
        os._exit(1)
    orders.put("")


def _write(message: dict[str, Any]) -> None:
    assert _answers is not None
    _answers.write(json.dumps(message) + "\n")
    _answers.flush()


@contextmanager
def step_bars(steps: Mapping[str, int], console: Console) -> Iterator[Advance]:
    """Show progress for each name, with its number of steps; yield a function that advances one and shows a line.

    Its arguments: the name, the line, and the number of steps if not 1.
    """
    if not console.is_terminal:
        yield from _lines(steps, console)
        return
    wide = [BarColumn(10), TimeElapsedColumn()] if console.width >= _WIDE else []
    columns = (
        TextColumn("{task.fields[name]}", markup=False), MofNCompleteColumn(), *wide, TimeRemainingColumn(compact=True),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=console, speed_estimate_period=_SPEED_SECONDS) as bars, filtered_again():
        tasks = {name: bars.add_task("", total=total, name=name, start=False) for name, total in steps.items()}

        def step(name: str, line: str, steps: int = 1) -> None:
            if not bars.tasks[tasks[name]].started:
                bars.start_task(tasks[name])
            bars.update(tasks[name], advance=steps, description=line)

        yield step


def _lines(total: Mapping[str, int], console: Console) -> Iterator[Advance]:
    done, rhythms = dict.fromkeys(total, 0), {name: Rhythm(steps) for name, steps in total.items()}

    def step(name: str, line: str, steps: int = 1) -> None:
        done[name] += steps
        if rhythms[name].due(done[name]):
            console.print(f"{name}  {done[name]}/{total[name]}  {line}", markup=False, highlight=False, soft_wrap=True)

    yield step
