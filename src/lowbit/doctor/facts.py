"""Facts that a machine collects about itself before it contacts the others."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import platform
import re
import shutil
import socket
import struct
import time
from pathlib import Path
from typing import Any

import torch

import lowbit
from lowbit.doctor.messages import Facts
from lowbit.doctor.settings import DoctorSettings
from lowbit.job.process_group import address_towards, interface_towards, interfaces
from lowbit.train import TrainConfig, load
from lowbit.train.data import load_data
from lowbit.train.device import choose_device
from lowbit.train.identity import compared
from lowbit.wire.checksum import run_secret
from lowbit.wire.pytorch import TorchVersionError, check_torch

_FIREWALLS = ("ufw", "firewall-cmd")
_SIOCGIFHWADDR, _SIOCGIFNETMASK = 0x8927, 0x891B  # Linux ioctls of an interface
_NO_LINK_LAYER = 65534  # ARPHRD_NONE: WireGuard, and TUN devices such as those of Tailscale and OpenVPN
_BRIDGING_VPN = re.compile("tap|zt")  # VPNs with an Ethernet of their own, such as ZeroTier's


def now_ns() -> int:
    """Nanoseconds of this machine's clock."""
    return time.time_ns()


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
            text = load_data(config.data).fingerprint()
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
    address = address_towards(host)
    interface = interface_towards(host) or ""
    low, high = _port_range()
    return Facts(
        name=(settings.name or socket.gethostname())[:60], **versions(),
        torch_problem=torch_problem, device=torch.cuda.get_device_name() if gpu else "CPU",
        cores=len(os.sched_getaffinity(0)), gpus=torch.cuda.device_count() if gpu else 0,
        memory_bytes=float(torch.cuda.mem_get_info()[0] if gpu else _free_memory()), address=address,
        interface=interface, **gloo(interface),
        meet_address=_resolved(host), near=_near(_resolved(host)), vpn=_is_vpn(interface),
        machine=_kernel(), network=_network(),
        firewall=next((name for name in _FIREWALLS if shutil.which(name)), ""),
        secret=bool(run_secret()), recipe=settings.recipe, recipe_problem=problem, text=text,
        connections=str(config.run.connections), settings=compared_settings, port_low=low, port_high=high,
    )  # fmt: skip


def gloo(interface: str) -> dict[str, Any]:
    """Where Gloo listens: at GLOO_SOCKET_IFNAME, or at `interface`, to which `lowbit train` sets it."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    here = interfaces()
    name = chosen or interface
    if name and name not in here:
        problem = f"GLOO_SOCKET_IFNAME is {name}; it has {', '.join(here)}"
        return {"gloo_interface": name, "gloo_problem": problem, "chosen": chosen}
    # By default Gloo takes the interface to which the host's own name resolves.
    address = here[name] if name else _resolved(socket.gethostname())
    return {"gloo_interface": name, "gloo_address": address, "chosen": chosen}


def _resolved(name: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(name)
    return ""


def _asked(interface: str, request: int) -> bytes:
    """What the kernel states about an interface: 16 bytes, zeros if there is none of that name."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("40s", interface.encode()[:15]))[16:32]
    return bytes(16)


def _is_vpn(interface: str) -> bool:
    kind = struct.unpack_from("H", _asked(interface, _SIOCGIFHWADDR))[0]
    return kind == _NO_LINK_LAYER or bool(_BRIDGING_VPN.match(interface))


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


def _port_range() -> tuple[int, int]:
    """The range from which the system assigns ports to programs that ask for any free one."""
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        return low, high
    return 32768, 60999


def _free_memory() -> int:
    """Bytes of memory that programs can still allocate."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    with contextlib.suppress(OSError, ValueError):  # "max" without a limit
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


def _digest(value: Any) -> str:
    """A digest of a value, short enough to send and to show."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]}... {hashlib.sha256(text.encode()).hexdigest()[:8]}"
