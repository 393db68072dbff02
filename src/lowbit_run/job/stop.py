"""Stop a run when it is asked to: SIGTERM or the first Ctrl-C asks for it, a second signal or the grace time forces it.

Python runs its own handlers once the main thread leaves the call that it is in, such as a wait for a peer. So a thread
reads the signals as they arrive.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Never

from lowbit_run.job.output import end

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AS_ONE_SECONDS = 1.0
"""Signals of this time are one: a batch system signals all processes, and launchers pass on what they got."""


def code_of(number: int) -> int:
    """Return the exit code that shells and schedulers know as the end by this signal: 130 for Ctrl-C, 143 for SIGTERM.

    Restarts would undo what was asked for: no supervisor of ours follows these codes with another attempt.
    """
    return 128 + number


STOPPED = {code_of(number): number for number in _SIGNALS}
"""The signals by the exit codes of processes that stopped because of them."""


class StoppedError(RuntimeError):
    """A signal asked a rank to end, and all ranks stopped after the same step; `code`: the exit code for it."""

    on_all_ranks = True
    interrupted = True

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = code_of(number)


class StopRequest:
    """Signals that asked this process to end: `number` of the first one, 0 before it."""

    number = 0

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


@contextlib.contextmanager
def stop_requests(
    grace: float, asked: Callable[[StopRequest], None], forced: Callable[[int, str], None]
) -> Iterator[StopRequest]:
    """Note SIGTERM and Ctrl-C in this block, in place of what they do by default.

    Handlers that the program has set stay, and ignored signals stay ignored. Only a main thread can note signals.

    Args:
        grace: seconds from the first signal after which the end is forced.
        asked: called on another thread at the first signal. forced: called there at the second one or after the grace
            time, with the number of the signal and a reason.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    default = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in _SIGNALS if signal.getsignal(number) in default}
    exit_, entry = os.pipe()
    os.set_blocking(entry, False)
    earlier = signal.set_wakeup_fd(entry, warn_on_full_buffer=False)
    arguments = (exit_, earlier, set(before), request, grace, asked, forced)
    watch = threading.Thread(target=_watch, args=arguments, name="lowbit-signals", daemon=True)
    for number in before:
        signal.signal(number, lambda number, frame: None)
    watch.start()
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier)
        os.close(entry)
        watch.join()
        os.close(exit_)


def _watch(
    exit_: int,
    earlier: int,
    numbers: set[int],
    request: StopRequest,
    grace: float,
    asked: Callable[[StopRequest], None],
    forced: Callable[[int, str], None],
) -> None:
    """Read numbers of signals until the pipe is closed, or the end was forced; pass others on, as to an event loop."""
    begin = time.monotonic()
    while True:
        left = max(0.0, begin + grace - time.monotonic()) if request.number else None
        if not select.select([exit_], [], [], left)[0]:
            return forced(request.number, f"it did not end within {grace:g} s of {request.name}")
        if not (piece := os.read(exit_, 1)):
            return None
        if piece[0] not in numbers:
            with contextlib.suppress(OSError):  # there may be none
                os.write(earlier, piece)
            continue
        if not request.number:
            begin, request.number = time.monotonic(), piece[0]
            asked(request)
        elif time.monotonic() - begin > _AS_ONE_SECONDS:
            return forced(request.number, f"it got {signal.Signals(piece[0]).name} after {request.name}")


def end_rank(number: int, reason: str) -> Never:
    """End this process at once, and say why."""
    with contextlib.suppress(OSError):
        os.write(2, f"rank {os.environ.get('RANK', '0')}: error: ended at once: {reason}\n".encode())
    end(code_of(number))
