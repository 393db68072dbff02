"""Supported versions of PyTorch, and wrappers of its collectives, which differ by version and for foreign groups."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from lowbit.wire.errors import PeerError
from lowbit.wire.groups import is_known, rank_names

WORKS = (2, 11), (2, 15)
"""First and last version of PyTorch that the tests pass with. (Pipelines use private parts of PyTorch.)"""

# From 2.13 on, the names of 2.11 print warnings.
_RENAMED = hasattr(dist, "all_gather_single")
_GATHER = "all_gather_single" if _RENAMED else "all_gather_into_tensor"


def version() -> tuple[int, int]:
    """Major and minor version of PyTorch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class TorchVersionError(RuntimeError):
    """A version of PyTorch with which the tests have not passed."""


def check_torch() -> None:
    """Raise a TorchVersionError if PyTorch is outside `WORKS`, before ranks start and fail one by one."""
    oldest, newest = WORKS
    if not oldest <= version() <= newest:
        allowed = "torch>={}.{},<{}.{}".format(*oldest, newest[0], newest[1] + 1)
        raise TorchVersionError(
            f"PyTorch {torch.__version__} is installed; lowbit works with {oldest[0]}.{oldest[1]} to "
            f"{newest[0]}.{newest[1]}: pip install '{allowed}'"
        )


def gather(out: Tensor, x: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Write the `x` of all ranks to `out`, in the order of the ranks."""
    if is_known(group):
        return getattr(dist, _GATHER)(out, x, group=group, async_op=async_op)
    work = group._allgather_base(out, x, AllgatherOptions())
    if async_op:
        return work
    work.wait()
    return None


def exchange(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to write the part of each rank's `x` that is for this rank to `out`, in the order of the ranks."""
    if is_known(group):
        return dist.all_to_all_single(out, x, group=group, async_op=True)
    return group.alltoall_base(out, x, [], [], AllToAllOptions())


def total(x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to replace `x` by its sum over all ranks."""
    return dist.all_reduce(x, group=group, async_op=True) if is_known(group) else group.allreduce([x])


def carries(group: dist.ProcessGroup, backend: str, device: torch.device) -> bool:
    """Whether this backend handles the tensors of a device in a group."""
    return backend in (dist.get_backend(group) if is_known(group) else group._get_backend(device).name())


def finish(work: dist.Work | None, group: dist.ProcessGroup, timeout: float) -> None:
    """Wait for a collective, with Gloo at most `timeout` seconds: then a PeerError, which cannot name the rank."""
    assert work is not None  # None is for ranks outside the group
    if not carries(group, "gloo", torch.device("cpu")):
        work.wait()
        return
    try:
        work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"a rank ended or did not take part within {timeout:g} s "
            f"(seen by {rank_names(group)[group.rank()]}: {reason})",
            -1,
        ) from error
