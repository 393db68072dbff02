"""Recognizes the formulas of modules by running them, so that no list of classes is needed.

The outputs of norms and activation functions for a few numbers are compared with the formulas. In a feed-forward block
the linear layers are replaced by stubs, and the input of the last one is compared. Weights are neither read nor
changed, so the model may be on any device, the meta device included.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
_ATTENTION = re.compile("attention|attn", re.I)
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_NOT_ROWS = (nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """down(act(gate(x)) * up(x)), or down(act(gate(x))): names of the linear layers, and the activation."""

    gate: str
    up: str | None
    down: str
    activation: str


def linear_like(module: nn.Module) -> bool | None:
    """Whether a linear layer's weight is stored as (inputs, outputs); None: not a linear layer."""
    if "forward" in vars(module):  # an instance's own, which may compute anything
        return None
    cls = type(module)
    if isinstance(module, nn.Linear):
        return False if cls.forward is nn.Linear.forward else None
    return True if (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D") else None


def norm_like(module: nn.Module) -> Norm | None:
    """The formula of a norm over the last dimension; None: something else."""
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


def _computes(module: nn.Module, norm: Norm, weights: dict[str, Tensor], x: Tensor, scale: float) -> bool:
    """Whether a module is this norm for inputs of this scale: small ones show its epsilon, and where it is added."""
    if "bias" in weights:  # a large bias would hide the rest
        weights = weights | {"bias": weights["bias"] * scale}
    y, x = _try(module, weights, x * scale), x * scale
    expected = norm.plain(x, weights.get("weight"), weights.get("bias"))
    if y is None or y.shape != x.shape:
        return False
    return torch.allclose(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def activation_like(module: nn.Module) -> str | None:
    """The name of the activation function, if there is an operator for it; None: something else."""
    if type(module).__module__ not in _ACTIVATIONS or getattr(module, "inplace", False):
        return None
    x = _samples()[0]
    y = _try(module, {}, x)
    return None if y is None else _activation(y, x, None)


def feed_forward(module: nn.Module) -> FeedForward | None:
    """The linear layers and the activation of a feed-forward block; None: something else."""
    linears = [name for name, child in module.named_children() if _has_features(child)]
    if len(linears) not in (2, 3) or is_attention(module) or _has_more(module, linears):
        return None
    outputs = dict(zip(linears, _samples(), strict=False))
    x = torch.zeros_like(outputs[linears[0]])
    inputs: dict[str, Tensor] = {}

    def stub(name: str) -> Any:
        def forward(x: Tensor) -> Tensor:
            inputs[name] = x
            return outputs[name]

        return forward

    stubs = [(module.get_submodule(name), "forward", stub(name)) for name in linears]
    training = [(part, "training", True) for part in module.modules()]  # dropout then shows
    with _changed([*stubs, *training]), torch.random.fork_rng(devices=[]):
        y = _try(module, {}, x)
    last = [name for name, value in inputs.items() if value is not x]
    if y is None or len(inputs) != len(linears) or len(last) != 1 or y is not outputs[last[0]]:
        return None
    first = [name for name in linears if name != last[0]]
    for gate, up in ((first[0], first[1:]), (first[-1], first[:-1])):
        other = up[0] if up else None
        activation = _activation(inputs[last[0]], outputs[gate], outputs[other] if other else None)
        if activation:
            return FeedForward(gate=gate, up=other, down=last[0], activation=activation)
    return None


def _has_more(module: nn.Module, linears: list[str]) -> bool:
    """Whether a block has parts that may change its formula later: tensors of its own, children of other kinds.

    Dropout is allowed while it does nothing, which every call checks (`passive`).
    """
    rest = [child for name, child in module.named_children() if name not in linears]
    known = all(isinstance(child, nn.Identity | nn.Dropout) or type(child).__module__ in _ACTIVATIONS for child in rest)
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not known or bool(tensors) or any([*c.parameters(), *c.buffers()] for c in rest)


def passive(module: nn.Module, parts: FeedForward) -> bool:
    """Whether a feed-forward block computes nothing but the formula: no dropout, and no hooks on its activation.

    Hooks on its linear layers are called as usual, and those of this library only watch.
    """
    for name, child in module.named_children():
        if name in (parts.gate, parts.up, parts.down):
            continue
        if isinstance(child, nn.Dropout) and child.training and child.p > 0:
            return False
        hooks = [hook for kind in _HOOKS for hook in getattr(child, kind).values()]
        if not all(getattr(hook, "__module__", "").startswith("lowbit.activations") for hook in hooks):
            return False
    return True


def is_attention(module: nn.Module) -> bool:
    """Whether a module is attention, by its class's name."""
    return bool(_ATTENTION.search(type(module).__name__))


def in_attention(name: str, model: nn.Module) -> bool:
    """Whether the module of this name lies inside attention, by the names and classes around it."""
    parts = name.split(".")[:-1]
    above = [model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts))]
    return any(map(_ATTENTION.search, parts)) or any(map(is_attention, above))


def _has_features(module: nn.Module) -> bool:
    """Whether a module is a linear layer or an adapter around one."""
    return linear_like(module) is not None or all(hasattr(module, name) for name in ("in_features", "out_features"))


def _samples() -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors (1, 3, 16) that tell all activations apart: small numbers beside large ones."""
    small, large = (torch.linspace(*ends, 24, dtype=torch.float32, device="cpu") for ends in ((-4, 4), (-99, 98)))
    x = torch.stack([small, large], -1).view(1, 3, 16)
    return x, x.flip(1, 2) * 1.7 + 0.3, x.flip(1) * 0.6 - 0.7


def _activation(y: Tensor, gate: Tensor, up: Tensor | None) -> str | None:
    for name in ACTIVATIONS:
        expected = plain_gated(gate, up, name)
        if y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-5, atol=1e-5):
            return name
    return None


def _try(module: nn.Module, weights: dict[str, Tensor], *inputs: Tensor) -> Tensor | None:
    """A module's output for these inputs and weights, without anybody's hooks; None if it raises an error."""
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
            if value is None:  # it was the class's
                delattr(module, name)
            else:
                setattr(module, name, value)
