"""The forward passes that `compress_saved_` puts in place of modules' own.

Where autograd saves nothing (no gradients, evaluation mode), or no codec takes the tensors, the module's own forward
runs. `torch.compile` leaves these functions out of its graphs.
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

from lowbit.activations.checkpoint import after_linear, first_pass
from lowbit.activations.functions import GatedFunction, LinearFunction, NormFunction
from lowbit.activations.recipes import (
    FEWEST,
    GatedOutput,
    Itself,
    Norm,
    NormOutput,
    Rebuilt,
    Recipe,
    SavedTensors,
    attach,
    itself,
    plain_gated,
    recipe_of,
    room,
    takes,
)
from lowbit.activations.structure import FeedForward, passive
from lowbit.codecs import GroupInt

log = logging.getLogger(__name__)

_eager = torch.compiler.disable(
    reason="lowbit.activations shares what is saved between modules, which graphs do not see"
)
_VIEWS = ("View", "Transpose", "Permute", "Clone", "ToCopy", "Squeeze")


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """How a module's forward is replaced: the layer type, the module's own forward, the format of saved activations.

    `formula`: parameters of the new forward: `Norm`, whether a linear layer's weight is transposed, the name of an
    activation, `FeedForward`, or a `LayerAware` for attention.
    """

    kind: str
    own: Callable[..., Any]
    codec: GroupInt | None
    formula: Any = None
    in_attention: bool = False


def _of_one_tensor(forward: Callable[[Any, Layer, Tensor], Tensor]) -> Callable[..., Any]:
    """A forward for calls with one tensor that save something for backward; the module's own for all others."""

    @functools.wraps(forward)
    def called(module: Any, layer: Layer, *args: Any, **kwargs: Any) -> Any:
        inputs = [*args, *kwargs.values()]
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            return layer.own(*args, **kwargs)
        named_right = not kwargs or [*kwargs] == [*inspect.signature(layer.own).parameters][:1]
        if not named_right or not _saves(module, layer, inputs[0]):
            return layer.own(*args, **kwargs)
        return forward(module, layer, inputs[0])

    return _eager(called)


@_of_one_tensor
def norm_forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
    """A norm over the last dimension; attaches a recipe to its output for the layers that follow.

    A payload of `x` that a linear layer has saved serves the norm, too, unless it has fewer bits: then both are saved.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    norm: Norm = layer.formula
    known = itself(x, layer.codec)
    saved, codec = known or ((room(layer.codec, x),), layer.codec)
    form = NormOutput(x.shape, codec, norm, norm.eps_of(x))
    out = NormFunction.apply(x, weight, bias, form, saved, known is None, _norm_dtype(module, norm, x))
    if known is None and recipe_of(x) is None:
        attach(x, Recipe(Itself(x.numel(), codec), saved, weak=True))
    _attach_until_backward(out, Recipe(form, (*saved, weight, bias)))
    return out


@_of_one_tensor
def linear_forward(module: Any, layer: Layer, x: Tensor) -> Tensor:
    """A linear layer, which saves its input unless that has a recipe."""
    dtype = _compute_dtype(x)
    rebuilt, saved = None, ()
    if module.weight.requires_grad:
        rebuilt, saved = _input_of(layer, x, dtype)
    return after_linear(LinearFunction.apply(x, module.weight, module.bias, layer.formula, dtype, rebuilt, saved))


@_of_one_tensor
def activation_forward(module: nn.Module, layer: Layer, x: Tensor) -> Tensor:
    """An activation function by itself."""
    return gated(layer, x, None)


@_of_one_tensor
def feed_forward_forward(module: nn.Module, layer: Layer, x: Tensor) -> Tensor:
    """A feed-forward block: its linear layers as they are, activation and product in one."""
    parts: FeedForward = layer.formula
    if not passive(module, parts):
        return layer.own(x)
    gate = module.get_submodule(parts.gate)(x)
    up = None if parts.up is None else module.get_submodule(parts.up)(x)
    product = gated(layer, gate, up)
    # A step's memory is highest here: free these before the last layer runs.
    del gate, up
    return module.get_submodule(parts.down)(product)


def gated(layer: Layer, gate: Tensor, up: Tensor | None) -> Tensor:
    """act(gate) * up, or act(gate); attaches a recipe to it for the layer that follows."""
    activation = layer.formula.activation if isinstance(layer.formula, FeedForward) else layer.formula
    # Without gradients to compute here, only the layer that follows saves anything: the product.
    needs_backward = gate.requires_grad or (up is not None and up.requires_grad)
    if not needs_backward or not takes(gate, up) or gate.numel() < FEWEST:
        dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
        return plain_gated(gate, up, activation).to(dtype)
    saved = (room(layer.codec, gate), None if up is None else room(layer.codec, up))
    form = GatedOutput(gate.shape, layer.codec, activation)
    out = GatedFunction.apply(gate, up, form, saved)
    _attach_until_backward(out, Recipe(form, saved))
    return out


def _attach_until_backward(out: Tensor, recipe: Recipe) -> None:
    attach(out, recipe)
    recipe.until_backward(out.grad_fn)


def _saves(module: nn.Module, layer: Layer, x: Tensor) -> bool:
    """Whether autograd would save something here that can be saved in few bits."""
    if not torch.is_grad_enabled() or not (x.requires_grad or any(p.requires_grad for p in module.parameters())):
        return False
    if not module.training:
        say_once(
            "a model with compressed activations runs in evaluation mode with gradients enabled: activations are saved "
            "in full there; call model.train() to train it, or use torch.no_grad() to evaluate it"
        )
        return False
    if x.numel() < FEWEST:
        return False
    tensors = (x, *module.parameters(recurse=False))
    if not takes(*tensors):
        kinds = sorted({f"{type(t).__name__} of {t.dtype}" for t in tensors if not takes(t)})
        say_once(f"activations of {layer.kind} layers are saved in full where they are {kinds}")
        return False
    # PyTorch refuses most mixtures of dtypes here: leave the error to its own functions.
    takes_all = layer.kind != "linear" and not isinstance(module, nn.LayerNorm)
    return takes_all or torch.is_autocast_enabled(x.device.type) or len({t.dtype for t in tensors}) == 1


def _input_of(layer: Layer, x: Tensor, dtype: torch.dtype) -> tuple[Rebuilt, SavedTensors]:
    """How a linear layer rebuilds its input, and from which tensors."""
    # Attention's kernel saves its output as it is, so saving that again costs nothing.
    whole = layer.codec is None or layer.in_attention or _from_attention(x)
    own = Itself(x.numel(), None if whole else layer.codec)
    recipe = recipe_of(x)
    if recipe is None or (isinstance(recipe.form, Itself) and recipe.form.bits < own.bits):
        saved: SavedTensors = (x.to(dtype) if whole else room(own.codec, x),)
        if own.codec is not None and not first_pass():
            with torch.no_grad():
                own.codec.encode(x, out=saved[0])
        recipe = Recipe(own, saved, weak=True)
        attach(x, recipe)
    else:
        saved = recipe.saved() or ()
    recipe.rebuilt.users += 1
    return recipe.rebuilt, saved


def _from_attention(x: Tensor) -> bool:
    """Whether `x` is a view of an attention kernel's output."""
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
    """The dtype of a matrix product: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _norm_dtype(module: nn.Module, norm: Norm, x: Tensor) -> torch.dtype:
    """The dtype of the module's own output."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and isinstance(module, _FLOAT32_ON_CUDA):
        return torch.float32
    weight = getattr(module, "weight", None)
    if norm.promotes and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


_FLOAT32_ON_CUDA = (nn.LayerNorm, nn.RMSNorm)  # autocast computes them so


@functools.cache
def say_once(text: str) -> None:
    """Log a line, the first time."""
    log.warning(text)
