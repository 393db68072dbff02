"""One rank, started by `lowbit.job.launch`: its order is a line on standard input, which stays open.

When the launcher ends, standard input closes and the rank ends, too. It writes signs of life to a pipe twice a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Never

from lowbit.job.launch import PULSE
from lowbit.job.output import FAILED

_PULSE_SECONDS = 0.5


def work(do: Callable[[Any], object], exit_code: Callable[[Exception], int]) -> Never:
    """Execute the parsed order; after an error, print it on one line and exit with its exit code.

    Do slow imports in `do`, because the launcher waits for signs of life.
    """
    from lowbit.terminal import filtered

    filtered().__enter__()  # until the end of the process
    order = json.loads(sys.stdin.readline())
    for target in (_end_with_launcher, _pulse):
        threading.Thread(target=target, name=f"lowbit-{target.__name__[1:]}", daemon=True).start()
    try:
        do(order)
    except Exception as error:
        from lowbit.wire.agreement import stay

        _report_failure(error)
        sys.stderr.flush()
        stay()  # keeps a store that this process hosts reachable for ranks that come late
        _end(exit_code(error))
    _end(0)  # without destructors: a rank that is killed in them would be restarted, and wait for the others


def _report_failure(error: Exception) -> None:
    """Print which rank failed and why, with a traceback if the kind of error is unexpected, and sound the alarm.

    The alarm is for the launcher and other ranks, in case this rank failed before it watched them; the first counts.
    """
    from lowbit.terminal import one_line
    from lowbit.wire.errors import AgreementError, PeerError

    names_its_cause = isinstance(error, AgreementError | PeerError) or hasattr(error, "on_all_ranks")
    if not names_its_cause and not isinstance(error, ValueError | OSError):
        import traceback

        traceback.print_exception(error)
    text, rank = one_line(str(error)), int(os.environ.get("RANK", "0"))
    with contextlib.suppress(OSError):
        sys.stderr.write(f"rank {rank}: error: {text}\n")
    from lowbit.job.peers import Alarm, Cause, launcher_keeps_store
    from lowbit.job.process_group import reach
    from lowbit.wire.checksum import run_secret, this_attempt

    cause = Cause(rank, text if names_its_cause else f"rank {rank}: {text}")
    if launcher_keeps_store():
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone, too
            Alarm(reach(rank, timeout=5, patience=5), run_secret(), [this_attempt()]).sound(cause)


def _end(code: int) -> Never:
    """Exit at once: destructors of a broken process group can wait for peers that are gone."""
    with contextlib.suppress(OSError):  # the reader is gone, such as a launcher that was killed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _pulse() -> None:
    if PULSE not in os.environ:
        return
    with contextlib.suppress(OSError):
        while True:
            os.write(int(os.environ[PULSE]), b".")
            time.sleep(_PULSE_SECONDS)


def _end_with_launcher() -> None:
    sys.stdin.read()
    _end(FAILED)
