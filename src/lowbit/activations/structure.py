"""Recognizes the formulas of norms and activation functions by running them, so that no list of classes is needed.

The outputs for a few numbers are compared with the formulas. Weights are neither read nor changed, so the model may be
on any device, including meta.

An activation function without an operator is recognized if it is elementwise, because backward can call it again.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowbit.activations.gated.reference import TABLE
from lowbit.activations.recipes import Formula, Norm

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # for modules without such an attribute
_NOT_ROWS = (nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)


def norm_like(module: nn.Module) -> Norm | None:
    """The formula of a norm over the last dimension; None for any other module."""
    if "norm" not in type(module).__name__.lower() or isinstance(module, _NOT_ROWS):
        return None
    own = dict(module.named_parameters(recurse=False))
    shape = getattr(module, "normalized_shape", None) or [len(p) for p in own.values()]
    if next(module.children(), None) or own.keys() - {"weight", "bias"} or len(set(shape)) != 1:
        return None
    # Not the global generator: compressing a model must not change its random numbers.
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
    expected = norm.in_float32(x, weights.get("weight"), weights.get("bias"))
    if y is None or y.shape != x.shape:
        return False
    return torch.allclose(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def activation_like(module: nn.Module) -> Formula | None:
    """The activation function that a module computes: its name, if there are kernels, or its forward; otherwise None.

    The module must have no parameters, buffers or other state, so that backward can run it again.
    """
    if "forward" in vars(module) or isinstance(module, nn.Sequential) or [*module.parameters(), *module.buffers()]:
        return None
    public = [value for part in module.modules() for name, value in vars(part).items() if not name.startswith("_")]
    if any(isinstance(each, Tensor | nn.Module) for each in tree_leaves(public)):  # a copy might copy a whole model
        return None
    try:
        twin = copy.deepcopy(module).train()
        before = _state(twin)
        with _changed(_no_hooks(twin)):
            found = _elementwise(twin)
        if found is None or _state(twin) != before:
            return None
    except Exception:
        return None
    name = _name_of(*found)
    if name is None:
        return module.forward
    return None if [*module.children()] else name  # its children are recognized by themselves


def is_activation(function: Callable[..., Any]) -> bool:
    """Whether a function of one tensor is an activation function, which backward can call again."""
    try:
        return _elementwise(function) is not None
    except Exception:
        return False


def _elementwise(function: Callable[..., Any]) -> tuple[Tensor, Tensor] | None:
    """Values and slopes of an elementwise function of `_samples`; None for any other, and if PyTorch saves no input.

    Raises whatever the function raises, and TypeError if it calls an operator that may not be elementwise.
    """
    saved: list[Tensor] = []
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(action="ignore"):
        x = _samples()
        leaf, order = x.clone().requires_grad_(), torch.arange(x.numel(), device="cpu").flip(0).roll(5)
        moved = x.view(-1)[order]
        with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), _Pointwise():
            y = function(leaf)
            others = function(x), function(moved)
        tensors = isinstance(y, Tensor) and y.shape == x.shape and y.is_floating_point()
        if not tensors or not y.requires_grad or any(other.requires_grad for other in others):
            return None
        expected = y.detach(), y.detach().reshape(-1)[order]
        if not all(map(partial(torch.allclose, rtol=1e-5, atol=1e-5, equal_nan=True), others, expected)):
            return None
        if not any(t.is_floating_point() and t.numel() >= x.numel() for t in saved):
            return None
        (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        return y.detach(), slope


class _Pointwise(TorchDispatchMode):
    """Refuses operators that are random or mix elements, before they run: none of them sends or waits for anything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_known = torch.Tag.pointwise in func.tags or func.is_view or func.overloadpacket in _ALSO
        if not is_known or torch.Tag.nondeterministic_seeded in func.tags:
            raise TypeError(f"{func} may not be elementwise")
        return func(*args, **(kwargs or {}))


_aten = torch.ops.aten
_ALSO = (
    _aten._to_copy, _aten.hardswish, _aten.log_sigmoid_forward, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.zeros, _aten.ones, _aten.full, _aten.scalar_tensor,
)  # fmt: skip
"""Elementwise operators, and constants, without PyTorch's tag."""


def _state(module: nn.Module) -> list[dict[str, Any]]:
    """The attributes of a module and its children, with copies of those that may change."""
    kinds = (list, dict, set)
    parts = [vars(part) for part in module.modules()]
    return [{n: copy.copy(v) if isinstance(v, kinds) else v for n, v in part.items()} for part in parts]


def _name_of(value: Tensor, slope: Tensor) -> str | None:
    """The name of the function in the table that has these values and slopes; None: it has no operator."""
    x, close = _samples(), partial(torch.allclose, rtol=1e-5, atol=1e-5)
    one = torch.ones_like(x)
    pairs = ((name, (value, each.value(x)), (slope, each.gradient(one, x))) for name, each in TABLE.items())
    return next((name for name, values, slopes in pairs if close(*values) and close(*slopes)), None)


def _samples() -> Tensor:
    """A tensor (1, 3, 16) of small and large numbers that distinguishes all activations."""
    small, large = (torch.linspace(*ends, 24, dtype=torch.float32, device="cpu") for ends in ((-4, 4), (-99, 98)))
    return torch.stack([small, large], -1).view(1, 3, 16)


def _try(module: nn.Module, weights: dict[str, Tensor], *inputs: Tensor) -> Tensor | None:
    """A module's output for these inputs and weights, without any hooks; None if it raises an error."""
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"), _changed(_no_hooks(module)):
            y = functional_call(module, weights, inputs)
    except Exception:
        return None
    return y if isinstance(y, Tensor) else None


def is_observed(module: nn.Module) -> bool:
    """Whether parts of a module have hooks that are not this library's, which must not run again in backward."""
    parts = (part for child in module.children() for part in child.modules())
    hooks = (hook for part in parts for kind in _HOOKS for hook in getattr(part, kind).values())
    return any(not getattr(hook, "__module__", "").startswith("lowbit.activations") for hook in hooks)


def _no_hooks(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [(part, name, type(getattr(part, name))()) for part in module.modules() for name in _HOOKS]


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
