"""Keeps one network namespace alive, and empties it when its owner is gone.

It runs as a program inside a fresh namespace, with the standard library only: ``python keeper.py``. The namespace has
no name and no file, so it lives exactly as long as this process and the processes that were started in it. When the
owner closes this program's standard input, as the kernel does for an owner that was killed, the program kills
everything that still runs in the namespace, and ends. Nothing is left.
"""

import contextlib
import os
import select
import signal
import time

_POLL_SECONDS = 0.5


def wait_for_owner() -> None:
    """Return when the owner closes our standard input or is no longer our parent."""
    owner = os.getppid()
    # A child of the owner may hold the pipe open after the owner's death, so we also check our parent.
    while os.getppid() == owner:
        readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
        if readable and not os.read(0, 1):
            return


def inhabitants() -> list[int]:
    """Return the ids of all other processes in this network namespace."""
    own, pids = os.readlink("/proc/self/ns/net"), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
                if os.readlink(f"/proc/{name}/ns/net") == own:
                    pids.append(int(name))
    return pids


def empty_namespace(seconds: float = 5.0) -> None:
    """Kill all other processes of the namespace until none is left, since they may be forking."""
    deadline = time.monotonic() + seconds
    while (running := inhabitants()) and time.monotonic() < deadline:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def main() -> None:
    """Print ``ready``, wait for the owner's end, and clean up."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # only the owner's end ends this program
    print("ready", flush=True)
    wait_for_owner()
    empty_namespace()


if __name__ == "__main__":
    main()
