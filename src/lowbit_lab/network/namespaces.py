"""Network namespaces without names, each kept alive by one process, and the cables between them.

That process runs this file, inside a fresh namespace and with the standard library only. The namespace has no file, so
it lives exactly as long as the process and those that were started in it. When the owner closes the process's standard
input, as the kernel does for an owner that was killed, the process kills everything that still runs in the namespace,
and ends. Nothing is left.
"""

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

INTERFACE = "eth0"
NETWORK = "198.18.0"  # 198.18.0.0/15 is set aside for network benchmarks (RFC 2544)
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_SECONDS_TO_ANSWER = 30.0
_POLL_SECONDS = 0.5
_SECONDS_TO_EMPTY = 5.0


class LinkUnavailable(RuntimeError):
    """This machine does not permit a shaped link; the message states the reason."""


class Helper:
    """A process that answers on its standard output, a line at a time, and ends with its standard input.

    Args:
        title: its name in errors.
        argv: arguments of Python, with a program that needs the standard library only.
        within: the command that runs the program in a namespace.
    """

    def __init__(self, title: str, argv: Sequence[str], *, within: Sequence[str]) -> None:
        self._title = title
        self._process = subprocess.Popen(
            [*within, sys.executable, "-I", "-S", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # the owner handles Ctrl-C
        )
        self.pid = self._process.pid

    def close(self) -> None:
        """Close its input, and wait until it has ended. A second call does nothing."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_SECONDS_TO_ANSWER)
        self._process.kill()
        self._process.wait()

    def _problem(self, expected: str) -> str:
        """Wait for a line; return the process's error output, or "" if the line is the expected one.

        Raises:
            LinkUnavailable: no line came.
        """
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if not select.select([self._process.stdout], [], [], _SECONDS_TO_ANSWER)[0]:
            raise LinkUnavailable(f"{self._title} did not answer within {_SECONDS_TO_ANSWER:g} s")
        if self._process.stdout.readline() == expected + "\n":
            return ""
        return self._process.stderr.read().strip() or "it ended without a message"


class Namespace(Helper):
    """One network namespace, kept by one process (`keep`).

    Args:
        unshare: the command that makes the namespace and runs the keeper there.
        enter: options of ``nsenter`` in addition to the process and ``--net``.
    """

    def __init__(self, unshare: Sequence[str], enter: Sequence[str]) -> None:
        super().__init__("the process that keeps a network namespace", [__file__], within=unshare)
        try:
            if problem := self._problem("ready"):
                raise LinkUnavailable(f"a network namespace is not permitted ({problem})")
        except BaseException:
            self.close()
            raise
        self.enter = ["nsenter", f"--target={self.pid}", *enter, "--net", "--"]
        self.kinds = ("user", "net") if enter else ("net",)

    def ip(self, *commands: str) -> None:
        """Run ``ip`` commands inside the namespace."""
        self.run(["ip", "-batch", "-"], "\n".join(commands) + "\n")

    def check_congestion_control(self, name: str) -> None:
        """Raise LinkUnavailable unless the kernel has this congestion control."""
        available = AVAILABLE.read_text().split()
        if name not in available:
            raise LinkUnavailable(
                f"congestion control {name!r} is not available here; allowed: {', '.join(sorted(available))}, and "
                f"others once their kernel modules are loaded (sudo modprobe tcp_{name})"
            )

    def run(self, argv: Sequence[str], text: str = "") -> None:
        """Run a short program inside the namespace, with a text as its standard input.

        Raises:
            LinkUnavailable: the program failed, or did not end in time.
        """
        options = {"capture_output": True, "text": True, "timeout": _SECONDS_TO_ANSWER, "check": True}
        try:
            subprocess.run([*self.enter, *argv], input=text, **options)
        except subprocess.TimeoutExpired:
            raise LinkUnavailable(f"`{' '.join(argv)}` did not end within {_SECONDS_TO_ANSWER:g} s") from None
        except subprocess.CalledProcessError as error:
            raise LinkUnavailable(f"`{' '.join(argv)}` failed: {error.stderr.strip()}") from None


def cable(first: Namespace, interface: str, second: Namespace) -> None:
    """Make a veth pair from ``interface`` in the first namespace to the interface of the second."""
    first.ip(f"link add {interface} type veth peer name {INTERFACE} netns {second.pid}")


def open_namespaces(count: int) -> list[Namespace]:
    """Make namespaces, as root or, failing that, inside one new user namespace.

    Raises:
        LinkUnavailable: neither is permitted.
    """
    for program in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(program) is None:
            raise LinkUnavailable(f"no `{program}` on this machine (packages iproute2, util-linux)")
    reason = "not root"
    if os.geteuid() == 0:
        try:
            return _open_all(count, privileged=True)
        except LinkUnavailable as error:
            reason = str(error)
    try:
        return _open_all(count, privileged=False)
    except LinkUnavailable as error:
        raise LinkUnavailable(
            f"no shaped link: {reason}, and without root: {error}. Run as root, or allow user namespaces."
        ) from None


def _open_all(count: int, *, privileged: bool) -> list[Namespace]:
    """Make all namespaces in one of the two ways, or none."""
    opened: list[Namespace] = []
    unshare, enter = ["unshare", "--net"], []
    if not privileged:
        unshare = ["unshare", "--user", "--map-root-user", "--net"]
        enter = ["--user", "--preserve-credentials"]
    try:
        for _ in range(count):
            opened.append(Namespace(unshare, enter))
            if not privileged:  # all others join the first one's user namespace
                unshare = ["nsenter", f"--target={opened[0].pid}", *enter, "--", "unshare", "--net"]
            # Some systems grant the namespace but no rights in it, which this command detects.
            opened[-1].ip("link set lo up")
    except BaseException:
        for namespace in opened:
            namespace.close()
        raise
    return opened


def keep() -> None:
    """Print ``ready``, wait for the owner's end, and kill all other processes of this network namespace."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # only the owner's end ends this program
    print("ready", flush=True)
    owner = os.getppid()
    # A child of the owner may hold the pipe open after the owner's death, so we also check our parent.
    while os.getppid() == owner:
        readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
        if readable and not os.read(0, 1):
            break
    deadline = time.monotonic() + _SECONDS_TO_EMPTY
    while (running := _inhabitants()) and time.monotonic() < deadline:  # repeated, since they may be forking
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _inhabitants() -> list[int]:
    """Return the ids of all other processes in this network namespace."""
    own, pids = os.readlink("/proc/self/ns/net"), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
                if os.readlink(f"/proc/{name}/ns/net") == own:
                    pids.append(int(name))
    return pids


if __name__ == "__main__":
    keep()
