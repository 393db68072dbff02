"""How many cores and how much memory this process may use, by its affinity mask and its control groups.

A container's limit, such as `docker run --cpus 2`, is a quota of processor time: with more threads than that, all of
them are stopped for the rest of each period, and the ranks that wait for them, too.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def usable_cores() -> int:
    """Return the number of cores, at least 1; of a fractional quota, the whole cores."""
    return max(1, int(min(len(os.sched_getaffinity(0)), *map(_quota, _groups("cpu")), math.inf)))


def memory_limit() -> float:
    """Return the bytes of memory that this process' control groups permit, such as a container's; maybe infinity."""
    return min(map(_memory, _groups("memory")), default=math.inf)


def _groups(controller: str) -> Iterator[str]:
    """Folders of each control group above this process, of version 1 or 2."""
    with contextlib.suppress(OSError, ValueError):
        groups = dict(line.split(":", 2)[1:] for line in _read("proc/self/cgroup").splitlines())
        for line in _read("proc/self/mountinfo").splitlines():
            (*_, root, mount), (kind, _, options) = _fields(line)
            for names, path in groups.items():
                version1 = kind == "cgroup" and controller in names.split(",") and controller in options.split(",")
                if version1 or (kind == "cgroup2" and not names):
                    yield from _up(PurePosixPath(path), PurePosixPath(root), mount)


def _fields(line: str) -> tuple[list[str], list[str]]:
    """Split a line of mountinfo: the fields up to the mount point; kind, source and options of the file system."""
    place, _, system = line.partition(" - ")
    return place.split()[:5], system.split()


def _up(path: PurePosixPath, root: PurePosixPath, mount: str) -> Iterator[str]:
    """Folders of a control group and of those above it; `root` is the group that is mounted at `mount`.

    In a container the path may be one of the host's, of which only the container's own group is mounted.
    """
    inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
    for group in (inside, *inside.parents):
        yield str(PurePosixPath(mount) / group)


def _quota(folder: str) -> float:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = _read(f"{folder}/cpu.max").split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = int(_read(f"{folder}/cpu.cfs_quota_us"))
        return quota / int(_read(f"{folder}/cpu.cfs_period_us")) if quota > 0 else math.inf
    return math.inf


def _memory(folder: str) -> float:
    for name in ("memory.max", "memory.limit_in_bytes"):  # "max", or almost 2^63, without a limit
        with contextlib.suppress(OSError, ValueError):
            return int(_read(f"{folder}/{name}"))
    return math.inf


def _read(path: str) -> str:
    return (_ROOT / path.lstrip("/")).read_text()
