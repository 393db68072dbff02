"""The forward passes that `compress_saved_` puts in place of modules' own.

Where autograd would keep nothing (no gradients wanted, evaluation mode), or the tensors are of a kind that no codec
takes, the module's own forward runs. `torch.compile` leaves these functions out of its graphs.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.activations.functions import GatedFunction, LinearFunction, NormFunction
from lowbit.activations.recipes import (
    FEWEST,
    GatedOutput,
    Itself,
    Kept,
    NormOutput,
    Rebuilt,
    Recipe,
    attach,
    itself,
    plain_gated,
    recipe_of,
    room,
    takes,
)
from lowbit.activations.structure import FeedForward, NormLike, passive
from lowbit.codecs import GroupInt

log = logging.getLogger(__name__)

_eager = torch.compiler.disable(
    reason="lowbit.activations shares what is kept between modules, which graphs do not see"
)
_VIEWS = ("View", "Transpose", "Permute", "Clone", "ToCopy", "Squeeze")


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """How a module is replaced: what it is, its own forward, and the format of what it keeps."""

    kind: str
    own: Callable[..., Any]
    codec: GroupInt | None
    what: Any = None
    in_attention: bool = False


Forward = Callable[[Any, Layer, Tensor], Tensor]


def _of_one_tensor(forward: Forward) -> Callable[..., Any]:
    """A forward for calls with one tensor, of which something would be kept; the module's own for all others."""

    @functools.wraps(forward)
    def called(module: Any, layer: Layer, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor):
            return layer.own(*args, **kwargs)
        named_right = not kwargs or [*kwargs] == [*inspect.signature(layer.own).parameters][:1]
        if not named_right or not _keeps(module, layer, given[0]):
            return layer.own(*args, **kwargs)
        return forward(module, layer, given[0])

    return _eager(called)


@_of_one_tensor
def norm_forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
    """A norm over the last dimension; the layers that follow find out how to get its output.

    What a linear layer has kept of `x` before serves the norm, too, unless it has fewer bits: then both are kept.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    like: NormLike = layer.what
    known = itself(x, layer.codec)
    kept, codec = known or ((room(layer.codec, x),), layer.codec)
    form = NormOutput(x.shape, codec, like.norm, like.norm.eps_of(x))
    out = NormFunction.apply(x, weight, bias, form, kept, known is None, _norm_dtype(module, like, x))
    if known is None and recipe_of(x) is None:
        attach(x, Recipe(Itself(x.numel(), codec), kept, weak=True))
    _tell(out, Recipe(form, (*kept, weight, bias)))
    return out


@_of_one_tensor
def linear_forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
    """A linear layer, which keeps its input unless something that it follows from is kept already."""
    dtype = _compute_dtype(x)
    rebuilt, kept = None, ()
    if module.weight.requires_grad:
        rebuilt, kept = _input_of(layer, x, dtype)
    return LinearFunction.apply(x, module.weight, module.bias, layer.what, dtype, rebuilt, kept)


@_of_one_tensor
def activation_forward(module: nn.Module, layer: Layer, x: Tensor) -> Tensor:
    """An activation function by itself."""
    return gated(layer, x, None)


@_of_one_tensor
def feed_forward_forward(module: nn.Module, layer: Layer, x: Tensor) -> Tensor:
    """A feed-forward block: its linear layers as they are, activation and product in one."""
    parts: FeedForward = layer.what
    if not passive(module, parts):
        return layer.own(x)
    gate = module.get_submodule(parts.gate)(x)
    up = None if parts.up is None else module.get_submodule(parts.up)(x)
    product = gated(layer, gate, up)
    # A step's memory is highest here: these need not be there while the last layer runs.
    del gate, up
    return module.get_submodule(parts.down)(product)


def gated(layer: Layer, gate: Tensor, up: Tensor | None) -> Tensor:
    """act(gate) * up, or act(gate); the layer that follows finds out how to get it."""
    activation = layer.what.activation if isinstance(layer.what, FeedForward) else layer.what
    # Without gradients to compute here, the product is all that is needed, and by the layer that follows alone.
    wanted = gate.requires_grad or (up is not None and up.requires_grad)
    if not wanted or not takes(gate, up) or gate.numel() < FEWEST:
        dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
        return plain_gated(gate, up, activation).to(dtype)
    kept = (room(layer.codec, gate), None if up is None else room(layer.codec, up))
    form = GatedOutput(gate.shape, layer.codec, activation)
    out = GatedFunction.apply(gate, up, form, kept)
    _tell(out, Recipe(form, kept))
    return out


def _tell(out: Tensor, recipe: Recipe) -> None:
    """Tell whoever is about to save an output how to get it, as long as there is a backward to come."""
    attach(out, recipe)
    recipe.until_backward(out.grad_fn)


def _keeps(module: nn.Module, layer: Layer, x: Tensor) -> bool:
    """Whether autograd is going to keep something here that can be kept in few bits."""
    if not torch.is_grad_enabled():
        return False
    if not (x.requires_grad or any(p.requires_grad for p in module.parameters())):
        return False
    if not module.training:
        say_once(
            "a model with compressed activations runs in evaluation mode with gradients enabled: what is kept there "
            "is kept in full; call model.train() to train it, or use torch.no_grad() to evaluate it"
        )
        return False
    tensors = (x, *module.parameters(recurse=False))
    if x.numel() < FEWEST:
        return False
    if not takes(*tensors):
        kinds = sorted({f"{type(t).__name__} of {t.dtype}" for t in tensors if not takes(t)})
        say_once(f"activations of {layer.kind} layers are kept in full where they are {kinds}")
        return False
    # PyTorch refuses most mixtures of dtypes here: its own functions shall say so.
    takes_all = layer.kind != "linear" and not isinstance(module, nn.LayerNorm)
    return takes_all or torch.is_autocast_enabled(x.device.type) or len({t.dtype for t in tensors}) == 1


def _input_of(layer: Layer, x: Tensor, dtype: torch.dtype) -> tuple[Rebuilt, Kept]:
    """How a linear layer gets its input back, and the tensors for it."""
    # What attention returns is saved by attention's kernel as it is, so keeping it costs nothing.
    whole = layer.codec is None or layer.in_attention or _from_attention(x)
    own = Itself(x.numel(), None if whole else layer.codec)
    recipe = recipe_of(x)
    if recipe is None or (isinstance(recipe.form, Itself) and recipe.form.bits < own.bits):
        kept: Kept = (x.to(dtype) if whole else room(own.codec, x),)
        if own.codec is not None:
            with torch.no_grad():
                own.codec.encode(x, out=kept[0])
        recipe = Recipe(own, kept, weak=True)
        attach(x, recipe)
    else:
        kept = recipe.kept() or ()
    recipe.rebuilt.users += 1
    return recipe.rebuilt, kept


def _from_attention(x: Tensor) -> bool:
    """Whether `x` is a view of what an attention kernel returned."""
    node = x.grad_fn
    for _ in range(8):
        if node is None:
            return False
        name = node.name()
        if "Attention" in name or not any(view in name for view in _VIEWS):
            return "Attention" in name
        node = node.next_functions[0][0]
    return False


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product computes in: autocast's dtype where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _norm_dtype(module: nn.Module, like: NormLike, x: Tensor) -> torch.dtype:
    """What the module itself returns."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and isinstance(module, _FLOAT32_ON_CUDA):
        return torch.float32
    weight = getattr(module, "weight", None)
    if like.promotes and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


_FLOAT32_ON_CUDA = (nn.LayerNorm, nn.RMSNorm)  # autocast computes them so


@functools.cache
def say_once(text: str) -> None:
    """A line in the log, the first time."""
    log.warning(text)
