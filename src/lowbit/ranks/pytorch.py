"""Which versions of PyTorch work, and collectives whose names differ between these versions."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.ranks.errors import PeerError

WORKS = (2, 11), (2, 15)
"""First and last version of PyTorch that the tests pass with. Pipelines use parts of it that are not public."""

# Since 2.13 the names of 2.11 warn.
_RENAMED = hasattr(dist, "all_gather_single")
_GATHER = "all_gather_single" if _RENAMED else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if _RENAMED else "reduce_scatter_tensor"


def version() -> tuple[int, int]:
    """The first two numbers of PyTorch's version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class TorchVersionError(RuntimeError):
    """The tests have not passed with this version of PyTorch."""


def check_torch() -> None:
    """Check the version of PyTorch, before ranks start that would fail one by one.

    Raises:
        TorchVersionError: it is not one of `WORKS`; the text says what is installed, what works and how to install it.
    """
    oldest, newest = WORKS
    if not oldest <= version() <= newest:
        allowed = "torch>={}.{},<{}.{}".format(*oldest, newest[0], newest[1] + 1)
        raise TorchVersionError(
            f"PyTorch {torch.__version__} is installed; lowbit works with {oldest[0]}.{oldest[1]} to "
            f"{newest[0]}.{newest[1]}: pip install '{allowed}'"
        )


def gather(out: Tensor, x: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Write everybody's `x`, one after the other, to `out`."""
    return getattr(dist, _GATHER)(out, x, group=group, async_op=async_op)


def sum_scatter(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start to write this rank's share of the sum of everybody's `x` to `out`."""
    return getattr(dist, _SCATTER)(out, x, group=group, async_op=True)


def finish(work: dist.Work | None, group: dist.ProcessGroup, timeout: float) -> None:
    """Wait for a collective; on Gloo at most `timeout` seconds, elsewhere as long as the backend does.

    Raises:
        PeerError: a rank ended, or did not take part in time; Gloo does not say which one.
    """
    assert work is not None  # only for ranks outside the group
    if "gloo" not in dist.get_backend(group):
        work.wait()
        return
    try:
        work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"a rank ended or did not take part within {timeout:g} s (seen by rank {dist.get_rank()}: {reason})", -1
        ) from error
