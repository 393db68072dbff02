"""PyTorch's versions that work, its process groups, and wrappers of its collectives, which differ by version.

PyTorch's functions refuse a foreign group, which `torch.distributed` has not made, such as torchft's; its own methods
work. It has its own store and rank numbers, and may exist without a default group.
"""

import weakref
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from lowbit.escape import shown
from lowbit.wire.errors import PeerError

_counters: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def default_group() -> dist.ProcessGroup:
    """The default process group; RuntimeError before `torch.distributed.init_process_group`."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    return group


def unwrapped_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group that carries the bytes: the default one for None, the inner one of a wrapper such as torchft's.

    TypeError: a backend, or not a group. ValueError: a wrapper that is not connected, or a group without a store here.
    """
    group = group or default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {shown(group)}; allowed: a ProcessGroup, such as torch.distributed.new_group returns"
        )
    if is_known(group):
        return group
    given = group
    try:
        # torchft's wrappers keep it as `parent`, and replace it after each change of the members.
        while isinstance(inside := getattr(group, "parent", None), dist.ProcessGroup):
            group = inside
        # Called only to fail here, with a clear error: a wrapper that is not connected has no store yet.
        group.get_group_store()
    except (AssertionError, RuntimeError):
        raise ValueError(
            f"group is {shown(given)}, which has no store in this process; allowed: a group of PyTorch's, or a "
            "connected wrapper around one, such as torchft's ProcessGroupGloo after the first quorum"
        ) from None
    return group


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether `torch.distributed` has made the group, so that its functions accept it."""
    return group is dist.group.WORLD or group in dist.distributed_c10d._world.pg_map


def job_ranks(group: dist.ProcessGroup) -> list[int]:
    """Global ranks of the group's members; in a foreign group, their ranks in the group."""
    return dist.get_process_group_ranks(group) if is_known(group) else list(range(group.size()))


def rank_names(group: dist.ProcessGroup) -> list[str]:
    """Names of the ranks of a group for errors, by `job_ranks`."""
    return [f"rank {rank}" for rank in job_ranks(group)]


def next_round(group: dist.ProcessGroup, name: str) -> int:
    """Return 0, 1, 2, ... for successive calls with a name; equal on ranks that make the same calls."""
    counter = _counters.setdefault(group, Counter())
    counter[name] += 1
    return counter[name] - 1


def new_group(ranks: list[int] | None = None, *, timeout: float) -> dist.ProcessGroup | None:
    """Make a process group of these ranks (None: all); every rank calls this. None on ranks outside the group."""
    # The run's time limit, because PyTorch's default is 30 minutes.
    group = dist.new_group(ranks=ranks, timeout=timedelta(seconds=0.8 * timeout))
    return group if isinstance(group, dist.ProcessGroup) else None


SUPPORTED_TORCH = (2, 11), (2, 15)
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
    """Raise a TorchVersionError if PyTorch is outside `SUPPORTED_TORCH`, before ranks start and fail one by one."""
    oldest, newest = SUPPORTED_TORCH
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


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to replace `x` by its sum over all ranks."""
    return dist.all_reduce(x, group=group, async_op=True) if is_known(group) else group.allreduce([x])


def carries(group: dist.ProcessGroup, backend: str, device: torch.device) -> bool:
    """Whether this backend handles the tensors of a device in a group."""
    if not is_known(group):
        return backend in group._get_backend(device).name()
    # `get_backend` is "undefined" for a group whose backends were not named.
    return f"{device.type}:{backend}" in dist.get_backend_config(group).split(",")


_CPU = torch.device("cpu")


def wait_within(work: dist.Work | None, group: dist.ProcessGroup, timeout: float, device: torch.device = _CPU) -> None:
    """Wait for a collective, with Gloo at most `timeout` seconds: then a PeerError, which cannot name the rank.

    `device`: of its tensors.
    """
    assert work is not None  # None is for ranks outside the group
    # NCCL's `wait` only makes the current stream wait and returns at once, so a limit would measure nothing.
    if not carries(group, "gloo", device):
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
