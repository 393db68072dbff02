"""Start a run: as one of torchrun's ranks, alone in this process, or as several local processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType

from lowbit.train.config import TrainConfig
from lowbit.train.summary import Summary, read_summary

CAUSE = "lowbit/cause"
"""Where, in the store that the launcher keeps, the first rank that fails says why."""

_LAST_WORDS_SECONDS = 15.0  # for the other ranks to find out who failed, and say so
_TERMINATE_SECONDS = 5.0


class LaunchError(RuntimeError):
    """A local rank failed; the message says which one first, and how."""


def run(config: TrainConfig) -> Summary:
    """Train as the configuration and the environment ask for.

    Under torchrun (RANK and its kind are set) this process is one rank of the run. Otherwise `config.ranks` processes
    are started on this machine; with one rank this process trains by itself.

    Raises:
        ConfigError: what can not work, before any process starts.
        LaunchError: a local rank failed; all others have been ended.
        AgreementError, PeerError, DivergedError: as `lowbit.train.train`, where this process is a rank.
    """
    if "RANK" in os.environ or config.ranks == 1:
        from lowbit.train.loop import train

        return train(config)
    from lowbit.train.prepare import prepare

    prepare(config, ranks=config.ranks)
    start_ranks(config)
    return read_summary(Path(config.run.output) / "summary.json")


def start_ranks(config: TrainConfig) -> None:
    """Run `config.ranks` processes on this machine until all are done.

    This process keeps the store that they meet in, so that no port has to be guessed and the store outlives them all.
    Signals that would end this process are passed on to them.

    Raises:
        LaunchError: one of them failed; none is left.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    ranks = [_start(config, rank, store.port) for rank in range(config.ranks)]
    try:
        with _signals_passed_to(ranks) as passed:
            failed = _wait(ranks)
    finally:
        _stop(ranks)
    if failed is not None:
        cause = store.get(CAUSE).decode() if store.check([CAUSE]) else ""
        if passed:
            cause = f"interrupted by {passed[0].name}"
        raise LaunchError(_describe(failed, ranks[failed].returncode, cause, config))


def _start(config: TrainConfig, rank: int, port: int) -> subprocess.Popen[str]:
    from lowbit.train.loop import threads_per_rank

    ranks = config.ranks
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    environment.setdefault("OMP_NUM_THREADS", str(config.run.threads or threads_per_rank(ranks)))
    process = subprocess.Popen(
        [sys.executable, "-m", "lowbit.train.worker"],
        env=environment,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process only, which passes it on once
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(json.loads(config.to_json())) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it is gone already: waiting for it will tell
    return process


def _wait(ranks: list[subprocess.Popen[str]]) -> int | None:
    """Wait for all; the first rank that fails starts the clock for the others. Returns that rank."""
    failed, deadline = None, float("inf")
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if failed is None:
            failed = _first_failed(ranks)
            deadline = float("inf") if failed is None else time.monotonic() + _LAST_WORDS_SECONDS
        time.sleep(0.05)
    return _first_failed(ranks) if failed is None else failed


def _first_failed(ranks: list[subprocess.Popen[str]]) -> int | None:
    """A rank that ended badly; one that was killed rather than one that gave up because of it."""
    codes = {rank: process.poll() for rank, process in enumerate(ranks)}
    bad = [rank for rank, code in codes.items() if code]
    return min(bad, key=lambda rank: codes[rank] > 0, default=None)  # pyright: ignore[reportOptionalOperand]


def _stop(ranks: list[subprocess.Popen[str]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _TERMINATE_SECONDS
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


@contextmanager
def _signals_passed_to(ranks: list[subprocess.Popen[str]]) -> Iterator[list[signal.Signals]]:
    """Pass SIGINT and SIGTERM on; the ranks end, and this process sees them end. Gives a list of those that came."""
    passed: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield passed
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed.append(signal.Signals(number))
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(rank: int, code: int, cause: str, config: TrainConfig) -> str:
    """The first failure in one line: the signal that killed a rank, or what the ranks found out themselves."""
    what = cause or f"rank {rank} ended with exit code {code}"
    if code < 0 and not cause.startswith("interrupted"):
        what = f"rank {rank} was ended by {signal.Signals(-code).name}"
    latest = Path(config.run.output) / "checkpoints" / "latest"
    advice = ""
    if latest.exists():
        advice = f"; run.resume=true goes on from {latest.read_text(encoding='utf-8')}"
    return f"{what}; all ranks were ended{advice}"
