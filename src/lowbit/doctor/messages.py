"""What machines state about themselves, and the rows of the page that all of them print."""

from __future__ import annotations

import json
import typing
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from lowbit.config import NonNegative

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=0)]
Text = Annotated[str, AfterValidator(lambda text: text[:600])]
_Class = TypeVar("_Class")
# Versions may differ between machines: unknown keys are ignored.
_RULES = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StatementError(ConnectionError):
    """Another machine stated something invalid."""


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[_Class]) -> type[_Class]:
    """Make a class a message: frozen, keyword-only, and checked where it is read."""
    return typing.cast("type[_Class]", pydantic_dataclass(cls, frozen=True, kw_only=True, config=_RULES))


def read(cls: type[_Class], values: Any) -> _Class:
    """A message from another machine's values.

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
    """address, interface: that lead to the meeting."""

    name: Text
    lowbit: Text
    torch: Text
    python: Text
    device: Text
    cores: NonNegative
    gpus: NonNegative = 0
    memory_bytes: Number = 0.0
    address: Text
    interface: Text = ""


@message
class Facts(Described):
    """What a machine knows about itself.

    Attributes:
        torch_problem: why this version does not work.
        gloo_*: where Gloo would listen under `lowbit train`, or why it would not; chosen: GLOO_SOCKET_IFNAME.
        host_address: where the host's name leads on this machine. meet_address: where the meeting's name leads.
        text: digest of the recipe's tokens. settings: digests of all settings that must be equal, by key.
        ports: where it listens for the check, among those that the system gives to programs (port_low to port_high).
    """

    torch_problem: Text = ""
    gloo_address: Text = ""
    gloo_interface: Text = ""
    gloo_problem: Text = ""
    chosen: Text = ""
    host_address: Text = ""
    meet_address: Text = ""
    firewall: Text = ""
    secret: bool = False
    recipe: Text = ""
    recipe_problem: Text = ""
    text: Text = ""
    settings: dict[str, str] = field(default_factory=dict)
    port_low: NonNegative = 32768
    port_high: NonNegative = 60999
    ports: tuple[NonNegative, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it may be reached: where Gloo would listen, and where packets leave to the meeting."""
        return tuple(dict.fromkeys(filter(None, (self.gloo_address, self.address))))


@message
class Speed:
    """How fast a machine computes and codes.

    Attributes:
        layer_seconds: forward and backward of a decoder layer, for `layer_tokens` tokens; 0: not measured.
        layer_overhead: the part of it that a micro-batch of any size takes.
        tflops: instead of it, without a recipe. coding: as `cluster.toml` has it. problem: why something is missing.
    """

    layer_seconds: Number = 0.0
    layer_tokens: NonNegative = 0
    layer_overhead: Number = 0.0
    tflops: Number = 0.0
    optimizer_ns: Number = 0.0
    coding: tuple[str, ...] = ()
    problem: Text = ""


@message
class ProbeResults:
    """What connecting to the ports of the others gave: machine, address, port, and state.

    Attributes:
        seen: the addresses that this machine's connections came from, as the others saw them.
    """

    states: tuple[tuple[int, Text, int, Text], ...]
    seen: tuple[Text, ...] = ()


@message
class Joined:
    """Whether a machine joined the process group. problem: why it did not."""

    problem: Text = ""


@message
class Measured:
    """What a machine measured of its link to another one, as the sender.

    Attributes:
        ahead_ms: how far this machine's clock is ahead of the other one's. loss: share of segments sent again.
    """

    mbit: Number = 0.0
    rtt_ms: Number = 0.0
    ahead_ms: float = 0.0
    loss: Share | None = None


@message
class Finding:
    """Something to know before the training.

    Attributes:
        level: stop: the training would not start, or would hang.
        machine: where. what: is wrong. mend: how to fix it.
    """

    kind: Literal["finding"] = "finding"
    level: Literal["stop", "warning", "note"]
    machine: Text = ""
    what: Text
    mend: Text = ""


@message
class MachineRow(Described, Speed):
    """A machine, as the page and `cluster.toml` have it.

    Attributes:
        clock_ms: how far its clock is ahead of the first machine's.
    """

    kind: Literal["machine"] = "machine"
    clock_ms: float | None


@message
class LinkRow:
    """A link between two machines, in both directions; None where nothing could be measured."""

    kind: Literal["link"] = "link"
    first: Text
    second: Text
    mbit: Number | None
    back_mbit: Number | None
    rtt_ms: Number | None
    loss: Share | None
    back_loss: Share | None


AnyRow = Annotated[Finding | MachineRow | LinkRow, Field(discriminator="kind")]
