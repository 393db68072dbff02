"""Recognizes the formulas of norms and activation functions by running them, so that no list of classes is needed.

The outputs for a few numbers are compared with the formulas. Weights are neither read nor changed, so the model may be
on any device, including meta.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lowbit.activations.gated.reference import ACTIVATIONS
from lowbit.activations.recipes import Norm, plain_gated

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # for modules without such an attribute
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_NAMED = ("gelu", "silu")  # by name only in Transformers, such as Bloom's GELU: others may have their own backward
_NOT_ROWS = (nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)


def norm_like(module: nn.Module) -> Norm | None:
    """The formula of a norm over the last dimension; None for any other module."""
    if "norm" not in type(module).__name__.lower() or isinstance(module, _NOT_ROWS):
        return None
    own = dict(module.named_parameters(recurse=False))
    shape = getattr(module, "normalized_shape", None) or [len(p) for p in own.values()]
    if next(module.children(), None) or own.keys() - {"weight", "bias"} or len(set(shape)) != 1:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    weights = {name: numbers(shape[0]) for name in own}
    x = numbers(2, 3, shape[0]) + 1
    narrow = _try(module, weights, x.bfloat16())
    promotes = narrow is not None and narrow.dtype == torch.float32
    own_eps = [getattr(module, name) for name in _EPS if hasattr(module, name)]
    for eps in (*own_eps[:1], *_USUAL_EPS):
        if eps is None and not isinstance(module, nn.RMSNorm):
            continue
        for norm in (Norm(eps=eps), Norm(eps=eps, offset=1.0), Norm(eps=eps, centred=True)):
            if all(_computes(module, norm, weights, x, scale) for scale in (1.0, 1e-3, 1e-6)):
                return replace(norm, promotes=promotes)
    return None


def linear_like(module: nn.Module) -> bool:
    """Whether a module's own parameters are those of a linear layer."""
    own = dict(module.named_parameters(recurse=False))
    return "weight" in own and own["weight"].dim() == 2 and not isinstance(module, nn.Embedding)


def _computes(module: nn.Module, norm: Norm, weights: dict[str, Tensor], x: Tensor, scale: float) -> bool:
    """Whether a module is this norm for inputs of this scale; small ones reveal its epsilon and where it is added."""
    if "bias" in weights:  # a large bias would hide the rest
        weights = weights | {"bias": weights["bias"] * scale}
    y, x = _try(module, weights, x * scale), x * scale
    expected = norm.plain(x, weights.get("weight"), weights.get("bias"))
    if y is None or y.shape != x.shape:
        return False
    return torch.allclose(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def activation_like(module: nn.Module) -> str | None:
    """The name of the activation function if there is an operator for it, otherwise None."""
    kind, own = type(module), [*module.parameters(), *module.children()]
    named = kind.__module__.startswith("transformers.") and any(name in kind.__name__.lower() for name in _NAMED)
    if not (kind.__module__ in _ACTIVATIONS or (named and not own)) or getattr(module, "inplace", False):
        return None
    x = _samples()
    y = _try(module, {}, x)
    if y is None:
        return None
    for name in ACTIVATIONS:
        expected = plain_gated(x, None, name)
        if y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-5, atol=1e-5):
            return name
    return None


def _samples() -> Tensor:
    """A tensor (1, 3, 16) of small and large numbers that distinguishes all activations."""
    small, large = (torch.linspace(*ends, 24, dtype=torch.float32, device="cpu") for ends in ((-4, 4), (-99, 98)))
    return torch.stack([small, large], -1).view(1, 3, 16)


def _try(module: nn.Module, weights: dict[str, Tensor], *inputs: Tensor) -> Tensor | None:
    """A module's output for these inputs and weights, without any hooks; None if it raises an error."""
    no_hooks = [(part, name, type(getattr(part, name))()) for part in module.modules() for name in _HOOKS]
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"), _changed(no_hooks):
            y = functional_call(module, weights, inputs)
    except Exception:
        return None
    return y if isinstance(y, Tensor) else None


@contextlib.contextmanager
def _changed(attributes: list[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Give attributes of modules other values while the block runs."""
    before = [(module, name, vars(module).get(name)) for module, name, _ in attributes]
    for module, name, value in attributes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            if value is None:  # the attribute was the class's
                delattr(module, name)
            else:
                setattr(module, name, value)
