"""Network namespaces without a name, each kept by one process, and the cables between them."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

INTERFACE = "eth0"
NETWORK = "198.18.0"  # 198.18.0.0/15 is set aside for network benchmarks (RFC 2544)
_KEEPER = str(Path(__file__).with_name("keeper.py"))
_CONGESTION_CONTROL = ("cubic", "reno")  # the first that the kernel permits


class LinkUnavailable(RuntimeError):
    """This machine does not let us make a shaped link; the message says why."""


class Namespace:
    """One network namespace, kept by one process.

    Args:
        unshare: The command that makes the namespace and runs what follows it there.
        enter: The options of ``nsenter`` beside the process and ``--net``.
    """

    def __init__(self, unshare: Sequence[str], enter: Sequence[str]) -> None:
        self.keeper = subprocess.Popen(
            [*unshare, sys.executable, "-I", "-S", _KEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the owner's business
        )
        assert self.keeper.stdout is not None
        assert self.keeper.stderr is not None
        if self.keeper.stdout.readline() != "ready\n":
            reason = self.keeper.stderr.read().strip()
            self.close()
            raise LinkUnavailable(f"a network namespace is not permitted ({reason})")
        self.pid = self.keeper.pid
        self.enter = ["nsenter", f"--target={self.pid}", *enter, "--net", "--"]
        self.kinds = ("user", "net") if enter else ("net",)

    def close(self) -> None:
        """Let the keeper empty the namespace and leave."""
        self.keeper.communicate()  # closes its standard input

    def ip(self, *commands: str) -> None:
        """Run ``ip`` commands inside."""
        self.run(["ip", "-batch", "-"], "\n".join(commands) + "\n")

    def settle_congestion_control(self) -> None:
        """Take the usual one, whatever this machine has: BBR, for one, guesses a link's rate anew after every pause."""
        for name in _CONGESTION_CONTROL:
            with contextlib.suppress(LinkUnavailable):
                self.run(["tee", "/proc/sys/net/ipv4/tcp_congestion_control"], name)
                if name != _CONGESTION_CONTROL[0]:
                    log.info("links use %s: %s is not permitted here", name, _CONGESTION_CONTROL[0])
                return
        log.warning("links have this machine's TCP congestion control: %s are not permitted", _CONGESTION_CONTROL)

    def run(self, argv: Sequence[str], text: str = "") -> None:
        """Run a program inside that takes a moment, with a text as its standard input."""
        command = [*self.enter, *argv]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LinkUnavailable(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")


def cable(first: Namespace, interface: str, second: Namespace) -> None:
    """A veth pair from ``interface`` in the first namespace to the interface of the second."""
    first.ip(f"link add {interface} type veth peer name {INTERFACE} netns {second.pid}")


def open_namespaces(count: int) -> list[Namespace]:
    """Make namespaces, as root or, failing that, inside one new user namespace."""
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
    """Make all the namespaces in one of the two ways, or none."""
    opened: list[Namespace] = []
    unshare, enter = ["unshare", "--net"], []
    if not privileged:
        unshare = ["unshare", "--user", "--map-root-user", "--net"]
        enter = ["--user", "--preserve-credentials"]
    try:
        for _ in range(count):
            opened.append(Namespace(unshare, enter))
            if not privileged:  # the others join the user namespace of the first
                unshare = ["nsenter", f"--target={opened[0].pid}", *enter, "--", "unshare", "--net"]
            # Some systems grant the namespace but no rights in it: find out here.
            opened[-1].ip("link set lo up")
    except BaseException:
        for namespace in opened:
            namespace.close()
        raise
    return opened
