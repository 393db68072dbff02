"""What machines tell each other about themselves, and the rows of the page that all of them print."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lowbit.config import NonNegative
from lowbit.doctor.channel import message

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(max_length=600)]
Line = Annotated[str, AfterValidator(lambda text: text[:600])]


@message
class Facts:
    """What a machine knows about itself.

    Attributes:
        id: unique to this call. torch_problem: why this version does not work.
        address, interface: that lead to the meeting. gloo_*: where Gloo would listen under `lowbit train`;
            gloo_problem: why it would not; chosen: GLOO_SOCKET_IFNAME.
        host_address: where the host's name leads on this machine. meet_address: where the meeting's name leads.
        text: digest of the recipe's tokens. settings: digests of all settings that must be equal, by key.
        ports: where it listens for the check, among those that the system gives to programs (port_low to port_high).
    """

    id: Text
    name: Text
    lowbit: Text
    torch: Text
    python: Text
    torch_problem: Text = ""
    device: Text
    cores: NonNegative
    gpus: NonNegative = 0
    memory_bytes: Number = 0.0
    address: Text
    interface: Text = ""
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
class Rate:
    """One direction of a link. loss: share of segments that were sent again; None: not known."""

    mbit: Number
    rtt_ms: Number
    loss: Share | None = None


@message
class Door:
    """Where a machine listens."""

    id: Text
    addresses: tuple[Text, ...]
    ports: tuple[int, ...]


@message
class Doors:
    """All of them."""

    doors: tuple[Door, ...]


@message
class Reached:
    """What connecting to them gave: machine, address, port and state."""

    found: tuple[tuple[str, str, int, str], ...]


@message
class Measure:
    """A direction to be measured: to the machine at a place, or with `pull` from it."""

    id: Text
    address: Text
    port: int
    seconds: Annotated[float, Field(gt=0, le=60)]
    pull: bool


@message
class Finding:
    """Something to know before the training.

    Attributes:
        level: stop: the training would not start, or would hang.
        machine: where. what: is wrong. mend: how to mend it.
    """

    kind: Literal["finding"] = "finding"
    level: Literal["stop", "warning", "note"]
    machine: Line = ""
    what: Line
    mend: Line = ""


@message
class MachineRow:
    """A machine, as the page and `cluster.toml` have it.

    Attributes:
        clock_ms: how far its clock is ahead of the first machine's.
    """

    kind: Literal["machine"] = "machine"
    name: Text
    address: Text
    interface: Text
    device: Text
    cores: NonNegative
    gpus: NonNegative
    memory_bytes: Number
    python: Text
    torch: Text
    lowbit: Text
    clock_ms: float | None
    layer_seconds: Number
    layer_tokens: NonNegative
    layer_overhead: Number
    tflops: Number
    optimizer_ns: Number
    coding: tuple[Text, ...]


@message
class LinkRow:
    """A link between two machines: as `Rate`, both ways; None where nothing could be measured."""

    kind: Literal["link"] = "link"
    first: Text
    second: Text
    mbit: Number | None
    back_mbit: Number | None
    rtt_ms: Number | None
    loss: Share | None
    back_loss: Share | None
