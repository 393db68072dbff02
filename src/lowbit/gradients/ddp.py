"""`all_reduce_hook`: low-bit averaging of `DistributedDataParallel` gradients during the backward pass."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the class objects.
import ctypes
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lowbit.codecs.base import Codec
from lowbit.collectives.checks import check_call, check_flat
from lowbit.collectives.reduce import CHUNK, SMALL, TIMEOUT, Algorithm, all_reduce
from lowbit.wire.groups import is_known, plain

Hook = Callable[[object, GradBucket], torch.futures.Future[Tensor]]


def all_reduce_hook(
    codec: Codec,
    *,
    error_feedback: bool = False,
    group: dist.ProcessGroup | None = None,
    algorithm: Algorithm = "two_shot",
    small: int = SMALL,
    timeout: float = TIMEOUT,
    checksums: bool = True,
) -> Hook:
    """Return a hook for `ddp.register_comm_hook(None, hook)` that averages gradients over all ranks in few bits.

    Every bucket is averaged by `lowbit.collectives.all_reduce`, on its own thread and in its own process group, so that
    the backward pass continues and the program's use of its groups does not interfere. Parameters stay bit-identical
    on all ranks. Gradient accumulation (`no_sync`), several backward passes and rebuilt buckets work without changes.

    Args:
        codec: the format: `BlockFloat8()`, or `GroupInt(bits=8, group=128, symmetric=True)`.
        error_feedback: add the quantization error of a parameter's gradient to its next one. It takes a float32 per
            parameter, which is worth it with 4 bits or less. Errors belong to parameters, not to buckets; they are not
            part of a checkpoint. Non-finite errors are dropped.
        group: the ranks of the DDP module; None: the default group. If `torch.distributed` has not made the group, the
            hook uses it directly instead of making its own.
        algorithm, small, timeout, checksums: as for `all_reduce`.

    Returns:
        The hook, for one DDP module. Call this function on all ranks at once, because it makes a process group. DDP
        wraps an error of `all_reduce` during a backward pass in a RuntimeError, as its cause.

    Raises:
        TypeError, ValueError: as `all_reduce`, but raised here.
    """
    members = plain(group)
    check_flat(codec)
    check_call(codec, algorithm=algorithm, small=small, timeout=timeout, checksums=checksums)
    if not isinstance(error_feedback, bool):
        raise TypeError(f"error_feedback is {error_feedback!r}; allowed: True or False")
    own = _own_group(members, timeout) if is_known(members) else group
    feedback = _QuantizationErrors() if error_feedback else None

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            shapes = ", ".join(str([*parameter.shape]) for parameter in bucket.parameters())
            raise ValueError(
                f"the gradient of a parameter of shape {shapes} is sparse; allowed: dense gradients "
                "(nn.Embedding(..., sparse=False))"
            )
        errors = None
        if feedback is not None:
            errors = feedback.of(bucket.parameters(), buffer)
            buffer.add_(errors)
        pending = all_reduce(
            buffer, codec, own, "avg", algorithm, True,
            chunk=CHUNK, small=small, timeout=timeout, errors=errors, checksums=checksums,
        )  # fmt: skip
        assert pending is not None
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

        def finish(error: BaseException | None) -> None:
            if error is None:
                future.set_result(buffer)
            else:
                future.set_exception(error)  # pyright: ignore[reportArgumentType] the stubs want a Tensor

        pending.then(finish)
        return future

    return hook


def _own_group(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    # Only the members synchronize: other ranks may be making other groups at the same time.
    own = dist.new_group(
        dist.get_process_group_ranks(group), timeout=timedelta(seconds=timeout), use_local_synchronization=True
    )
    # Never freed: DDP and the hook outlive `destroy_process_group`, and the destructor of a group that ends with them
    # would wait, with the interpreter's lock, for threads that may need it.
    for each in (group, own):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    assert isinstance(own, dist.ProcessGroup)
    return own


class _QuantizationErrors:
    """Quantization errors of each parameter's gradient, laid out like the current buckets."""

    def __init__(self) -> None:
        self._parts: dict[int, Tensor] = {}
        self._flats: dict[tuple[int, ...], Tensor] = {}

    def of(self, parameters: list[Tensor], buffer: Tensor) -> Tensor:
        """Return the errors of these parameters, concatenated: float32, as long as the bucket's buffer."""
        key = tuple(map(id, parameters))  # ids stay valid: the DDP module keeps its parameters alive
        if key not in self._flats:
            flat = torch.zeros(buffer.shape, device=buffer.device)
            sizes = [parameter.numel() for parameter in parameters]
            for number, part in zip(key, flat[: sum(sizes)].split(sizes), strict=True):
                if number in self._parts:
                    part.copy_(self._parts[number])
                self._parts[number] = part
            # Drop buckets that have been rebuilt; `_parts` still holds errors of parameters not yet seen in a new one.
            self._flats = {old: errors for old, errors in self._flats.items() if not set(old) & set(key)} | {key: flat}
        return self._flats[key]
