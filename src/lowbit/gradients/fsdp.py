"""`LowBitReduceScatter`: low-bit reduce-scatter of FSDP2 (`fully_shard`) gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# `FSDPModule.set_custom_reduce_scatter` and the interface of its argument are public; the base class is not.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lowbit.codecs.base import Codec
from lowbit.collectives.checks import check_call, check_flat
from lowbit.collectives.reduce import CHUNK, TIMEOUT, reduce_scatter


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

    def __init__(self, codec: Codec, *, timeout: float = TIMEOUT, checksums: bool = True) -> None:
        check_flat(codec)
        check_call(codec, timeout=timeout, checksums=checksums)
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
        return reduce_scatter(
            output_tensor, input_tensor, self._codec, group, "sum" if is_sum else "avg", async_op,
            chunk=CHUNK, timeout=self._timeout, checksums=self._checksums,
        )  # fmt: skip
