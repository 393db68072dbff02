"""Row-wise layers on real ranks: a matrix product with this rank's columns, and a sum over the ranks in few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from lowbit.codecs.base import Codec
from lowbit.collectives import agree
from lowbit.tensor_parallel import op
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.measure import SumSample, measured
from lowbit.tensor_parallel.plan import is_cut_by_input, shards
from lowbit.tensor_parallel.reduce import (
    SumSettings,
    Traffic,
    check_codec,
    check_inference,
    sum_in_process,
    sum_over_ranks,
)
from lowbit.tensor_parallel.sums import ModelSum, mark
from lowbit.tensor_parallel.thresholds import Choice, Thresholds

LAYER_SUM = "lowbit_sum"  # attribute of a forward: its `LayerSum`
_GUARD = "lowbit_guard"  # attribute of a module: a `_NoCopy`

Watch = Callable[[str, Sequence[Tensor], Tensor], None]
"""A callback with the name of a layer, the partial sums in this process (its own, or those of all emulated ranks), and
their sum over all ranks."""


class _NoCopy:
    """Prevents copies of a module whose forward is replaced: a copy would compute with the original's weights."""

    def __deepcopy__(self, memo: object) -> Self:
        raise RuntimeError("a model with low-bit sums cannot be copied; allowed: a copy before, or after remove()")


class Installed:
    """Layers with replaced forward methods, until `remove`. A context manager.

    Attributes:
        traffic: values and bytes that the sums of the layers have sent so far.
        sums: `LayerSum`s of the layers, on real ranks.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.sums: list[LayerSum] = []
        self._measured: Callable[..., SumSettings] | None = None  # returns the common settings of the sums
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give a module another forward."""
        self._before.append((module, {name: module.__dict__.get(name) for name in ("forward", _GUARD)}))
        module.__dict__ |= {"forward": forward, _GUARD: _NoCopy()}

    @property
    def thresholds(self) -> Thresholds | None:
        """The thresholds that decide which sums are coded; None if a number does, or if the ranks are emulated."""
        found = [layer_sum.settings.small for layer_sum in self.sums]
        return next((small for small in found if isinstance(small, Thresholds)), None)

    def measure(self) -> Thresholds | None:
        """Measure thresholds anew, after the link has changed; all ranks must call this between forward passes.

        Compiled graphs use them at once. CUDA graphs do not: capture them again.

        Returns:
            The new thresholds; None if `SumSettings.small` was a number.
        """
        if self._measured is not None:
            self.use(self._measured(anew=True))
        return self.thresholds

    def use(self, settings: SumSettings) -> None:
        """Give all sums these settings."""
        for layer_sum in self.sums:
            layer_sum.settings = settings

    def remove(self) -> None:
        """Restore the own forward of all modules."""
        while self._before:
            module, before = self._before.pop()
            for name, value in before.items():
                module.__dict__.pop(name, None)
                if value is not None:
                    module.__dict__[name] = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


@dataclass(kw_only=True, eq=False)
class LayerSum:
    """Adds up the partial sums of one row-wise layer; counts them and shows them to `watch` and `drift`.

    On real ranks a call is the operator `lowbit::tp_all_reduce_` in the graphs of `torch.compile`.

    Args:
        name: of the layer, in reports and errors. width: features of a partial sum. device: of the partial sums.
        codec: format of the partial sums; None: the model's dtype.
        ranks: how many add up. group: the ranks; None: this process emulates all of them.
        traffic: counts. watch: sees partial sums and their sum. drift: watches coded values.
    """

    name: str
    width: int
    device: torch.device
    codec: Codec | None
    settings: SumSettings
    ranks: int
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    watch: Watch | None = None
    drift: Drift | None = None
    number: int = field(init=False)
    group_name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if self.codec is not None:
            check_codec(self.name, self.codec, self.width, self.ranks)
        if self.drift is not None:
            self.drift.attach(self.name, self.codec)
        if self.codec is not None and self.device.type == "cuda":  # its tables must be there before a graph's capture
            row = torch.zeros(1, self.width, device=self.device)
            sum_in_process([row] * self.ranks, self.codec, "two_shot")
        if self.group is not None:
            self.group_name = self.group.group_name
        self.number = op.register(self)

    def __call__(self, partials: Sequence[Tensor]) -> Tensor:
        """Return the sum over all ranks, of this rank's partial sum, which it overwrites, or of all emulated ranks'."""
        if self.group is not None:
            partial = partials[0]
            check_inference(self.name, partial)
            if torch.compiler.is_compiling():
                op.tp_all_reduce_(partial, self.number, self.group_name)
            else:  # without the operator, which takes tens of microseconds more
                self.reduce_(partial, self.group)
            return partial
        choice = self.settings.choice(partials[0], self.ranks, self.codec)
        self._count(partials, choice, 0)
        total = sum_in_process(partials, self.codec, choice)
        if self.watch is not None:
            self.watch(self.name, partials, total)
        return total

    def reduce_(self, partial: Tensor, group: dist.ProcessGroup) -> None:
        """Replace this rank's partial sum by the sum over the group; the implementation of the operator."""
        choice = self.settings.choice(partial, self.ranks, self.codec)
        self._count([partial], choice, group.rank())
        partials = [] if self.watch is None else [partial.clone()]
        sum_over_ranks(partial, self.codec, group, choice, self.settings)
        if self.watch is not None:
            self.watch(self.name, partials, partial)

    def _count(self, partials: Sequence[Tensor], choice: Choice, first: int) -> None:
        """Count a sum and sample drift, for which the host waits for the device. `first`: rank of the first partial."""
        self.traffic.take(partials[0], self.ranks, self.codec, choice)
        if self.drift is None or choice == "plain":
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # while a graph is captured, the host cannot wait for the device
        self.drift.look(self.name, partials, first)


def install(
    sums: Mapping[str, ModelSum],
    codecs: Mapping[str, Codec],
    group: dist.ProcessGroup,
    settings: SumSettings,
    *,
    counted: Sequence[tuple[nn.Module, bool]] = (),
    watch: Watch | None = None,
    drift: Drift | None = None,
) -> Installed:
    """Let a model on real ranks add up its partial sums in these formats, and count what else it sends.

    `codecs` has formats by name of the sum; sums without one stay in the model's dtype.
    """
    installed = Installed()
    ranks = dist.get_world_size(group)
    for name, summed in sums.items():
        earlier = getattr(summed.module.__dict__.get("forward"), LAYER_SUM, None)
        if earlier is not None and earlier.codec is not None:
            raise ValueError(
                f"{name} adds up its partial sums in few bits already, by an earlier call; allowed: a layer without, "
                "or remove() of what low_bit_ returned first"
            )
    layer_sums = {  # complete before the first layer is changed: an error leaves the model as it was
        name: LayerSum(
            name=name, width=summed.width, device=summed.device, codec=codecs.get(name), settings=settings,
            ranks=ranks, group=summed.group or group, traffic=installed.traffic, watch=watch, drift=drift,
        )
        for name, summed in sums.items()
    }  # fmt: skip
    samples = [SumSample(sums[name].width, sums[name].dtype, sums[name].device, codecs[name]) for name in codecs]
    installed.sums, installed._measured = [*layer_sums.values()], partial(measured, samples, group, settings)
    installed.use(installed._measured())
    for name, summed in sums.items():
        installed.replace(summed.module, sum_forward(summed, layer_sums[name]))
    for module, gathers in counted:
        installed.replace(module, op.counting(module.forward, installed.traffic, ranks, gathers=gathers))
    return installed


def sum_forward(summed: ModelSum, layer_sum: LayerSum) -> Callable[..., Tensor]:
    """Make a forward for a module on real ranks that adds up its partial sums by `layer_sum`. For inference."""
    compute, finish, parameters = summed.partial, summed.finish, tuple(summed.module.parameters(recurse=False))
    if compute is None:
        assert isinstance(summed.module, nn.Linear)
        assert layer_sum.group is not None
        return mark(row_forward(summed.module, layer_sum, layer_sum.group), summed)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for parameter in parameters or (x,):
            check_inference(layer_sum.name, x, parameter)
        with torch.no_grad():
            total = layer_sum([compute(x, *args, **kwargs).contiguous()])
            return total if finish is None else finish(total)

    setattr(forward, LAYER_SUM, layer_sum)
    return mark(forward, summed)


def row_forward(layer: nn.Linear, layer_sum: LayerSum, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Make a forward for a row-wise layer that maps its rank's part of the input, or all of it, to the whole output."""
    ranks, rank = layer_sum.ranks, dist.get_rank(group)

    def forward(x: Tensor) -> Tensor:
        check_inference(layer_sum.name, x, layer.weight)
        weight = local(layer.weight)
        total = layer_sum([F.linear(own_input(x, layer, weight, ranks, rank), weight)])
        return total if layer.bias is None else total + local(layer.bias)

    setattr(forward, LAYER_SUM, layer_sum)
    return forward


def own_input(x: Tensor, layer: nn.Linear, weight: Tensor, ranks: int, rank: int) -> Tensor:
    """Return the part of a row-wise layer's input that belongs to this rank, given this part or the whole input."""
    if isinstance(x, DTensor):
        return x.redistribute(placements=[Shard(-1)]).to_local()
    if x.shape[-1] == layer.in_features != weight.shape[1]:
        return shards(x, ranks, -1)[rank].contiguous()
    return x


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a `DTensor`, any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


class LowBitRowwiseParallel(RowwiseParallel):
    """A `RowwiseParallel` for `parallelize_module` whose partial sums are added up in few bits. For inference.

    The weight is cut by inputs and the bias kept whole, as by PyTorch's style. Of n values of b bits (4.1875 with
    `FeatureInt` and E // 64 outliers) each of W ranks sends (W - 1) n b / 8 bytes with one_shot and
    2 (W - 1) / W n b / 8 with two_shot; results are bit-identical on all ranks. Sums that `settings.small` leaves
    uncoded are added up by PyTorch's all-reduce in the model's dtype. By default their size is measured when
    `parallelize_module` meets the first layer of a kind. An `Embedding` is cut and summed by PyTorch's own style: all
    ranks but one add zeros.

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
        AgreementError: in `parallelize_module`, if codecs or settings differ between ranks; the same text on all.
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
        weight = local(module.weight)
        sample = SumSample(module.out_features, weight.dtype, weight.device, self.codec)
        layer_sum = LayerSum(
            name=self.name, width=module.out_features, device=weight.device, codec=self.codec,
            settings=measured([sample], group, self.settings), ranks=device_mesh.size(), group=group, drift=self.drift,
        )  # fmt: skip
        forward = row_forward(module, layer_sum, group)

        def wrapped(x: Tensor) -> Tensor:
            total = forward(x)
            if self.use_local_output:
                return total
            return DTensor.from_local(total, device_mesh, [Replicate()], run_check=False)

        setattr(wrapped, LAYER_SUM, layer_sum)
        module.__dict__["forward"] = wrapped
        return module
