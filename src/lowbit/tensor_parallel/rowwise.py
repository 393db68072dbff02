"""Row-wise modules on real ranks: a matrix product with this rank's columns, and a sum over the ranks in few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from lowbit.codecs.base import Codec
from lowbit.collectives import agree
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.plan import is_cut_by_input, shards
from lowbit.tensor_parallel.reduce import (
    Settings,
    check_codec,
    check_inference,
    sum_over_ranks,
)
from lowbit.tensor_parallel.traffic import Traffic

Watch = Callable[[str, Tensor, Tensor], None]
"""Called with the name of a boundary, this rank's partial sums and the sum over all ranks."""


class Installed:
    """Modules that sum in few bits, until `remove`. A context manager.

    Attributes:
        traffic: what their sums have carried so far.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._before: list[tuple[nn.Module, Any]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give a module another forward."""
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Give the modules the forward back that they had."""
        while self._before:
            module, before = self._before.pop()
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def install(
    rows: Mapping[str, nn.Linear],
    codecs: Mapping[str, Codec],
    group: dist.ProcessGroup,
    settings: Settings,
    *,
    watch: Watch | None = None,
    drift: Drift | None = None,
) -> Installed:
    """Let row-wise modules add up their partial sums by these codecs; those without one in the model's dtype.

    Args:
        rows: modules by name, whose weights are `DTensor`s cut by inputs.
        codecs: by name. watch: sees partial sums and totals. drift: watches what is coded.
    """
    installed = Installed()
    forwards = {  # all of them, or none
        module: row_forward(name, module, codecs.get(name), group, settings, watch, drift, installed.traffic)
        for name, module in rows.items()
    }
    for module, forward in forwards.items():
        installed.replace(module, forward)
    return installed


def row_forward(
    name: str,
    module: nn.Linear,
    codec: Codec | None,
    group: dist.ProcessGroup,
    settings: Settings,
    watch: Watch | None = None,
    drift: Drift | None = None,
    traffic: Traffic | None = None,
) -> Callable[..., Tensor]:
    """A forward for a row-wise module: takes its rank's part of the input, or the whole; returns the whole output.

    For inference: it raises where a gradient would be asked for.
    """
    if codec is not None:
        check_codec(name, codec, module.out_features, dist.get_world_size(group))
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if drift is not None:
        codec = drift.attach(name, codec, local(module.weight).device)
    counted = traffic or Traffic()

    def forward(x: Tensor) -> Tensor:
        check_inference(name, x, module.weight)
        weight, bias = local(module.weight), module.bias
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Shard(-1)]).to_local()
        elif x.shape[-1] == module.in_features != weight.shape[1]:
            x = shards(x, ranks, -1)[rank].contiguous()
        partial = F.linear(x, weight)
        coded = counted.take(partial, ranks, codec, settings)
        if drift is not None and coded:
            assert codec is not None
            totals = settings.totals(partial.numel(), ranks, codec)
            drift.look(name, [partial], totals, rank)
        seen = partial.clone() if watch is not None else partial
        total = sum_over_ranks(partial, codec, group, settings)
        if watch is not None:
            watch(name, seen, total)
        return total if bias is None else total + local(bias)

    return forward


def local(x: Tensor) -> Tensor:
    """This rank's part of a `DTensor`; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def group_of(rows: Mapping[str, nn.Linear]) -> dist.ProcessGroup:
    """The ranks that share row-wise modules."""
    weight = next(iter(rows.values())).weight
    assert isinstance(weight, DTensor)
    return weight.device_mesh.get_group()


class LowBitRowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` for `parallelize_module`, whose partial sums are added up in few bits. For inference.

    The weight is cut by inputs and the bias kept whole, as PyTorch's style does it. Each rank codes its partial sums
    and sends (W - 1) n b / 8 bytes for n values of b bits (4.1875 with `FeatureInt4` and E // 64 outliers) with
    one_shot, 2 (W - 1) / W n b / 8 with two_shot; results are bit-identical on all ranks. Sums of fewer than
    `settings.small` values travel in the model's dtype. An `Embedding` is cut and summed by PyTorch's own style: all
    ranks but one add zeros.

    Args:
        codec: the format of this boundary: `calibration.codec(name)`, or `GroupInt`; see also `low_bit_styles`.
        settings: how sums travel.
        input_layouts: `Shard(-1)` (default) or `Replicate()`.
        output_layouts: `Replicate()` only.
        use_local_output: return a plain tensor instead of a `DTensor`.
        drift: watches at run time whether the calibrated ranges hold. name: of the boundary, in reports and errors;
            one for each style that shares a `drift`.

    Raises:
        ValueError: another layout; at `parallelize_module` a module that is no `Linear`, or has another width.
        AgreementError: at `parallelize_module`, other codecs or settings on other ranks; the same text on all.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        settings: Settings | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        drift: Drift | None = None,
        name: str = "this module",
    ) -> None:
        if output_layouts not in (None, Replicate()):
            raise ValueError(f"output_layouts is {output_layouts}; allowed: Replicate()")
        if input_layouts not in (None, Shard(-1), Replicate()):
            raise ValueError(f"input_layouts is {input_layouts}; allowed: Shard(-1), Replicate()")
        super().__init__(input_layouts=input_layouts, use_local_output=use_local_output)
        check_codec("codec", codec)
        self.codec, self.settings = codec, settings or Settings()
        self.drift, self.name = drift, name
        self.agreed = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return super()._apply(module, device_mesh)
        if type(module) is not nn.Linear:
            raise ValueError(
                f"LowBitRowwiseParallel is for row-wise parallel modules; {self.name} is {type(module).__name__}; "
                "allowed: torch.nn.Linear and torch.nn.Embedding"
            )
        group = device_mesh.get_group()
        check_codec(self.name, self.codec, module.out_features, device_mesh.size())
        if not self.agreed:
            agree_on(group, self.codec, self.settings)
        self._partition_linear_fn(self.name, module, device_mesh)
        assert is_cut_by_input(module)
        forward = row_forward(self.name, module, self.codec, group, self.settings, drift=self.drift)

        def wrapped(x: Tensor) -> Tensor:
            total = forward(x)
            if self.use_local_output:
                return total
            return DTensor.from_local(total, device_mesh, [Replicate()], run_check=False)

        module.__dict__["forward"] = wrapped
        return module


def agree_on(group: dist.ProcessGroup, codec: Codec, settings: Settings) -> None:
    """Raise on all ranks unless all of them have the same codec and settings."""
    facts = {
        "codec": f"{type(codec).__name__} [{codec.fingerprint()}]",
        "codec version": str(codec.payload_version),
        "settings": str(settings),
    }
    agree(group, facts, settings.timeout, topic="tensor parallel")
