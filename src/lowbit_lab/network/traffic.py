"""Other traffic that shares a link: a program on each host (`probe.py share`) sends to the next host."""

from pathlib import Path

from lowbit_lab.network.namespaces import Helper, LinkUnavailable, Namespace

_PROGRAM = str(Path(__file__).with_name("probe.py"))


class Traffic(Helper):
    """Sends to another host as fast as it can, and receives what others send.

    Args:
        host: where it is. address: of this host. peer: address to send to. count: connections.
    """

    def __init__(self, host: Namespace, address: str, peer: str, count: int) -> None:
        self.count = count
        super().__init__("the other traffic", [_PROGRAM, "share", address, peer, str(count)], within=host.enter)

    def await_connections(self) -> None:
        """Return once its connections are open.

        Raises:
            LinkUnavailable: they cannot be opened.
        """
        if problem := self._problem("ok"):
            raise LinkUnavailable(f"no other traffic: {problem.splitlines()[-1]}")

    def check(self) -> None:
        """Raise LinkUnavailable if it has ended."""
        if self._process.poll() is not None:
            raise LinkUnavailable(f"the other traffic ended, with exit code {self._process.returncode}")
