"""Handles functions of DTensors (tensor and sequence parallel) on each rank's shards.

If the shards of the result follow from those of the arguments without communication, as in a column-wise linear layer,
the handler gets the shards as plain tensors, and its result becomes a DTensor again. It saves what a plain layer of the
local shape saves. The gradients have the same placements as with DTensor's own functions.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from lowbit.activations.gated.reference import TABLE
from lowbit.activations.recipes import FEWEST, Recipe, attach, base_of, checkpoint_hook, recipe_of


@dataclass(frozen=True)
class Sharding:
    """Placements with which a function of DTensors can run on their shards.

    Attributes:
        gradients: placements of the gradient of each argument that is a DTensor.
        out: the placements of the result. shape: of the whole result.
        once: arguments that only one rank adds to partial sums.
    """

    gradients: dict[str, list[Any]]
    out: list[Any]
    shape: Sequence[int]
    once: tuple[str, ...] = ()


def on_shards(func: Any, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a handler of `func` on the shards, and return its result as a DTensor.

    If the shards alone do not suffice, it gets the DTensors themselves, which it leaves uncompressed and logs.
    """
    bound = inspect.signature(handler).bind(*args, **kwargs)
    tensors = {name: x for name, x in bound.arguments.items() if isinstance(x, Tensor)}
    rule = _RULES.get(func)
    meshes = {x.device_mesh if isinstance(x, DTensor) else None for x in tensors.values()}
    split = None
    if rule is not None and len(meshes) == 1 and None not in meshes:
        first, *others = map(_smallest, tensors.values())  # over all ranks, so that they decide the same
        split = rule(**tensors) if first >= FEWEST and 0 not in others else None
    if split is None:
        return handler(*args, **kwargs)
    parts = _shards(split, tensors)
    bound.arguments.update(parts)
    out = handler(*bound.args, **bound.kwargs)
    for part in parts.values():  # this view is freed now, and other functions of the DTensor get another one
        recipe = recipe_of(part)
        if recipe is not None:
            attach(base_of(part), recipe)
    if out is NotImplemented:
        return out
    shape, mesh = torch.Size(split.shape), next(iter(meshes))
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    whole = DTensor.from_local(out, mesh, split.out, run_check=False, shape=shape, stride=strides)
    # The node holds the recipe, because the life of a tensor may depend on Python's garbage collector, and ranks must
    # agree. Not in a checkpoint, where that would keep what the checkpoint drops.
    recipe = recipe_of(out)
    if recipe is not None and whole.grad_fn is not None and checkpoint_hook() is None:
        setattr(whole.grad_fn, _HELD, recipe)
    return whole


def _shards(split: Sharding, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's shard of each tensor, through which gradients flow."""
    found = {}
    for name, x in tensors.items():
        recipe = recipe_of(x._local_tensor) or _recipe_behind(x)
        if hasattr(x._local_tensor, "trigger_wait"):  # an asynchronous gather that has not ended
            x._local_tensor = x._local_tensor.wait()
        shard = x.to_local(grad_placements=split.gradients[name])
        if name in split.once and any(
            p.is_partial() and i for p, i in zip(split.out, x.device_mesh.get_coordinate(), strict=True)
        ):
            shard = shard - shard.detach()  # zeros, through which the gradient flows
        if recipe is not None:
            attach(shard, recipe)
        found[name] = shard
    return found


def _smallest(x: Any) -> int:
    """Number of elements of the smallest shard on any rank."""
    shape = list(x.shape)
    for count, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        if placement.is_shard():
            size = shape[placement.dim]
            shape[placement.dim] = max(0, size - -(-size // count) * (count - 1))
    return math.prod(shape)


def _linear(input: Any, weight: Any, bias: Any = None) -> Sharding | None:
    """Column-wise, row-wise and replicated layers, and sharded rows with a replicated weight (sequence parallel)."""
    if weight.dim() != 2:
        return None
    found = [_of_linear(*pair, input.dim() - 1) for pair in zip(input.placements, weight.placements, strict=True)]
    if None in found:
        return None
    out, grad_input, grad_weight, of_bias, grad_bias = (list(each) for each in zip(*found, strict=True))  # pyright: ignore
    if bias is not None and [*bias.placements] != of_bias:
        return None
    gradients = {"input": grad_input, "weight": grad_weight, "bias": grad_bias}
    return Sharding(gradients, out, (*input.shape[:-1], weight.shape[0]), once=("bias",))


def _of_linear(x: Any, weight: Any, last: int) -> tuple[Any, ...] | None:
    """Placements of the result, the gradients of x and weight, the bias and its gradient along a mesh dimension."""
    if x.is_replicate() and weight.is_replicate():
        return (Replicate(),) * 5
    if x.is_replicate() and weight.is_shard(0):
        return Shard(last), Partial(), weight, Shard(0), Shard(0)
    if x.is_shard(last) and weight.is_shard(1):
        return Partial(), x, weight, Replicate(), Replicate()
    if x.is_shard() and not x.is_shard(last) and weight.is_replicate():
        return x, x, Partial(), Replicate(), Partial()
    return None


def _norm(input: Any, weight: Any = None, bias: Any = None) -> Sharding | None:
    """Rows are sharded; weights are not."""
    own = {name: x for name, x in (("weight", weight), ("bias", bias)) if x is not None}
    if not _apart(input, input.dim() - 1) or not all(p.is_replicate() for x in own.values() for p in x.placements):
        return None
    grad = [Partial() if placement.is_shard() else placement for placement in input.placements]
    return Sharding({"input": [*input.placements], **dict.fromkeys(own, grad)}, [*input.placements], input.shape)


def _elementwise(input: Any, other: Any = None) -> Sharding | None:
    """Each element of the result depends only on those in the same place."""
    same = other is None or (other.placements == input.placements and other.shape == input.shape)
    if not same or not _apart(input):
        return None
    placements = [*input.placements]
    return Sharding(dict.fromkeys(("input", "other"), placements), placements, input.shape)


def _attention(query: Any, key: Any, value: Any) -> Sharding | None:
    """Samples or heads are sharded."""
    same = query.placements == key.placements == value.placements
    if not same or not _apart(query, query.dim() - 1, query.dim() - 2):
        return None
    placements, shape = [*query.placements], (*query.shape[:-1], value.shape[-1])
    return Sharding(dict.fromkeys(("query", "key", "value"), placements), placements, shape)


def _apart(x: Any, *whole: int) -> bool:
    """Whether a tensor is replicated, or sharded only along dimensions other than these."""
    return all(p.is_replicate() or (p.is_shard() and p.dim not in whole) for p in x.placements)


_RULES: dict[Any, Callable[..., Sharding | None]] = {
    functional.linear: _linear,
    functional.layer_norm: _norm,
    functional.rms_norm: _norm,
    functional.scaled_dot_product_attention: _attention,
    **{spelling: _elementwise for activation in TABLE.values() for spelling in activation.spellings},
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), _elementwise),
    "norm": _norm,
    "mlp": _elementwise,
}
"""Rules by function, or by the layer type of a module that is replaced."""


_HELD = "lowbit_recipe"


def _recipe_behind(x: Any) -> Recipe | None:
    """The recipe of a DTensor that was gathered from shards with recipes: rebuild the shards and gather them again.

    Thus a norm's output is not saved under sequence parallel either. All ranks gather or none, in the same order,
    because backward passes on the ranks of a mesh are alike.
    """
    node, placements, source = x.grad_fn, [*x.placements], None
    while node is not None:
        recipe: Recipe | None = getattr(node, _HELD, None)
        if recipe is not None:
            if source is None or not recipe.holds():
                return None
            return recipe.derived(torch.Size((-1,)), functools.partial(_gather, source))
        name = node.name()
        if name == "RedistributeBackward":
            spec: Any = node.current_spec
            if [*spec.placements] != placements:
                ways = [p for p in spec.placements if not p.is_replicate()]
                gathers = all(p.is_replicate() for p in placements) and len(ways) == 1 and ways[0].is_shard()
                if source is not None or not gathers:
                    return None
                source, placements = spec, [*spec.placements]
        elif name == "_ToTorchTensorBackward":
            placements = [*node.dtensor_spec.placements]
        elif name not in ("_FromTorchTensorBackward", "AliasBackward0"):
            return None
        node = node.next_functions[0][0]
    return None


def _gather(spec: Any, x: Tensor) -> Tensor:
    shape, dim = spec.tensor_meta.shape, next(p.dim for p in spec.placements if p.is_shard())
    x = x.reshape(*shape[:dim], -1, *shape[dim + 1 :])
    whole = DTensor.from_local(
        x, spec.mesh, spec.placements, run_check=False, shape=shape, stride=spec.tensor_meta.stride
    )  # fmt: skip
    return whole.full_tensor()
