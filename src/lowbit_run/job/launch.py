"""Start the ranks of a run as local processes, wait for them, and name the one that failed first; and be one (`work`).

A rank's order is a line on standard input, which stays open: when the launcher ends, it closes, and the rank ends, too.
A rank writes signs of life to a pipe twice a second.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Never

from lowbit.escape import Printable
from lowbit_run.config import ConfigError
from lowbit_run.job.exit_codes import FAILED, USAGE
from lowbit_run.job.output import end
from lowbit_run.job.stop import STOPPED, StopRequest, code_of, stop_requests

log = logging.getLogger(__name__)

PULSE = "LOWBIT_PULSE"
"""Environment variable with the file descriptor to which a rank writes signs of life."""

_PULSE_SECONDS = 0.5
_STARTUP_SECONDS = 30.0  # until the first sign of life: Python has to start


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """The program of each rank of a run: a module that calls `work`, and its order, a line of JSON.

    `timeout`: seconds without a sign of life after which a rank is killed. `threads`: unless OMP_NUM_THREADS is set.
    `grace`: seconds that ranks have to end by themselves after a signal.
    """

    module: str
    order: str
    timeout: float
    threads: int
    grace: float


class Process:
    """The process of a local rank, watched for signs of life; `environment` adds to this process's own."""

    def __init__(self, program: RankProgram, rank: int, environment: Mapping[str, str]) -> None:
        self.rank, self._silence, self._limit = rank, 0.0, program.timeout
        self.hung, self._heard = False, False
        self._pulse, theirs = os.pipe()
        os.set_blocking(self._pulse, False)
        defaults = {"OMP_NUM_THREADS": str(program.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}  # else 15 lines of C++
        self.process = subprocess.Popen(
            [sys.executable, "-m", program.module],
            env={**defaults, **os.environ, **environment, PULSE: str(theirs)},
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it once
            pass_fds=[theirs],
        )
        os.close(theirs)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has already ended; its exit code shows how
            self.process.stdin.write(program.order + "\n")
            self.process.stdin.flush()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def killed_or_stopped(self) -> bool:
        """Whether it was killed or hung, so that it could not report itself why it ended."""
        return self.hung or (self.code or 0) < 0

    @property
    def left_on_request(self) -> bool:
        """Whether a signal asked a rank to end, and all of them stopped together."""
        return self.code in STOPPED

    def listen(self, seconds: float) -> None:
        """Look for signs of life, `seconds` after the last look; kill a process that has given none for too long."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._pulse, 1 << 16):
                self._silence, self._heard = 0.0, True
                return
        self._silence += seconds
        limit = self._limit if self._heard else max(self._limit, _STARTUP_SECONDS)
        if self._silence > limit and self.code is None:
            self.hung = True
            self.process.kill()

    def outcome(self) -> str:
        if self.hung:
            return f"rank {self.rank} gave no sign of life for {self._limit:g} s and was killed"
        code = self.code or 0
        if code < 0:
            named = -code in signal.Signals.__members__.values()
            return f"rank {self.rank} was ended by {signal.Signals(-code).name if named else f'signal {-code}'}"
        if code in STOPPED:
            return f"rank {self.rank} was asked to stop"
        return f"rank {self.rank} ended with exit code {code}"

    def end(self, seconds: float) -> None:
        """Wait at most this long until it has ended by itself, kill it otherwise, and close its pipes."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._pulse)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


if TYPE_CHECKING:
    from lowbit_run.job.peers import Alarm  # imports PyTorch: slow for a command that starts no ranks

_ALARM_SECONDS = 7.0  # for the other ranks to read the alarm and end by themselves
_TERMINATE_SECONDS = 5.0
_TURN_SECONDS = 0.05
_LONGEST_TURN = 1.0  # seconds of a turn that count: if it took longer, this process was stopped meanwhile


class LaunchError(Printable, RuntimeError):
    """A local rank failed, or a signal asked for the end; the message names the first one, and how.

    `code`: its exit code; negative: the signal that ended it. `interrupted`: a signal asked this process or a rank to
    end; then `code` is 143 for SIGTERM, 130 for Ctrl-C.
    """

    def __init__(self, message: str, code: int = FAILED, *, interrupted: bool = False) -> None:
        super().__init__(message)
        self.code, self.interrupted = code, interrupted


def start_all(program: RankProgram, ranks: int, *, secret: str | None = None) -> None:
    """Run all ranks of a run on this machine until they are done.

    This process hosts their store, on the loopback interface and a port that the system chooses, so that it outlives
    all ranks, and gives them a secret (None: a new one), so that nobody else can take part.

    Raises:
        ConfigError: a rank refused its order. LaunchError: a rank failed, or a signal asked for the end. All have
            ended.
    """
    from lowbit.wire.checksum import ATTEMPT, SECRET
    from lowbit.wire.store import of_attempt
    from lowbit_run.job.peers import Alarm
    from lowbit_run.job.process_group import listen, new_secret

    secret = new_secret() if secret is None else secret
    store = listen("127.0.0.1", 0, timeout=60)
    attempt = secrets.token_hex(16)
    alarm = Alarm(of_attempt(store), secret.encode(), [attempt])
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", SECRET: secret,
        ATTEMPT: attempt,
    }  # fmt: skip
    processes = [Process(program, r, common | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(ranks)]
    _watch(processes, program.grace, alarm)


def start_one(program: RankProgram) -> None:
    """Run the rank that the environment names, or the only one, in its own process; LaunchError if it failed."""
    _watch([Process(program, int(os.environ.get("RANK", "0")), {})], program.grace)


def _watch(processes: list[Process], grace: float, alarm: "Alarm | None" = None) -> None:
    """Wait for all processes. LaunchError: one has failed or a signal has arrived, and all have ended.

    At the first signal, which they get, too, ranks may still stop together; a second one ends them at once.
    """
    forced = threading.Event()

    def asked(request: StopRequest) -> None:
        log.warning("%s: the ranks stop after this step; a second signal ends them at once", request.name)
        _terminate(processes)

    try:
        with stop_requests(grace + _TERMINATE_SECONDS, asked, lambda *_: forced.set()) as request:
            failed = _wait(processes, alarm, grace, forced)
    finally:
        _terminate(processes)
        deadline = time.monotonic() + _TERMINATE_SECONDS
        for process in processes:
            process.end(max(0.0, deadline - time.monotonic()))
    failed = failed or _first_failed(processes)  # some may have been ended only now
    if failed is None:
        return
    cause = None if failed.killed_or_stopped or alarm is None else alarm.read()[0]
    if cause:  # a rank that ends because of another may be seen first
        failed = next((p for p in processes if p.rank == cause.rank and p.code), failed)
    reason, code = cause.text if cause else failed.outcome(), failed.code or FAILED
    if cause and code == USAGE and not request.number:
        raise ConfigError(reason)
    if request.number:
        reason = f"interrupted by {request.name}{f'; {reason}' if failed.left_on_request else ''}"
        code = code_of(request.number)
    elif -code in STOPPED.values():  # of a rank that could not stop with the others yet: it had nothing to save
        code = code_of(-code)
    others = "; all ranks were ended" if len(processes) > 1 and not failed.left_on_request else ""
    raise LaunchError(reason + others, code, interrupted=code in STOPPED)


def _wait(processes: list[Process], alarm: "Alarm | None", grace: float, forced: threading.Event) -> Process | None:
    failed, deadline, last = None, float("inf"), time.monotonic()
    while any(p.code is None for p in processes) and time.monotonic() < deadline and not forced.is_set():
        now = time.monotonic()
        turn, last = min(now - last, _LONGEST_TURN), now
        for process in processes:
            process.listen(turn)
        if failed is None and (failed := _first_failed(processes)) is not None:
            if alarm is not None and failed.killed_or_stopped:  # a rank that fails by itself sounds the alarm
                from lowbit_run.job.peers import Cause

                alarm.sound(Cause(failed.rank, failed.outcome()))
            deadline = time.monotonic() + (grace if failed.left_on_request else _ALARM_SECONDS)
        time.sleep(_TURN_SECONDS)
    return _first_failed(processes) if failed is None else failed


def _first_failed(processes: list[Process]) -> Process | None:
    """Return a rank that failed, preferring one that was killed to one that gave up because of it."""
    bad = [process for process in processes if process.code]
    return min(bad, key=lambda process: not process.killed_or_stopped, default=None)


def _terminate(processes: list[Process]) -> None:
    for process in processes:
        if process.code is None:
            process.process.terminate()  # not SIGINT, which is lost or prints a traceback during imports


def work(do: Callable[[Any], object], exit_code: Callable[[Exception], int]) -> Never:
    """Execute the parsed order; after an error, print it on one line and exit with its exit code.

    Do slow imports in `do`, because the launcher waits for signs of life.
    """
    from lowbit_run.terminal import filtered

    filtered().__enter__()  # until the end of the process
    order = json.loads(sys.stdin.readline())
    for target in (_end_with_launcher, _pulse):
        threading.Thread(target=target, name=f"lowbit-{target.__name__[1:]}", daemon=True).start()
    try:
        do(order)
    except Exception as error:
        from lowbit.wire.agreement import stay

        code = exit_code(error)
        _report_failure(error, refused=code == USAGE)
        sys.stderr.flush()
        stay()  # keeps a store that this process hosts reachable for ranks that come late
        end(code)
    end(0)  # without destructors: a rank that is killed in them would be restarted, and wait for the others


def _report_failure(error: Exception, *, refused: bool) -> None:
    """Print which rank failed and why, with a traceback if the kind of error is unexpected, and sound the alarm.

    The alarm is for the launcher and other ranks, in case this rank failed before it watched them; the first counts.
    A refused order is left to a launcher to print, as all of its ranks refuse it; without one, other machines are told.
    """
    from lowbit.escape import one_line
    from lowbit.wire.errors import AgreementError, PeerError

    names_its_cause = isinstance(error, AgreementError | PeerError) or hasattr(error, "on_all_ranks")
    if not names_its_cause and not isinstance(error, ValueError | OSError):
        import traceback

        traceback.print_exception(error)
    text, rank = one_line(str(error)), int(os.environ.get("RANK", "0"))
    from lowbit.wire.checksum import run_secret, this_attempt
    from lowbit_run.job.peers import Alarm, Cause, launcher_keeps_store
    from lowbit_run.job.process_group import reach

    cause, sounded = Cause(rank, text if names_its_cause or refused else f"rank {rank}: {text}"), False
    if launcher_keeps_store():
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone, too
            Alarm(reach(rank, timeout=5, patience=5), run_secret(), [this_attempt()]).sound(cause)
            sounded = True
    if not (refused and sounded):
        with contextlib.suppress(OSError):
            sys.stderr.write(f"rank {rank}: error: {text}\n")
    if refused and "RANK" in os.environ and not getattr(error, "told", False):
        from lowbit_run.job.decline import tell

        tell(text)


def _pulse() -> None:
    if PULSE not in os.environ:
        return
    with contextlib.suppress(OSError):
        while True:
            os.write(int(os.environ[PULSE]), b".")
            time.sleep(_PULSE_SECONDS)


def _end_with_launcher() -> None:
    sys.stdin.read()
    end(FAILED)
