"""What machines state to each other: facts about themselves, and how fast they compute and code."""

import contextlib
import hashlib
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import struct
import time
import typing
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

import lowbit
from lowbit.codecs import parse_pair
from lowbit.codecs.names import parse_goal
from lowbit.codecs.speed import coding_speed
from lowbit.escape import Printable
from lowbit.wire.checksum import run_secret
from lowbit.wire.pytorch import TorchVersionError, check_torch
from lowbit_run.config import NonNegative
from lowbit_run.cores import usable_cores
from lowbit_run.doctor.settings import MOST_MACHINES, DoctorSettings
from lowbit_run.job.process_group import address_towards, asked, interface_problem, interface_towards, interfaces
from lowbit_run.plan.sizes import layer_seconds, measure_sizes, optimizer_ns
from lowbit_run.train import TrainConfig, load
from lowbit_run.train.boundaries import AUTO_FORMATS, usable
from lowbit_run.train.config import AUTO
from lowbit_run.train.data import load_data
from lowbit_run.train.device import choose_autocast, choose_device, memory_of, threads_per_rank
from lowbit_run.train.fits import PROCESS_BYTES
from lowbit_run.train.identity import compared
from lowbit_run.train.layout import make_layout
from lowbit_run.train.model import count_layers, hidden_size, vocabulary_of
from lowbit_run.train.saved import rank_peaks
from lowbit_run.train.weights import weights_of

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(gt=0, lt=1 << 16)]
Few = Annotated[int, Field(ge=0, le=4096)]  # others make lists of this length
Text = Annotated[str, AfterValidator(lambda text: text[:600])]
_Class = TypeVar("_Class")
# Versions may differ between machines: unknown keys are ignored.
_RULES = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StatementError(Printable, ConnectionError):
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
        connections: `run.connections` of the recipe. weights: their format in memory. needs: bytes of memory that each
            rank of the recipe takes, one on each machine.
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
    weights: Text = ""
    needs: Annotated[tuple[Number, ...], Field(max_length=MOST_MACHINES)] = ()
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


_FIREWALLS = ("ufw", "firewall-cmd")
_SIOCGIFHWADDR, _SIOCGIFNETMASK = 0x8927, 0x891B  # Linux ioctls of an interface
_NO_LINK_LAYER = 65534  # ARPHRD_NONE: WireGuard, and TUN devices such as those of Tailscale and OpenVPN
_BRIDGING_VPN = re.compile("tap|zt")  # VPNs with an Ethernet of their own, such as ZeroTier's


def versions() -> dict[str, str]:
    """Versions that are compared."""
    return {"lowbit": lowbit.__version__, "torch": torch.__version__, "python": platform.python_version()}


def facts(settings: DoctorSettings) -> Facts:
    """Collect everything that needs no other machine; `ports` is left empty."""
    host, _ = settings.place
    problem = text = ""
    compared_settings: dict[str, str] = {}
    config = TrainConfig()
    if settings.recipe:
        try:
            config = load(settings.recipe)
            compared_settings = {key: _digest(value) for key, value in compared(config).items()}
            text = load_data(config.data, pretrained=config.model.pretrained).fingerprint()
        except (ValueError, OSError, ModuleNotFoundError) as error:
            problem = " ".join(str(error).split())
    try:
        check_torch()
        torch_problem = ""
    except TorchVersionError as error:
        torch_problem = str(error)
    try:
        gpu = choose_device(config.run.device, 1).type == "cuda"
    except ValueError as error:
        gpu, problem = False, problem or str(error)
    weights, needs = "", tuple[float, ...]()
    if settings.recipe and not problem:
        try:
            alone = not (gpu and torch.cuda.device_count() > 1) and config.ranks <= settings.count
            device = torch.device("cuda" if gpu else "cpu")
            weights, needs = _needs(config, settings.count, device) if alone else ("", ())
        except (ValueError, OSError) as error:
            problem = " ".join(str(error).split())
    address, meet_address = address_towards(host), _resolved(host)
    interface = interface_towards(host) or ""
    kind = struct.unpack_from("H", _asked(interface, _SIOCGIFHWADDR))[0]
    low, high = 32768, 60999  # the range from which the system assigns ports to programs that ask for any free one
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return Facts(
        name=(settings.name or socket.gethostname())[:60], **versions(),
        torch_problem=torch_problem, device=torch.cuda.get_device_name() if gpu else "CPU",
        cores=usable_cores(), gpus=torch.cuda.device_count() if gpu else 0,
        memory_bytes=float(memory_of(torch.device("cuda" if gpu else "cpu"))[0]), address=address,
        interface=interface, **gloo(interface),
        meet_address=meet_address, near=_near(meet_address),
        vpn=kind == _NO_LINK_LAYER or bool(_BRIDGING_VPN.match(interface)),
        machine=_kernel(), network=_network(),
        firewall=next((name for name in _FIREWALLS if shutil.which(name)), ""),
        secret=bool(run_secret()), recipe=settings.recipe, recipe_problem=problem, text=text,
        connections=str(config.run.connections), weights=weights, needs=needs, settings=compared_settings,
        port_low=low, port_high=high,
    )  # fmt: skip


def _needs(config: TrainConfig, ranks: int, device: torch.device) -> tuple[str, tuple[float, ...]]:
    """The format of a run's weights, and the memory of each of its ranks, of which every machine has one."""
    pipelines, model = config.pipeline.data_parallel, config.model
    if ranks % pipelines:
        return "", ()  # machines with several ranks
    layout = make_layout(config.pipeline, ranks=ranks // pipelines, layers=count_layers(model))
    vocab = vocabulary_of(model, config.data.tokenizer)
    autocast = choose_autocast(config.run.precision, device)
    peaks = rank_peaks(config, layout, vocab=vocab, autocast=autocast)
    return weights_of(config, autocast), tuple(peak + PROCESS_BYTES[device.type] for peak in peaks) * pipelines


def gloo(interface: str) -> dict[str, Any]:
    """Where Gloo listens: at GLOO_SOCKET_IFNAME, or at `interface`, to which `lowbit train` sets it."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    name = chosen or interface
    if problem := interface_problem():
        return {"gloo_interface": name, "gloo_problem": problem, "chosen": chosen}
    # By default Gloo takes the interface to which the host's own name resolves.
    address = interfaces().get(name, "") if name else _resolved(socket.gethostname())
    return {"gloo_interface": name, "gloo_address": address, "chosen": chosen}


def _resolved(name: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(name)
    return ""


def _asked(interface: str, request: int) -> bytes:
    """What the kernel states about an interface: 16 bytes, zeros if there is none of that name."""
    with contextlib.suppress(OSError):
        return asked(interface, request)
    return bytes(16)


def _near(address: str) -> bool:
    """Whether an address is in a network to which this machine is attached."""
    for name, own in interfaces().items():
        mask = socket.inet_ntoa(_asked(name, _SIOCGIFNETMASK)[4:8])
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(address) in ipaddress.ip_network(f"{own}/{mask}", strict=False):
                return True
    return False


def _kernel() -> str:
    """A digest of the kernel that runs, the same in all containers of a machine."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return hashlib.sha256(boot).hexdigest()[:16]
    return ""


def _network() -> str:
    """A name of the network namespace, the same in all processes that share the network of a machine or container."""
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/net").st_ino)
    return ""


def _digest(value: Any) -> str:
    """A digest of a value, short enough to send and to show."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]}... {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def speed(settings: DoctorSettings) -> Speed:
    """Measure a decoder layer, the optimizer and the formats. What cannot be measured is left out, with the reason."""
    problem, values = "", dict[str, Any]()
    begin, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    try:
        config = load(settings.recipe) if settings.recipe else TrainConfig()
        device = choose_device(config.run.device, 1)
        torch.set_num_threads(config.run.threads or threads_per_rank(max(1, torch.cuda.device_count())))
        vocab = vocabulary_of(config.model, config.data.tokenizer)
        sequence, autocast = config.data.sequence, choose_autocast(config.run.precision, device)
        rows = max(1, config.rows)
        seconds, tokens, overhead = layer_seconds(config, vocab=vocab, rows=rows, autocast=autocast, device=device)
        values["optimizer_ns"] = optimizer_ns(device)
        if settings.recipe:
            values |= {"layer_seconds": seconds, "layer_tokens": tokens, "layer_overhead": overhead}
        else:  # without a recipe the plan's model is unknown, so a layer's seconds would be of the wrong one
            sizes = measure_sizes(config, vocab=vocab, autocast=None)
            values["tflops"] = 3 * sizes.layer_flops * tokens / seconds / 1e12
        if width := hidden_size(config.model):
            values["coding"] = _coding(settings, config, (1, sequence, width), device)
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        problem = " ".join(str(error).split())[:500]
    took = time.perf_counter() - begin
    values["busy"], values["own"] = (busy_seconds() - busy) / took, (time.process_time() - own) / took
    return Speed(**values, problem=problem)


def busy_seconds() -> float:
    """Seconds that the cores that this process may use have computed since the machine started, for all programs."""
    cores, ticks = {f"cpu{core}" for core in os.sched_getaffinity(0)}, 0
    with contextlib.suppress(OSError, ValueError):
        for name, *values in map(str.split, Path("/proc/stat").read_text().splitlines()):
            if name in cores:  # user, nice, system, idle, waiting for disks, two kinds of interrupts, stolen
                ticks += sum(map(int, values[:8])) - sum(map(int, values[3:5]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _coding(
    settings: DoctorSettings, config: TrainConfig, shape: tuple[int, int, int], device: torch.device
) -> tuple[str, ...]:
    """Speed of formats, as `cluster.toml` has it."""
    configured = [text for text in (*config.pipeline.forward, *config.pipeline.backward) if parse_goal(text) is None]
    texts = [*settings.formats, *configured]
    named = [each for text in texts for each in (usable(AUTO_FORMATS, shape) if text == AUTO else (text,))]
    codecs = dict.fromkeys(codec for text in named for codec in parse_pair(text))
    found = []
    for codec in codecs:
        encode, decode = coding_speed(codec, shape, device)
        found.append(f"{codec!r}={encode / 1e9:.3g}/{decode / 1e9:.3g}")
    return tuple(found)
