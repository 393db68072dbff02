"""One rank, started by `lowbit.job.launch`: its order comes on standard input, which stays open.

When the launcher ends, for whatever reason, standard input closes and the rank ends too. The rank gives a sign of life
on a pipe of its own twice a second, so that the launcher notices one that hangs.
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

from lowbit.job.process import FAILED, PULSE

_PULSE_SECONDS = 0.5


def work(do: Callable[[Any], object], exit_code: Callable[[Exception], int]) -> Never:
    """Execute the order, or print one line of error and exit with the code of its kind.

    Args:
        do: called with the parsed order. Imports that take long belong there: the launcher waits for signs of life.
        exit_code: of an error (`lowbit.job.process`).
    """
    from lowbit.terminal import filtered

    filtered().__enter__()  # until the end of the process
    order = json.loads(sys.stdin.readline())
    for target in (_end_with_launcher, _pulse):
        threading.Thread(target=target, name=f"lowbit-{target.__name__[1:]}", daemon=True).start()
    try:
        do(order)
    except Exception as error:
        _complain(error)
        _stay()
        _end(exit_code(error))
    _end(0)  # without destructors: a rank that is killed in them would be started again, and wait for the others


def _complain(error: Exception) -> None:
    """Print which rank failed, and why, with a traceback for an unexpected kind of error, and sound the alarm."""
    from lowbit.wire.errors import AgreementError, PeerError

    names_its_cause = isinstance(error, AgreementError | PeerError) or hasattr(error, "on_all_ranks")
    if not names_its_cause and not isinstance(error, ValueError | OSError):
        import traceback

        traceback.print_exception(error)
    from lowbit.terminal import one_line

    text, rank = one_line(str(error)), int(os.environ.get("RANK", "0"))
    with contextlib.suppress(OSError):
        sys.stderr.write(f"rank {rank}: error: {text}\n")
    _sound_alarm(rank, text if names_its_cause else f"rank {rank}: {text}")


def _sound_alarm(rank: int, text: str) -> None:
    """Tell the launcher and the other ranks, if this rank failed before it watched them; the first cause counts."""
    from lowbit.job.meeting import launcher_keeps_store, reach
    from lowbit.job.peers import Alarm, Cause
    from lowbit.wire.checksum import run_secret, this_attempt

    if not launcher_keeps_store():
        return
    with contextlib.suppress(RuntimeError, OSError):  # it is gone, too
        Alarm(reach(rank, timeout=5, patience=5), run_secret(), [this_attempt()]).sound(Cause(rank, text))


def _stay() -> None:
    """Keep a store that is in this process reachable for ranks that come late."""
    from lowbit.wire.agreement import stay

    sys.stderr.flush()
    stay()


def _end(code: int) -> Never:
    """Exit at once: destructors of a broken process group can wait for peers that are gone."""
    with contextlib.suppress(OSError):  # nobody reads any more, such as a launcher that was killed
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
