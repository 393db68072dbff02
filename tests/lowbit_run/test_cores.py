"""Cores by affinity mask and quota, of both versions of control groups, nested, and as a container sees them."""

import os
from pathlib import Path

import pytest

from lowbit_run import cores

V1 = "4:memory:/box\n3:cpu,cpuacct:/box/job\n1:name=systemd:/\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
)
V2 = "0::/box/job\n"
V2_MOUNTS = "32 31 0:29 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("root", "quotas", "expected"),
    [
        ("/", {}, 8),
        ("/", {"box/job": (-1, 100000)}, 8),
        ("/", {"box/job": (350000, 100000), "box": (-1, 100000)}, 3),
        ("/", {"box/job": (350000, 100000), "box": (100000, 50000)}, 2),  # that of all groups above it holds, too
        ("/", {"box/job": (50000, 100000)}, 1),
        ("/", {"other": (100000, 100000)}, 8),
        ("/box/job", {".": (250000, 100000)}, 2),  # a container, with paths of the host
        ("/box", {"job": (250000, 100000)}, 2),
        ("/elsewhere", {".": (450000, 100000)}, 4),
        ("/", {"box/job": (200000, 0)}, 8),  # nothing that a kernel writes
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_quota_of_every_group_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    root: str,
    quotas: dict[str, tuple[int, int]],
    expected: int,
):
    monkeypatch.setattr(cores, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    groups, mounts = ((V1, V1_MOUNTS), (V2, V2_MOUNTS))[version - 1]
    _write(tmp_path, {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts.format(root=root)})
    for group, (quota, period) in quotas.items():
        folder = f"sys/fs/cgroup/{'cpu/' if version == 1 else ''}{group}"
        names = {"cpu.max": f"{'max' if quota < 0 else quota} {period}\n"}
        if version == 1:
            names = {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": f"{period}\n"}
        _write(tmp_path / folder, names)
    assert cores.usable_cores() == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert cores.usable_cores() == 1


def test_systems_without_control_groups_have_the_cores_of_the_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cores, "_ROOT", tmp_path)
    assert cores.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("own", "above", "expected"), [("max", "7", 7.0), ("5", "7", 5.0), ("5", "max", 5.0)])
def test_the_least_limit_of_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, own: str, above: str, expected: float
):
    monkeypatch.setattr(cores, "_ROOT", tmp_path)
    assert cores.memory_limit() == float("inf")
    place, name = (("memory/", "memory.limit_in_bytes"), ("", "memory.max"))[version - 1]
    mounts = (V1_MOUNTS.replace("/cpu rw", "/memory rw").replace(",cpu,cpuacct", ",memory"), V2_MOUNTS)[version - 1]
    groups = (V1.replace("4:memory:/box", "4:memory:/box/job"), V2)[version - 1]
    _write(tmp_path, {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts.format(root="/")})
    for group, limit in {"box/job": own, "box": above}.items():
        text = str(2**63 - 4096) if (limit, version) == ("max", 1) else limit
        _write(tmp_path / f"sys/fs/cgroup/{place}{group}", {name: f"{text}\n"})
    assert cores.memory_limit() == expected
