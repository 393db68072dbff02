"""Mixture-of-experts layers with the weights of all experts in one tensor, as Hugging Face writes them.

Recognized by what they compute for a few tokens with small weights: any class whose forward takes hidden states, and
indices and weights of the chosen experts, however it computes (a loop, batched or grouped products).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.activations import structure
from lowbit.activations.experts_function import ExpertsFunction, Form, Gate
from lowbit.activations.experts_products import Routing
from lowbit.activations.follow import MARK, Call, Layer, large_enough
from lowbit.activations.gated.reference import ACTIVATIONS
from lowbit.activations.policy import LayerAware
from lowbit.activations.recipes import plain_gated

_UP, _DOWN = ("gate_up_proj", "up_proj"), "down_proj"
_TOKENS, _CHOICES, _INPUTS, _INNER = 12, 2, 24, 8  # of the layer that is tried; some kernels want multiples of 4


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A layer's formula: names of the weights, whether they are (E, inputs, outputs), and the gate."""

    up: str
    down: str
    transposed: bool
    gate: Gate

    def weights(self, module: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """First weights, their biases, last weights, their biases."""
        up, down = getattr(module, self.up), getattr(module, self.down)
        return up, getattr(module, f"{self.up}_bias", None), down, getattr(module, f"{self.down}_bias", None)


def experts_like(module: nn.Module) -> Experts | None:
    """The formula of a mixture-of-experts layer; None: something else."""
    own = dict(module.named_parameters(recurse=False))
    up = next((name for name in _UP if name in own), "")
    biases = {f"{name}_bias" for name in (up, _DOWN)}
    if _DOWN not in own or own.keys() not in ({up, _DOWN}, {up, _DOWN, *biases}) or "forward" in vars(module):
        return None
    inside = [t for child in module.children() for t in (*child.parameters(), *child.buffers())]
    if inside or [*module.buffers(recurse=False)] or {own[up].dim(), own[_DOWN].dim()} != {3}:
        return None
    for transposed in (False, True):
        outputs, inner = own[up].shape[2 if transposed else 1], own[_DOWN].shape[1 if transposed else 2]
        gate = _gate(module, outputs == 2 * inner) if outputs in (inner, 2 * inner) else None
        if gate is not None:
            experts = Experts(up=up, down=_DOWN, transposed=transposed, gate=gate)
            if all(_computes(module, experts, scale) for scale in (0.1, 1.0)):
                return experts
    return None


def _gate(module: Any, has_up: bool) -> Gate | None:
    """What comes between the products; None: unknown."""
    act: Any = getattr(module, "act_fn", None)
    formula: Any = getattr(module, "_apply_gate", functools.partial(_first_half_gates, act)) if has_up else act
    gate = structure._samples()
    up = gate.flip(1, 2) * 1.7 + 0.3 if has_up else None
    try:
        with torch.no_grad():
            value = formula(gate if up is None else torch.cat([gate, up], -1))
    except Exception:
        return None
    if not isinstance(value, Tensor) or value.shape != gate.shape:
        return None
    known = ((name, plain_gated(gate, up, name)) for name in ACTIVATIONS)
    activation = next((name for name, y in known if torch.allclose(value, y, rtol=1e-5, atol=1e-5)), None)
    return Gate(formula=formula, activation=activation, has_up=has_up)


def _first_half_gates(act: Callable[[Tensor], Tensor], pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return act(gate) * up


def _computes(module: nn.Module, experts: Experts, scale: float) -> bool:
    """Whether a module is these experts, for weights of this scale."""
    numbers = functools.partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    outputs, count = _INNER * (2 if experts.gate.has_up else 1), len(getattr(module, experts.up))
    sizes = {experts.up: (_INPUTS, outputs), experts.down: (_INNER, _INPUTS)}
    small = {
        name: numbers(count, *(size if experts.transposed else size[::-1])) * scale for name, size in sizes.items()
    }
    small |= {
        f"{name}_bias": numbers(count, size[1]) for name, size in sizes.items() if hasattr(module, f"{name}_bias")
    }
    x, weights = numbers(_TOKENS, _INPUTS), numbers(_TOKENS, _CHOICES)
    index = torch.arange(_TOKENS * _CHOICES, device="cpu").view(_TOKENS, _CHOICES) % count
    training = [(part, "training", True) for part in module.modules()]  # dropout then shows
    with structure._changed(training), torch.random.fork_rng(devices=[]):
        y = structure._try(module, small, x, index, weights)
    routing = Routing.of(index, count)
    if y is None or y.shape != x.shape or routing is None:
        return False
    form = Form(gate=experts.gate, codec=None, transposed=experts.transposed, dtype=torch.float32)
    first, last = ((small[name], small.get(f"{name}_bias")) for name in sizes)
    with torch.no_grad():
        expected = ExpertsFunction.apply(x, weights, *first, *last, form, routing, None, ())
    return torch.allclose(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def experts(name: str, module: nn.Module, model: nn.Module, policy: LayerAware) -> Any:
    """Layer type, forward and its parameters for a mixture-of-experts layer, and for what lies inside one."""
    if formula := experts_like(module):
        return "mlp", _run, formula
    above = vars(model.get_submodule(name.rpartition(".")[0])).get(MARK) if name else None
    return ("", _run_as_it_is, None) if above is not None and above.forward in (_run, _run_as_it_is) else None


def _run(module: Any, layer: Layer, *args: Any, **kwargs: Any) -> Any:
    """A mixture-of-experts layer that saves hidden states, once, and what the gate gets, in few bits."""
    formula: Experts = layer.formula
    call = Call(layer.own, module, layer)
    inputs = _inputs(layer.own, args, kwargs)
    routing = None
    if inputs is not None and _is_passive(module):
        routing = _routing(call, formula, *inputs)
    if inputs is None or routing is None:
        return layer.own(*args, **kwargs)
    x, _, weights = inputs
    up, up_bias, down, down_bias = formula.weights(module)
    dtype = _compute_dtype(module, x, up)
    form = Form(gate=formula.gate, codec=layer.codec, transposed=formula.transposed, dtype=dtype)
    with call.handled(*args, **kwargs), torch._C.DisableTorchFunction():
        rebuilt, saved = call.source(x, dtype) if up.requires_grad else (None, ())
        out = ExpertsFunction.apply(x, weights, up, up_bias, down, down_bias, form, routing, rebuilt, saved)
    return call.returned(out)


def _run_as_it_is(module: Any, layer: Layer, *args: Any, **kwargs: Any) -> Any:
    """What lies between the products: backward runs it again, in full precision."""
    with torch._C.DisableTorchFunction():
        return layer.own(*args, **kwargs)


def _inputs(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """Hidden states (N, I), indices and weights (N, K) of a call; None: another kind of call."""
    if kwargs:
        try:
            args = tuple(inspect.signature(own).bind(*args, **kwargs).arguments.values())
        except TypeError:  # the module's own forward says so
            return None
    if len(args) != 3 or not all(isinstance(t, Tensor) and t.dim() == 2 for t in args):
        return None
    x, index, weights = args
    fits = index.shape == weights.shape and len(x) == len(index) and not index.is_floating_point()
    return (x, index, weights) if fits else None


def _routing(call: Call, formula: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Routing | None:
    """The routing of a call; None where the module's own forward has nothing to save, or an error to raise."""
    tensors = [t for t in formula.weights(call.module) if t is not None]
    if not large_enough(x) or tensors[0].shape[1 if formula.transposed else 2] != x.shape[1]:
        return None
    if not call.saves(x, weights, *tensors):
        return None
    if {t.device for t in (x, index, weights, *tensors)} != {x.device}:
        return None
    if not torch.is_autocast_enabled(x.device.type) and len({t.dtype for t in (x, *tensors)}) > 1:
        return None
    with torch.no_grad():
        routing = Routing.of(index, len(tensors[0]))
    return routing if routing is not None and routing.ends[-1] else None


def _is_passive(module: nn.Module) -> bool:
    """Whether the gate's modules do nothing else: no dropout, and no hooks but this library's, which watch."""
    hooks = [hook for c in module.children() for kind in structure._HOOKS for hook in getattr(c, kind).values()]
    drops = any(isinstance(c, nn.Dropout) and c.training and c.p > 0 for c in module.children())
    return not drops and all(getattr(hook, "__module__", "").startswith("lowbit.activations") for hook in hooks)


def _compute_dtype(module: Any, x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the products: autocast's, which PyTorch's grouped product does not know."""
    config = getattr(module, "config", None)
    is_grouped = getattr(config, "_experts_implementation", None) == "grouped_mm"
    if is_grouped or not torch.is_autocast_enabled(x.device.type):
        return weight.dtype
    return torch.get_autocast_dtype(x.device.type)
