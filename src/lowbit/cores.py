"""How many cores this process may use: those of its affinity mask, and no more than its control groups pay for.

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
    return max(1, int(min(len(os.sched_getaffinity(0)), *_quotas())))


def _quotas() -> Iterator[float]:
    """The quota, in cores, of each control group above this process (version 1 or 2); ends with infinity."""
    with contextlib.suppress(OSError, ValueError):
        groups = dict(line.split(":", 2)[1:] for line in _read("proc/self/cgroup").splitlines())
        for line in _read("proc/self/mountinfo").splitlines():
            (*_, root, mount), (kind, _, options) = _fields(line)
            for names, path in groups.items():
                version1 = kind == "cgroup" and "cpu" in names.split(",") and "cpu" in options.split(",")
                if version1 or (kind == "cgroup2" and not names):
                    yield from map(_quota, _up(PurePosixPath(path), PurePosixPath(root), mount))
    yield math.inf


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


def _read(path: str) -> str:
    return (_ROOT / path.lstrip("/")).read_text()
