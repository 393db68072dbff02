"""Settings of `lowbit doctor`."""

import os
import socket
from typing import Annotated

from pydantic import Field

from lowbit.codecs import parse
from lowbit_run.config import ConfigError, section

PORT = 29400
MOST_MACHINES = 32
ONLY_IPV4 = "allowed: an IPv4 address, since Gloo listens at those; a VPN over IPv6 has one for each machine"
Seconds = Annotated[float, Field(gt=0, le=3600)]


@section()
class DoctorSettings:
    """Where the machines meet, and what they measure."""

    recipe: str = ""
    """Configuration of `lowbit train`: its settings and its text are compared, and its model is measured."""
    meet: str = ""
    """Address of the first machine, where the others reach it, and a port that it listens at, such as
    192.168.1.10:29400. If omitted, those of MASTER_ADDR and MASTER_PORT."""
    machines: Annotated[int, Field(ge=0, le=MOST_MACHINES)] = 0
    """Number of machines. 0: WORLD_SIZE of the environment, or 2."""
    name: str = ""
    """Name of this machine in the report. If omitted, its host name."""
    output: str = "cluster.toml"
    """File for the machines and links, which `lowbit plan pipeline` reads. The first machine writes it. Empty: none."""
    overwrite: bool = False
    """Replace `output` even if somebody has changed it."""
    formats: tuple[str, ...] = ()
    """Formats whose coding speed is measured. If omitted, those of the recipe."""
    wait: Seconds = 120.0
    """Seconds to wait for the other machines."""
    seconds: Annotated[float, Field(ge=0.2, le=60)] = 1.0
    """Least seconds for each direction of each link. Distant links take 100 round trips, but at most 6 s."""

    def __post_init__(self) -> None:
        for text in self.formats:
            parse(text)

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the meeting. Raises ConfigError: neither `meet` nor the environment gives one."""
        if self.meet:
            host, _, port = self.meet.rpartition(":")
            if not host or self.meet.endswith("]") or ("]" not in self.meet and ":" in host):
                host, port = self.meet, str(PORT)
        else:
            host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", str(PORT))
        if ":" in host:
            raise ConfigError(f"meet is {self.meet or host!r}, an IPv6 address; {ONLY_IPV4}")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(
                f"meet is {self.meet or host!r}; allowed: the address of the first machine and a port, such as "
                "192.168.1.10:29400"
            )
        return host, int(port)

    @property
    def where(self) -> str:
        """Place of the meeting, as a text."""
        return ":".join(map(str, self.place))

    @property
    def count(self) -> int:
        """Number of machines. Raises ConfigError: WORLD_SIZE is not a valid number of machines."""
        text = str(self.machines or os.environ.get("WORLD_SIZE") or 2)
        if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_MACHINES):
            raise ConfigError(f"WORLD_SIZE is {text!r}; allowed: 1 to {MOST_MACHINES} machines")
        return int(text)


def check_place(settings: DoctorSettings) -> None:
    """Check where and how many machines meet. Raises ConfigError: that is invalid, unknown here or only IPv6."""
    try:
        _ = settings.count
        host, port = settings.place
    except ConfigError as error:
        from lowbit_run.job.process_group import interfaces

        here = ", ".join(f"{address} ({name})" for name, address in interfaces().items() if address != "127.0.0.1")
        raise ConfigError(f"{error}; this machine has {here or 'no address'}") from None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"meet is {settings.where!r}: {error.strerror or error}; allowed: an address or a name that is known here"
        ) from None
    if socket.AF_INET not in [family for family, *_ in found]:
        raise ConfigError(f"meet is {settings.where!r}, which has only the IPv6 address {found[0][4][0]}; {ONLY_IPV4}")
