"""Row-wise layers on real ranks: a matrix product with this rank's columns, and a sum over the ranks in few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    SumSettings,
    Traffic,
    check_codec,
    check_inference,
    sum_in_process,
    sum_over_ranks,
)

Watch = Callable[[str, Sequence[Tensor], Tensor], None]
"""Called with the name of a layer, the partial sums in this process (its own, or those of all emulated ranks), and
their sum over all ranks."""


class Installed:
    """Layers with replaced forward methods, until `remove`. A context manager.

    Attributes:
        traffic: values and bytes that their sums have carried so far.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._before: list[tuple[nn.Module, Any]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give a module another forward."""
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Give all modules their own forward back."""
        while self._before:
            module, before = self._before.pop()
            module.__dict__.pop("forward", None)
            if before is not None:
                module.__dict__["forward"] = before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


@dataclass(kw_only=True)
class LayerSum:
    """Adds up the partial sums of one row-wise layer; counts them and shows them to `watch` and `drift`.

    Args:
        name: of the layer, in reports and errors. layer: the layer.
        codec: format of the partial sums; None: the model's dtype.
        ranks: how many add up. group: the ranks; None: this process emulates all of them.
        traffic: counts. watch: sees partial sums and their sum. drift: watches coded values.

    Raises:
        TypeError, ValueError: a codec that does not fit the layer or the number of ranks.
    """

    name: str
    layer: nn.Linear
    codec: Codec | None
    settings: SumSettings
    ranks: int
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    watch: Watch | None = None
    drift: Drift | None = None

    def __post_init__(self) -> None:
        if self.codec is not None:
            check_codec(self.name, self.codec, self.layer.out_features, self.ranks)
        if self.drift is not None:
            self.drift.attach(self.name, self.codec)

    def __call__(self, partials: Sequence[Tensor]) -> Tensor:
        """Return the sum over all ranks; on real ranks it may overwrite the partial sum.

        Args:
            partials: of this rank, or of all emulated ranks: (..., E) each.
        """
        codec, settings, group = self.codec, self.settings, self.group
        coded = self.traffic.take(partials[0], self.ranks, codec, settings)
        if self.drift is not None and coded:
            self.drift.look(self.name, partials, 0 if group is None else dist.get_rank(group))
        if group is None:
            total = sum_in_process(partials, codec, settings)
        else:
            summed = partials[0]
            partials = partials if self.watch is None else [summed.clone()]
            total = sum_over_ranks(summed, codec, group, settings)
        if self.watch is not None:
            self.watch(self.name, partials, total)
        return total


def install(
    layers: Mapping[str, nn.Linear],
    codecs: Mapping[str, Codec],
    group: dist.ProcessGroup,
    settings: SumSettings,
    *,
    watch: Watch | None = None,
    drift: Drift | None = None,
) -> Installed:
    """Let row-wise layers with `DTensor` weights add up their partial sums in these formats.

    `codecs` has formats by name of the layer; the sums of layers without one stay in the model's dtype.
    """
    installed = Installed()
    ranks = dist.get_world_size(group)
    sums = [  # complete before the first layer is changed: an error leaves the model as it was
        LayerSum(
            name=name, layer=layer, codec=codecs.get(name), settings=settings, ranks=ranks, group=group,
            traffic=installed.traffic, watch=watch, drift=drift,
        )
        for name, layer in layers.items()
    ]  # fmt: skip
    for layer_sum in sums:
        installed.replace(layer_sum.layer, row_forward(layer_sum, group))
    return installed


def row_forward(layer_sum: LayerSum, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Make a forward for a row-wise layer: from its rank's part of the input, or from all of it, to the whole output.

    It is for inference and raises where a gradient is asked for.
    """
    layer, ranks, rank = layer_sum.layer, layer_sum.ranks, dist.get_rank(group)

    def forward(x: Tensor) -> Tensor:
        check_inference(layer_sum.name, x, layer.weight)
        weight = local(layer.weight)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Shard(-1)]).to_local()
        elif x.shape[-1] == layer.in_features != weight.shape[1]:
            x = shards(x, ranks, -1)[rank].contiguous()
        total = layer_sum([F.linear(x, weight)])
        return total if layer.bias is None else total + local(layer.bias)

    return forward


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a `DTensor`, any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def group_of(layers: Mapping[str, nn.Linear]) -> dist.ProcessGroup:
    """Return the ranks that share these row-wise layers."""
    weight = next(iter(layers.values())).weight
    assert isinstance(weight, DTensor)
    return weight.device_mesh.get_group()


class LowBitRowwiseParallel(RowwiseParallel):
    """A `RowwiseParallel` for `parallelize_module` whose partial sums are added up in few bits. For inference.

    The weight is cut by inputs and the bias kept whole, as by PyTorch's style. Of n values of b bits (4.1875 with
    `FeatureInt` and E // 64 outliers) each of W ranks sends (W - 1) n b / 8 bytes with one_shot and
    2 (W - 1) / W n b / 8 with two_shot; results are bit-identical on all ranks. Sums of fewer than `settings.small`
    values are sent in the model's dtype. An `Embedding` is cut and summed by PyTorch's own style: all ranks but one add
    zeros.

    Args:
        codec: format of the layer's partial sums: `calibration.codec(name)`, or `GroupInt`; see also `low_bit_styles`.
        settings: how they are added up.
        input_layouts: `Shard(-1)` (default) or `Replicate()`.
        output_layouts: `Replicate()` only.
        use_local_output: return a plain tensor instead of a `DTensor`.
        drift: watches at run time whether the calibrated ranges hold.
        name: of the layer, in reports and errors; each style that shares a `drift` needs its own.

    Raises:
        ValueError: another layout; in `parallelize_module` a module other than `Linear`, or of another width.
        AgreementError: in `parallelize_module`, other codecs or settings on other ranks; the same text on all.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        settings: SumSettings | None = None,
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
        self.codec, self.settings = codec, settings or SumSettings()
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
            facts = {
                "codec": f"{type(self.codec).__name__} [{self.codec.fingerprint()}]",
                "codec version": str(self.codec.payload_version),
                "settings": str(self.settings),
            }
            agree(group, facts, self.settings.timeout, topic="tensor parallel")
        self._partition_linear_fn(self.name, module, device_mesh)
        assert is_cut_by_input(module)
        layer_sum = LayerSum(
            name=self.name, layer=module, codec=self.codec, settings=self.settings, ranks=device_mesh.size(),
            group=group, drift=self.drift,
        )  # fmt: skip
        forward = row_forward(layer_sum, group)

        def wrapped(x: Tensor) -> Tensor:
            total = forward(x)
            if self.use_local_output:
                return total
            return DTensor.from_local(total, device_mesh, [Replicate()], run_check=False)

        module.__dict__["forward"] = wrapped
        return module
