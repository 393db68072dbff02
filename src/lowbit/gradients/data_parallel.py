"""Low-bit averages of gradients under PyTorch's `DistributedDataParallel` and FSDP2 (`fully_shard`)."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the class objects.
import ctypes
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

# `FSDPModule.set_custom_reduce_scatter` and the interface of its argument are public; the base class is not.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lowbit.codecs.base import Codec
from lowbit.collectives import reduce
from lowbit.escape import shown
from lowbit.wire.pytorch import is_known, unwrapped_group

Hook = Callable[[object, GradBucket], torch.futures.Future[Tensor]]
LOW_BIT_HOOKS: weakref.WeakSet[Hook] = weakref.WeakSet()
"""What `all_reduce_hook` has returned."""


def all_reduce_hook(
    codec: Codec,
    *,
    error_feedback: bool = False,
    group: dist.ProcessGroup | None = None,
    algorithm: reduce.Algorithm = "two_shot",
    small: int = reduce.SMALL,
    timeout: float = reduce.TIMEOUT,
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
    members = unwrapped_group(group)
    reduce.check_flat(codec)
    reduce.check_call(codec, algorithm=algorithm, small=small, timeout=timeout, checksums=checksums)
    if not isinstance(error_feedback, bool):
        raise TypeError(f"error_feedback is {shown(error_feedback)}; allowed: True or False")
    own = group
    if is_known(members):
        # Only the members synchronize: other ranks may be making other groups at the same time.
        own = dist.new_group(
            dist.get_process_group_ranks(members), timeout=timedelta(seconds=timeout), use_local_synchronization=True
        )
        # Never freed: DDP and the hook outlive `destroy_process_group`, and the destructor of a group that ends with
        # them would wait, with the interpreter's lock, for threads that may need it.
        for each in (members, own):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        assert isinstance(own, dist.ProcessGroup)
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
        pending = reduce.all_reduce(
            buffer, codec, own, "avg", algorithm, True,
            chunk=reduce.CHUNK, small=small, timeout=timeout, errors=errors, checksums=checksums,
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

    LOW_BIT_HOOKS.add(hook)
    return hook


class _QuantizationErrors:
    """Quantization errors of each parameter's gradient, laid out like the current buckets."""

    def __init__(self) -> None:
        self._parameters: dict[int, Tensor] = {}  # kept, so that no other gets the number of one
        self._parts: dict[int, Tensor] = {}
        self._flats: dict[tuple[int, ...], Tensor] = {}

    def of(self, parameters: list[Tensor], buffer: Tensor) -> Tensor:
        """Return the errors of these parameters, concatenated: float32, as long as the bucket's buffer."""
        key = tuple(map(id, parameters))
        if key not in self._flats:
            self._parameters.update(zip(key, parameters, strict=True))
            flat = torch.zeros(buffer.shape, dtype=torch.float32, device=buffer.device)
            sizes = [parameter.numel() for parameter in parameters]
            for number, part in zip(key, flat[: sum(sizes)].split(sizes), strict=True):
                if number in self._parts:
                    part.copy_(self._parts[number])
                self._parts[number] = part
            # Drop buckets that have been rebuilt; `_parts` still holds errors of parameters not yet seen in a new one.
            self._flats = {old: errors for old, errors in self._flats.items() if not set(old) & set(key)} | {key: flat}
        return self._flats[key]


# `FSDPModule.set_custom_reduce_scatter` and the interface of its argument are public; the base class is not.


class LowBitReduceScatter(ReduceScatter):
    """Reduce gradients of FSDP2 in few bits: set one on each module that went through `fully_shard`.

    Every rank encodes its part of each shard, and the shard's owner adds the parts up in float32: there is one
    quantization, and each of W ranks sends (W - 1) / W n b / 8 bytes for n gradient elements of b bits. FSDP2 gathers
    parameters at full precision, as always. Sums or means are those of `lowbit.collectives.reduce_scatter`.

    Args:
        codec, timeout, checksums: as for `lowbit.collectives.reduce_scatter`.

    Raises:
        TypeError, ValueError: a codec that cannot be summed, or an invalid time limit.
    """

    def __init__(self, codec: Codec, *, timeout: float = reduce.TIMEOUT, checksums: bool = True) -> None:
        reduce.check_flat(codec)
        reduce.check_call(codec, timeout=timeout, checksums=checksums)
        self._codec, self._timeout, self._checksums = codec, timeout, checksums

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for inputs and outputs."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce-scatter `input_tensor` to `output_tensor`.

        Raises:
            ValueError: an operation other than SUM and AVG, which FSDP2 uses only if the program configures it.
            AgreementError, PeerError: as `lowbit.collectives.reduce_scatter`.
        """
        is_sum = op == dist.ReduceOp.SUM
        if not is_sum and not op == dist.ReduceOp.AVG:
            raise ValueError(
                f"op is {op}; allowed: SUM and AVG (set_gradient_divide_factor asks for another; on Gloo, "
                "set_force_sum_reduction_for_comms(True) makes it a SUM)"
            )
        return reduce.reduce_scatter(
            output_tensor, input_tensor, self._codec, group, "sum" if is_sum else "avg", async_op,
            chunk=reduce.CHUNK, timeout=self._timeout, checksums=self._checksums,
        )  # fmt: skip
