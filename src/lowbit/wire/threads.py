"""Let threads inside PyTorch come to rest before the interpreter ends.

Up to Python 3.13, a thread that asks for the interpreter's lock once the interpreter has begun to end is unwound, which
inside PyTorch calls `std::terminate`: a process that has done its work aborts with "terminate called without an active
exception". Gloo's own threads ask for the lock, too, to release the tensors of a collective that is over.

Exit functions run in the reverse order of their registration, so this one follows those that end the threads of
`collectives` and of `mailbox`.
"""

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread

_EXIT_SECONDS = 5.0  # most seconds to wait for them: a call of a store that does not answer never returns
_PAUSE = 0.005
_HOLD_TENSORS = tuple(f"Name:\t{name}" for name in ("pt_gloo_runloop", "pt_autograd", "pt_nccl"))
_running: weakref.WeakSet[Thread] = weakref.WeakSet()


def start(work: Callable[[], None], name: str) -> Thread:
    """Start a thread that ends by itself, and that may be inside PyTorch; a process waits for it when it ends."""
    thread = Thread(target=work, name=f"lowbit-{name}", daemon=True)
    _running.add(thread)
    thread.start()
    return thread


@atexit.register
def _rest() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
    # A thread that waits for the lock sleeps like an idle one, but gets the lock, and runs, while this one pauses.
    before, now = "", _states()
    while (now != before or "State:" in now.replace("State:\tS", "")) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        before, now = now, _states()


def _states() -> str:
    """Return states and context switches of PyTorch's threads that hold tensors; empty if there are none."""
    texts = []
    for task in Path("/proc/self/task").glob("*/status"):  # Linux only
        with contextlib.suppress(OSError):  # it has ended
            text = task.read_text(errors="replace")
            if text.startswith(_HOLD_TENSORS):
                texts += [line for line in text.splitlines() if line.startswith("State:") or "ctxt_switches:" in line]
    return "\n".join(texts)
