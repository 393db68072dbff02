"""What machines state about themselves and their links, and what is found wrong."""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from lowbit.config import NonNegative

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(gt=0, lt=1 << 16)]
Few = Annotated[int, Field(ge=0, le=4096)]  # others make lists of this length
Text = Annotated[str, AfterValidator(lambda text: text[:600])]
_Class = TypeVar("_Class")
# Versions may differ between machines: unknown keys are ignored.
_RULES = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StatementError(ConnectionError):
    """Another machine sent something invalid."""


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[_Class]) -> type[_Class]:
    """Make a class a message: frozen, keyword-only, and validated when it is read."""
    return typing.cast("type[_Class]", pydantic_dataclass(cls, frozen=True, kw_only=True, config=_RULES))


def read(cls: type[_Class], values: Any) -> _Class:
    """Build a message from values that another machine sent, and validate it.

    Raises:
        StatementError: an invalid value.
    """
    try:
        return TypeAdapter(cls).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "a message"
        raise StatementError(f"it sent an invalid value of {place} ({first['type']})") from None


@message
class Described:
    """The address and the interface by which a machine reaches the meeting."""

    name: Text
    lowbit: Text
    torch: Text
    python: Text
    device: Text
    cores: Few
    gpus: Few = 0
    memory_bytes: Number = 0.0
    address: Text
    interface: Text = ""


@message
class Facts(Described):
    """Facts that a machine collects about itself.

    Attributes:
        torch_problem: why this version does not work.
        gloo_*: where Gloo would listen under `lowbit train`, or why it would not; chosen: value of GLOO_SOCKET_IFNAME.
        meet_address: to what the meeting's name resolves on this machine.
        near: whether the meeting's address is in a network to which this machine is attached. vpn: whether its
            interface is a VPN's.
        machine: digest of the kernel that runs, the same in all containers of a machine; network: of its network.
        text: digest of the recipe's tokens. settings: digests of all settings that must be equal, by key.
        connections: `run.connections` of the recipe.
        ports: where it listens during the check, of the range that the system assigns (port_low to port_high).
    """

    torch_problem: Text = ""
    gloo_address: Text = ""
    gloo_interface: Text = ""
    gloo_problem: Text = ""
    chosen: Text = ""
    meet_address: Text = ""
    near: bool = True
    vpn: bool = False
    machine: Text = ""
    network: Text = ""
    firewall: Text = ""
    secret: bool = False
    recipe: Text = ""
    recipe_problem: Text = ""
    connections: Text = "auto"
    text: Text = ""
    settings: dict[str, str] = field(default_factory=dict)
    port_low: NonNegative = 32768
    port_high: NonNegative = 60999
    ports: Annotated[tuple[Port, ...], Field(max_length=64)] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which it may be reached: Gloo's, and the source address of packets to the meeting."""
        return tuple(dict.fromkeys(filter(None, (self.gloo_address, self.address))))


@message
class Speed:
    """How fast a machine computes and codes.

    Attributes:
        layer_seconds: forward and backward of a decoder layer, for `layer_tokens` tokens; 0: not measured.
        layer_overhead: the part of `layer_seconds` that does not depend on the size of the micro-batch.
        tflops: used without a recipe. coding: as in `cluster.toml`. problem: why something is missing.
        busy: cores that computed meanwhile, for whatever program; own: those of them that computed for this check.
    """

    layer_seconds: Number = 0.0
    layer_tokens: NonNegative = 0
    layer_overhead: Number = 0.0
    tflops: Number = 0.0
    optimizer_ns: Number = 0.0
    coding: tuple[str, ...] = ()
    busy: Number = 0.0
    own: Number = 0.0
    problem: Text = ""


@message
class ProbeResults:
    """Results of connecting to the ports of the other machines: machine, address, port, and state.

    Attributes:
        seen: source addresses of this machine's connections, as the others saw them.
    """

    states: tuple[tuple[int, Text, int, Text], ...]
    seen: tuple[Text, ...] = ()


@message
class Joined:
    """Whether a machine joined the process group. problem: why it did not."""

    problem: Text = ""


@message
class Measured:
    """Measurements of the link from this machine to another one.

    Attributes:
        ahead_ms: how far this machine's clock is ahead of the other one's.
        loss: share of TCP segments that were sent again; again: their number.
        control: congestion control of its connections, such as "cubic".
        better_mbit, better_loss: measured once more because segments were sent again, in another `way`: with BBR
            where all machines permit it, otherwise over several connections. permitted: whether this machine does.
    """

    mbit: Number = 0.0
    rtt_ms: Number = 0.0
    ahead_ms: float = 0.0
    loss: Share | None = None
    again: NonNegative = 0
    control: Text = ""
    better_mbit: Number = 0.0
    better_loss: Share = 0.0
    way: Text = ""
    permitted: bool = True


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that the user should know before the training starts.

    Attributes:
        level: "stop" if the training would not start, or would hang; "warning", "note".
        machine: where it is. what: the problem. fix: how to fix it.
    """

    level: str
    machine: str = ""
    what: str
    fix: str = ""
