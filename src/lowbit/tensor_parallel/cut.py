"""Cuts a whole model by its own plan: over real ranks, or emulated in one process, on CPU bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from lowbit.codecs.base import Codec, Summable
from lowbit.codecs.checks import check_int
from lowbit.collectives.calls import TIMEOUT
from lowbit.tensor_parallel.calibration import Calibration
from lowbit.tensor_parallel.drift import Drift
from lowbit.tensor_parallel.inputs import InputGather
from lowbit.tensor_parallel.plan import (
    EMBEDDING,
    EXPERTS,
    GATHERED,
    ROW,
    Cut,
    Plan,
    check_heads,
    compute,
    cuts_of,
    is_row,
    parameters_of_rank,
    partial_on_rank,
    plan_of,
    rules_of,
    shards,
    style_of,
)
from lowbit.tensor_parallel.reduce import SumSettings, check_inference
from lowbit.tensor_parallel.rowwise import Installed, LayerSum, Watch, counting, local, sum_forward, tp_all_gather
from lowbit.tensor_parallel.sums import ModelSum, counted, planned_sums, real_sums
from lowbit.wire.pytorch import default_group


def tensor_parallel_(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, plan: Plan | None = None
) -> nn.Module:
    """Cut a whole model over the ranks of a group, in place, for inference.

    Use it for models in memory, or if `from_pretrained(folder, tp_plan="auto")`, which needs the package accelerate, is
    not possible. Each rank keeps its part of every weight in the plan as a `DTensor`; embeddings stay whole. Partial
    sums are added up by PyTorch's own all-reduce in the model's dtype, until `low_bit_` installs a format: for n
    elements of 2 bytes each of W ranks sends 4 (W - 1) / W n bytes. With two ranks results are those of
    `emulate_tensor_parallel_`, on CPU bit for bit; with more the order of the additions differs.

    Args:
        model: whole, with the same weights on all ranks; they are not sent.
        group: the ranks; None: the default group. plan: overrides the model's own.

    Returns:
        The model.

    Raises:
        ValueError: no plan, heads that cannot be divided evenly, a model that is cut already.
    """
    group = group or default_group()
    ranks = dist.get_world_size(group)
    if real_sums(model):
        raise ValueError("model is on tensor-parallel ranks already; allowed: a whole model")
    rules = rules_of(model, plan)
    planned, sums = plan_of(model, rules), planned_sums(model, rules)
    check_heads(model, ranks, planned)
    cuts = {
        name: cuts_of(name, module, rules, ranks)
        for name, module in model.named_modules()
        if style_of(name, rules) == "local_params" or (name in planned and planned[name][1] in EXPERTS)
    }
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for name, own in cuts.items():
        module = model.get_submodule(name)
        for key, cut in own.items():
            _cut(module, key, mesh, cut)
        if name not in planned:
            module.__dict__["forward"] = partial_on_rank(module, "local_params", 0)
    for name, (module, style) in planned.items():
        if isinstance(module, nn.Linear) and not is_row(style):
            _cut(module, "weight", mesh, Cut(0))
            if module.bias is not None:
                _cut(module, "bias", mesh, Cut(0))
            module.__dict__["forward"] = _column_forward(name, module, group, style in GATHERED)
        elif name in sums:
            if isinstance(module, nn.Linear):
                _cut(module, "weight", mesh, Cut(1))
            partial = None if isinstance(module, nn.Linear) else partial_on_rank(module, style, dist.get_rank(group))
            summed = replace(sums[name], group=group, partial=partial)
            layer_sum = LayerSum(
                name=name, width=summed.width, device=summed.device, codec=None, settings=SumSettings(), ranks=ranks,
                group=group,
            )  # fmt: skip
            module.__dict__["forward"] = sum_forward(summed, layer_sum)
    return model


def _cut(layer: nn.Module, name: str, mesh: DeviceMesh, cut: Cut) -> None:
    whole = getattr(layer, name)
    part = distribute_tensor(whole.detach(), mesh, [cut.placement()], src_data_rank=None)
    part = part.clone()  # a view would keep the whole weight in memory
    layer.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _column_forward(
    name: str, layer: nn.Linear, group: dist.ProcessGroup, gathered: bool
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        check_inference(name, x, layer.weight)
        bias = None if layer.bias is None else local(layer.bias)
        y = F.linear(x, local(layer.weight), bias)
        if not gathered or (ranks := dist.get_world_size(group)) == 1:
            return y
        width = layer.out_features
        padded = F.pad(y, (0, -(-width // ranks) - y.shape[-1])).contiguous()  # the last ranks may have less
        parts = tp_all_gather(padded, group.group_name, TIMEOUT)
        return torch.cat(parts.unbind(), -1)[..., :width]

    return forward


_T = TypeVar("_T")


def emulate_tensor_parallel_(
    model: nn.Module,
    ranks: int,
    low_bit: Calibration | Codec | Mapping[str, Codec] | None = None,
    *,
    settings: SumSettings | None = None,
    plan: Plan | None = None,
    watch: Watch | None = None,
    drift: Drift | None = None,
) -> Installed:
    """Make a whole model compute, in place and in this process, as on `ranks` tensor-parallel ranks.

    Every matrix product has the shape that it has on a rank, activations between them are computed shard by shard, and
    partial sums are coded and added up in the order of the ranks. So on CPU logits are bit-identical to those of real
    ranks with the same number of threads and settings (tested with bfloat16 and float32 weights); with more than two
    ranks only if every sum is coded, because uncoded ones are left to PyTorch's all-reduce, which adds up in another
    order. On a GPU results may differ: attention is computed for all heads at once here and for a rank's own heads
    there, and a kernel may add up in another order. It needs memory for a second copy of the row-wise weights and of
    the experts. Nothing is sent. Traffic counts what Transformers' ranks would send; they also cut the embedding.

    Args:
        model: a whole Hugging Face model, or any module with a `plan`.
        ranks: how many to emulate, at least 1.
        low_bit: a `Calibration` for this many ranks and this model; a codec for all layers (`GroupInt` for plain INT8);
            or codecs by layer, where unnamed layers have none. None: sums in the model's dtype, in the order of the
            ranks, rounded once. (The all-reduce of real ranks does the same for two, and may round after every addition
            for more.)
        settings: how partial sums are added up; default `SumSettings()`, which measures nothing here.
        plan: overrides the model's own.
        watch: called with all partial sums and their sum. drift: watches coded values, on all ranks.

    Returns:
        An `Installed`, whose `remove()` undoes it; its `traffic` counts what each rank would have sent.

    Raises:
        ValueError: no plan, modules that do not fit their style, quantized weights, or sizes that cannot be divided.
        CalibrationError: a calibration for another model or number of ranks.
        RuntimeError: in a forward pass with gradients on: it is for inference.
    """

    def formats(layers: Mapping[str, ModelSum]) -> tuple[Mapping[str, Codec | None], Mapping[str, Summable]]:
        if isinstance(low_bit, Calibration):
            low_bit.check(model, ranks, layers)
            return {name: low_bit.codec(name) for name in layers}, low_bit.inputs_codecs()
        return (low_bit if isinstance(low_bit, Mapping) else dict.fromkeys(layers, low_bit)), {}

    return emulate(model, ranks, formats, settings=settings, plan=plan, watch=watch, drift=drift)


def emulate(
    model: nn.Module,
    ranks: int,
    formats: Callable[[Mapping[str, ModelSum]], tuple[Mapping[str, Codec | None], Mapping[str, Summable]]],
    *,
    settings: SumSettings | None = None,
    plan: Plan | None = None,
    watch: Watch | None = None,
    drift: Drift | None = None,
) -> Installed:
    """Do what `emulate_tensor_parallel_` describes. `formats`: returns the formats of sums, and of inputs, by layer."""
    check_int("ranks", ranks, 1, 1 << 16)
    if any(isinstance(p, DTensor) for p in model.parameters()) or real_sums(model):
        raise ValueError("model is on tensor-parallel ranks already; allowed: a whole model")
    rules = rules_of(model, plan)
    planned = plan_of(model, rules)
    check_heads(model, ranks, planned)
    layers, emulation = planned_sums(model, rules), Installed()
    codecs, inputs = formats(layers)
    sums = {
        name: LayerSum(
            name=name, width=summed.width, device=summed.device, codec=codecs.get(name),
            settings=settings or SumSettings(), ranks=ranks, traffic=emulation.traffic, watch=watch, drift=drift,
        )
        for name, summed in layers.items()
    }  # fmt: skip
    forwards = {  # complete before the first layer is changed
        module: _emulated(name, module, style, rules, ranks, sums.get(name), inputs.get(name))
        for name, (module, style) in planned.items()
        if style != EMBEDDING
    }
    for module, forward in forwards.items():
        emulation.replace(module, forward)
    emulation.sums = list(sums.values())
    for module, gathers in counted(model, rules):
        emulation.replace(module, counting(module.forward, emulation.traffic, ranks, gathers=gathers))
    for name, (module, style) in planned.items():
        if style in ROW and isinstance(module, nn.Linear):
            _shard_activations(emulation, model.get_submodule(name.rpartition(".")[0]), module.in_features, ranks)
    return emulation


def _emulated(
    name: str,
    module: nn.Module,
    style: str,
    rules: Plan,
    ranks: int,
    layer_sum: LayerSum | None,
    inputs: Summable | None,
) -> Callable[..., Tensor]:
    if isinstance(module, nn.Linear):
        return _emulated_column(module, ranks) if layer_sum is None else _emulated_row(module, layer_sum, inputs)
    assert layer_sum is not None  # all other styles are sums
    own, cuts = module.forward, cuts_of(name, module, rules, ranks)
    parameters = tuple(module.parameters(recurse=False))

    def copy(*cut: Tensor) -> list[dict[str, Tensor]]:
        by_name = {key: cuts[key].parts(whole, ranks) for key, whole in zip(cuts, cut, strict=True)}
        return [{key: parts[rank] for key, parts in by_name.items()} for rank in range(ranks)]

    copies = _copies(lambda: [module.get_parameter(key) for key in cuts], copy)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for parameter in parameters:
            check_inference(layer_sum.name, x, parameter)
        partials = []
        with torch.no_grad():
            for rank, parts in enumerate(copies()):
                with parameters_of_rank(module, parts):
                    partials.append(compute(module, own, style, rank, (x, *args), kwargs).contiguous())
            return layer_sum(partials)

    return forward


def _copies(parameters: Callable[[], list[Tensor]], copy: Callable[..., list[_T]]) -> Callable[[], list[_T]]:
    """Make a function that copies the ranks' parts of parameters to memory of their own, and again after a change."""
    version: object = None
    copies: list[_T] = []

    def current() -> list[_T]:
        nonlocal version, copies
        now = [(p.data_ptr(), p._version, p.dtype) for p in parameters()]
        if now != version:
            copies, version = copy(*(p.detach() for p in parameters())), now
        return copies

    return current


def _emulated_row(layer: nn.Linear, layer_sum: LayerSum, inputs: Summable | None) -> Callable[[Tensor], Tensor]:
    ranks = layer_sum.ranks
    gather = None if inputs is None else InputGather(sums=layer_sum, layer=layer, codec=inputs)
    columns = _copies(lambda: [layer.weight], lambda weight: [part.clone() for part in shards(weight, ranks, 1)])

    def forward(x: Tensor) -> Tensor:
        check_inference(layer_sum.name, x, layer.weight)
        parts = [part.contiguous() for part in shards(x, ranks, -1)]
        if gather is None:
            total = layer_sum(list(map(F.linear, parts, columns())))
        else:
            total = gather.emulated(parts, columns())
        return total if layer.bias is None else total + layer.bias

    return forward


def _emulated_column(layer: nn.Linear, ranks: int) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        weights = shards(layer.weight, ranks, 0)
        biases = [None] * ranks if layer.bias is None else shards(layer.bias, ranks, 0)
        return torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], -1)

    return forward


def _shard_activations(emulation: Installed, parent: nn.Module, features: int, ranks: int) -> None:
    """Let modules without parameters next to a row-wise layer compute one rank's features at a time.

    Vectorized loops compute the last elements of a tensor by other instructions than the rest, so the length of a
    tensor may change the last bit of an exponential.
    """
    for module in parent.children():
        if list(module.parameters()) or list(module.children()) or isinstance(module, nn.Dropout):
            continue
        own = module.forward

        def forward(x: Tensor, *args: Any, _own: Any = own, **kwargs: Any) -> Tensor:
            if not isinstance(x, Tensor) or x.shape[-1] != features:
                return _own(x, *args, **kwargs)
            parts = [part.contiguous() for part in shards(x, ranks, -1)]
            return torch.cat([_own(part, *args, **kwargs) for part in parts], -1)

        emulation.replace(module, forward)
