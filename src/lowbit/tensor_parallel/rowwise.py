"""Sums of layers on real ranks: operators that are opaque to graphs, and forwards that add up in few bits."""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lowbit.codecs.base import Codec
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.plan import local, shards
from lowbit.tensor_parallel.reduce import (
    Choice,
    SumSample,
    SumSettings,
    SumTraffic,
    Thresholds,
    check_codec,
    check_inference,
    measured,
    sum_in_process,
    sum_over_ranks,
)
from lowbit.tensor_parallel.sums import ModelSum, mark
from lowbit.wire import pytorch

_boundaries: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""`LayerSum`s, `InputGather`s, and functions of `counting`, by number."""
_numbers = itertools.count()


def register(boundary: object) -> int:
    """Return the number under which operators know a boundary for as long as it lives."""
    number = next(_numbers)
    _boundaries[number] = boundary
    return number


@torch.library.custom_op("lowbit::tp_all_reduce_", mutates_args=("x",))
def tp_all_reduce_(x: Tensor, boundary: int, group: str) -> None:
    """Replace a partial sum by that of all ranks, coded where that is faster. For inference.

    Args:
        x: (..., E). boundary: the `number` of a `LayerSum`. group: name of the process group.
    """
    _boundaries[boundary].reduce_(x, _group(group))


@torch.library.custom_op("lowbit::tp_linear", mutates_args=())
def tp_linear(x: Tensor, weight: Tensor, whole: Tensor, boundary: int, group: str) -> Tensor:
    """Return the whole output of a row-wise layer: `InputGather.linear`. For inference."""
    return _boundaries[boundary].linear(x, weight, whole, _group(group))


@tp_linear.register_fake
def _(x: Tensor, weight: Tensor, whole: Tensor, boundary: int, group: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("lowbit::tp_all_gather", mutates_args=())
def tp_all_gather(x: Tensor, group: str, timeout: float) -> Tensor:
    """Return the `x` of all ranks, (ranks, *x.shape), in the dtype of `x`: each rank sends (ranks - 1) times its bytes.

    `timeout`: seconds, as in `SumSettings`.
    """
    process_group = _group(group)
    parts = x.new_empty((process_group.size(), *x.shape))
    work = pytorch.gather(parts.view(-1), x.contiguous().view(-1), process_group, async_op=True)
    pytorch.wait_within(work, process_group, timeout, x.device)
    return parts


@tp_all_gather.register_fake
def _(x: Tensor, group: str, timeout: float) -> Tensor:
    return x.new_empty((_group(group).size(), *x.shape))


@torch.library.custom_op("lowbit::tp_count", mutates_args=("y",))
def _tp_count(y: Tensor, counter: int) -> None:
    """Count `y`, which is not changed, but declared as changed so that compiled graphs keep the call."""
    _boundaries[counter](y)


def counting(own: Callable[..., Tensor], traffic: SumTraffic, ranks: int, *, gathers: bool) -> Callable[..., Tensor]:
    """Make a forward that counts the output of another one, such as that of an embedding cut by the vocabulary.

    `gathers`: the ranks' outputs are gathered; otherwise they are added up.
    """

    def count(y: Tensor) -> None:
        nbytes = y.numel() * y.element_size()
        if gathers:
            traffic.other_bytes += nbytes // ranks
        else:
            traffic.plain += y.numel()
            traffic.plain_bytes += nbytes

    number = register(count)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        y = own(*args, **kwargs)
        if ranks > 1:
            _tp_count(y, number) if torch.compiler.is_compiling() else count(y)
        return y

    return forward


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


LAYER_SUM = "lowbit_sum"  # attribute of a forward: its `LayerSum`

Watch = Callable[[str, Sequence[Tensor], Tensor], None]
"""A callback with the name of a layer, the partial sums in this process (its own, or those of all emulated ranks), and
their sum over all ranks."""


def _no_copy(memo: object) -> None:
    """Prevent copies of a module whose forward is replaced: a copy would compute with the original's weights."""
    raise RuntimeError("a model with low-bit sums cannot be copied; allowed: a copy before, or after remove()")


class Installed:
    """Layers with replaced forward methods, until `remove`. A context manager.

    Attributes:
        traffic: values and bytes that the sums of the layers have sent so far.
        sums: `LayerSum`s of the layers, on real ranks.
    """

    def __init__(self) -> None:
        self.traffic = SumTraffic()
        self.sums: list[LayerSum] = []
        self._measured: Callable[..., SumSettings] | None = None  # returns the common settings of the sums
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give a module another forward."""
        self._before.append((module, {name: module.__dict__.get(name) for name in ("forward", "__deepcopy__")}))
        module.__dict__ |= {"forward": forward, "__deepcopy__": _no_copy}

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

    def __repr__(self) -> str:
        """Return a table of the sums: layer, ranks, format and its bits per element; and when they are coded."""
        width = max([5, *(len(each.name) for each in self.sums)])
        lines = [f"{'layer':<{width}}  ranks  features  bits  format"]
        for each in self.sums:
            bits = "–" if each.codec is None else f"{each.codec.bits_per_element((1, each.width)):.2f}"
            kind = "not coded" if each.codec is None else type(each.codec).__name__
            if each.inputs is not None:
                bits = f"{8 * each.inputs.nbytes((64, each.inputs.width)) / 64 / each.width:.2f}"
                kind = f"inputs, {type(each.inputs.codec).__name__}"
            lines.append(f"{each.name:<{width}}  {each.ranks:>5}  {each.width:>8}  {bits:>4}  {kind}")
        if not self.sums:
            lines = [f"{len(self._before)} layers of emulated ranks"]
        elif self.thresholds is not None:
            lines.append(f"coded where that is faster: {self.thresholds}")
        return "\n".join(lines)

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
        inputs: format of the inputs that are sent instead of sums that would be coded (`inputs.Slices`).
    """

    name: str
    width: int
    device: torch.device
    codec: Codec | None
    settings: SumSettings
    ranks: int
    group: dist.ProcessGroup | None = None
    traffic: SumTraffic = field(default_factory=SumTraffic)
    watch: Watch | None = None
    drift: Drift | None = None
    inputs: Any = None
    number: int = field(init=False)
    group_name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if self.codec is not None:
            check_codec(self.name, self.codec, self.width, self.ranks)
        if self.drift is not None:
            self.drift.attach(self.name, self.codec)
        if self.codec is not None and self.device.type == "cuda":  # its tables must be there before a graph's capture
            row = torch.zeros(1, self.width, dtype=torch.float32, device=self.device)
            sum_in_process([row] * self.ranks, self.codec, "two_shot")
        if self.group is not None:
            self.group_name = self.group.group_name
        self.number = register(self)

    def __call__(self, partials: Sequence[Tensor]) -> Tensor:
        """Return the sum over all ranks, of this rank's partial sum, which it overwrites, or of all emulated ranks'."""
        if self.group is not None:
            partial = partials[0]
            check_inference(self.name, partial)
            if torch.compiler.is_compiling():
                tp_all_reduce_(partial, self.number, self.group_name)
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
        installed.replace(module, counting(module.forward, installed.traffic, ranks, gathers=gathers))
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


def row_forward(
    layer: nn.Linear,
    layer_sum: LayerSum,
    group: dist.ProcessGroup,
    product: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Callable[[Tensor], Tensor]:
    """Make a forward for a row-wise layer that maps its rank's part of the input, or all of it, to the whole output.

    `product`: computes the whole product from the rank's parts of input and weight; None: `layer_sum` adds them up.
    """
    ranks, rank = layer_sum.ranks, dist.get_rank(group)

    def forward(x: Tensor) -> Tensor:
        check_inference(layer_sum.name, x, layer.weight)
        weight = local(layer.weight)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Shard(-1)]).to_local()
        elif x.shape[-1] == layer.in_features != weight.shape[1]:
            x = shards(x, ranks, -1)[rank].contiguous()
        total = layer_sum([F.linear(x, weight)]) if product is None else product(x, weight)
        return total if layer.bias is None else total + local(layer.bias)

    setattr(forward, LAYER_SUM, layer_sum)
    return forward
