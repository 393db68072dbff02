"""A cluster: machines with their speed and memory, and the links between them, read from `cluster.toml`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from lowbit_run.config import ConfigError, NonNegative, Positive, build, section
from lowbit_run.config.section import read_toml
from lowbit_run.plan.sizes import parse_bytes

_Part = TypeVar("_Part")
Rate = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


@section("machine")
class Machine:
    """A machine of the cluster. Speeds that are not given are measured on the machine that plans."""

    name: str
    """A unique name."""
    address: str = ""
    """Address at which the other machines reach it."""
    cores: Positive = 1
    """Number of cores that compute."""
    gpus: NonNegative = 0
    """Number of GPUs, each of which gets a rank. 0: one rank computes on the cores."""
    memory: str = ""
    """Memory of one GPU, or of the machine if it has none, such as 24gb. If omitted, memory is not checked."""
    tflops: NonNegativeFloat = 0.0
    """Floating-point operations per second that a rank reaches, in 10^12. Not used with `layer_seconds`."""
    layer_seconds: NonNegativeFloat = 0.0
    """Seconds of forward and backward of one decoder layer of the model with `layer_tokens` tokens."""
    layer_tokens: Positive = 1024
    """Number of tokens for which `layer_seconds` was measured."""
    layer_overhead: NonNegativeFloat = 0.0
    """The part of `layer_seconds` that does not depend on the size of the micro-batch."""
    optimizer_ns: NonNegativeFloat = 0.0
    """Nanoseconds that the optimizer takes for one parameter. 0: measured here."""
    coding: tuple[str, ...] = ()
    """Coding speeds as "NAME=ENCODE/DECODE", in 10^9 bytes of float32 per second, such as "transform=0.9/1.6". Other
    formats are measured here."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("machine.name is empty; allowed: a name for each machine")
        if not (self.tflops or self.layer_seconds):
            raise ConfigError(f"machine {self.name!r} has no speed; allowed: layer_seconds or tflops, more than 0")
        if self.layer_overhead > self.layer_seconds:
            raise ConfigError(
                f"machine {self.name!r} has layer_overhead {self.layer_overhead:g}; allowed: at most layer_seconds, "
                f"{self.layer_seconds:g}"
            )
        if self.memory:
            parse_bytes(self.memory, f"machine {self.name!r}: memory")
        _ = self.coding_speeds

    @property
    def ranks(self) -> int:
        """Number of processes that it runs."""
        return max(1, self.gpus)

    @property
    def bytes(self) -> float:
        """Memory of a rank; infinite if it is not given."""
        return parse_bytes(self.memory, "memory") if self.memory else math.inf

    @property
    def coding_speeds(self) -> dict[str, tuple[float, float]]:
        """Encoding and decoding speed of each format, in bytes of float32 per second."""
        speeds = {}
        for text in self.coding:
            name, _, pair = text.rpartition("=")
            try:
                encode, decode = (float(part) for part in pair.split("/"))
            except ValueError:
                encode = decode = 0.0
            if not (name and encode > 0 and decode > 0):
                allowed = "such as transform=0.9/1.6, more than 0"
                raise ConfigError(f"machine {self.name!r} has coding {text!r}; allowed: {allowed}")
            speeds[name] = (encode * 1e9, decode * 1e9)
        return speeds


@section("link")
class ClusterLink:
    """A link between two machines."""

    between: tuple[str, ...] = ()
    """The two machines. If omitted, the link stands for all pairs that have no entry of their own."""
    mbit: Rate
    """Mbit/s of payload from the first machine to the second; without `between`, from the one earlier in the file."""
    back_mbit: Rate | None = None
    """Mbit/s from the second machine to the first. If omitted, `mbit`."""
    rtt_ms: NonNegativeFloat = 0.0
    """Milliseconds of a round trip."""
    half_duplex: bool = False
    """Whether the link carries only one direction at a time, as Wi-Fi does."""
    shared: str = ""
    """A name: links with the same name share their rate in each direction, as behind one router."""

    def __post_init__(self) -> None:
        if len(self.between) not in (0, 2) or len(set(self.between)) < len(self.between):
            raise ConfigError(f"link.between is {list(self.between)}; allowed: two machines, or nothing for all pairs")
        if self.half_duplex and self.back_mbit not in (None, self.mbit):
            raise ConfigError(
                f"link.back_mbit is {self.back_mbit} and link.half_duplex is true; allowed: one rate for both ways"
            )


@dataclass(frozen=True)
class Cluster:
    """Machines and links; ConfigError for equal names, a link of an unknown machine, or two links of a pair."""

    machines: tuple[Machine, ...]
    links: tuple[ClusterLink, ...] = ()

    def __post_init__(self) -> None:
        names = [machine.name for machine in self.machines]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"the cluster has machines {names}; allowed: at least one, each with its own name")
        pairs: list[frozenset[str]] = []
        for link in self.links:
            for name in link.between:
                if name not in names:
                    raise ConfigError(
                        f"a link is between {' and '.join(link.between)}; there is no machine {name!r}; "
                        f"known: {', '.join(names)}"
                    )
            alike = next((other for other in self.links if link.shared and other.shared == link.shared), link)
            if replace(link, between=()) != replace(alike, between=()):
                raise ConfigError(
                    f"links that share {link.shared!r} have different rates or round trips; allowed: the same for all"
                )
            pairs.append(frozenset(link.between))
            if pairs.count(pairs[-1]) > 1:
                what = " and ".join(link.between) or "all other pairs"
                raise ConfigError(f"the cluster has two links between {what}; allowed: one")

    @classmethod
    def read(cls, path: str | Path) -> "Cluster":
        """Read `cluster.toml`: a list of `[[machine]]` and one of `[[link]]`; ConfigError if it is not valid."""
        return cls.from_mapping(read_toml(Path(path)), str(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], path: str = "the cluster") -> "Cluster":
        """Build a cluster from the values of such a file; `path` is its name in errors."""
        if unknown := set(values) - {"machine", "link"}:
            raise ConfigError(f"{path} has {', '.join(sorted(unknown))}; known: [[machine]], [[link]]")
        for name, found in values.items():
            if not isinstance(found, list):
                raise ConfigError(f"{path} has [{name}]; allowed: [[{name}]], once for each")
        return cls(
            machines=tuple(_built(Machine, each, "machine", "name") for each in values.get("machine", ())),
            links=tuple(_built(ClusterLink, each, "link", "between") for each in values.get("link", ())),
        )

    @cached_property
    def of_ranks(self) -> tuple[Machine, ...]:
        """The machine of each rank: those of the first machine, then those of the second, and so on."""
        return tuple(machine for machine in self.machines for _ in range(machine.ranks))

    def link(self, a: str, b: str) -> ClusterLink | None:
        """The link between two machines; None for a machine and itself; ConfigError if the cluster has none."""
        if a == b:
            return None
        for ends in ({a, b}, set[str]()):  # a link of these two, or else the one for all
            for link in self.links:
                if set(link.between) == ends:
                    return link
        raise ConfigError(f"the cluster has no link between {a} and {b}; allowed: one, or one without between for all")


def _built(cls: type[_Part], values: Any, kind: str, name: str) -> _Part:
    """Build a section; an error begins with what the file calls it."""
    try:
        return build(cls, values, kind)
    except ConfigError as error:
        named = values.get(name) if isinstance(values, Mapping) else None
        raise ConfigError(f"{kind} {named!r}: {error}" if named else str(error)) from None
