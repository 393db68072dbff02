"""Which PyTorch will do, and its collectives on flat tensors under the names that this version does not warn about."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.ranks.errors import PeerError

WORKS = (2, 11), (2, 15)
"""First and last version of PyTorch that the tests pass with. Schedules call what is only half public."""

# New in 2.13; what 2.11 has instead does the same.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single"
_SCATTER = _SCATTER if hasattr(dist, _SCATTER) else "reduce_scatter_tensor"


def version() -> tuple[int, int]:
    """The first two numbers of PyTorch's version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class TorchVersionError(RuntimeError):
    """This version of PyTorch is not known to work."""


def check_torch() -> None:
    """Check the version of PyTorch, before ranks start that would fail one by one.

    Raises:
        TorchVersionError: it is not among `WORKS`; the text names what is installed, what works and how to install it.
    """
    oldest, newest = WORKS
    if not oldest <= version() <= newest:
        allowed = "torch>={}.{},<{}.{}".format(*oldest, newest[0], newest[1] + 1)
        raise TorchVersionError(
            f"PyTorch {torch.__version__} is installed; lowbit works with {oldest[0]}.{oldest[1]} to "
            f"{newest[0]}.{newest[1]}: pip install '{allowed}'"
        )


def gather(out: Tensor, x: Tensor, group: Any, *, async_op: bool = False) -> dist.Work | None:
    """Everybody's `x`, one after the other, in `out`."""
    return getattr(dist, _GATHER)(out, x, group=group, async_op=async_op)


def sum_scatter(out: Tensor, x: Tensor, group: Any) -> dist.Work | None:
    """Start: this rank's share of the sum of everybody's `x` in `out`."""
    return getattr(dist, _SCATTER)(out, x, group=group, async_op=True)


def finish(work: dist.Work | None, group: Any, timeout: float) -> None:
    """Wait for a collective; on Gloo at most `timeout` seconds, elsewhere as long as the engine does.

    Raises:
        PeerError: a rank ended, or did not take part in time; the engine does not say who.
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
            f"a rank ended or did not take part within {timeout:g} s (seen by rank {dist.get_rank()}: {reason})",
            -1,
        ) from error
