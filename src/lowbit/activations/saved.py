"""`compress_saved_`: saves quantized activations for backward, and recomputes the rest from them.

It only replaces the forward of each module.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from lowbit.activations import handlers
from lowbit.activations.checkpoint import restore_checkpointed
from lowbit.activations.compiled import name_of
from lowbit.activations.experts import experts
from lowbit.activations.follow import MARK, Layer, Shared, followed_forward
from lowbit.activations.policy import Format, LayerAware
from lowbit.activations.python_functions import ask_first
from lowbit.activations.structure import activation_like, linear_like, norm_like

if TYPE_CHECKING:
    from lowbit.activations.layer_plan import Applied, LayerPlan


@overload
def compress_saved_(model: nn.Module, policy: LayerAware | None = None) -> Compressed: ...
@overload
def compress_saved_(model: nn.Module, policy: LayerPlan) -> Applied: ...
def compress_saved_(model: nn.Module, policy: LayerAware | LayerPlan | None = None) -> Compressed | Applied:
    """Save a model's activations for backward in few bits; changes the model in place.

    Forward uses unrounded activations. Its results are unchanged, except for the last bits where norms and activation
    functions are computed in float32 and rounded once. Backward gets rounded inputs of norms, activation functions,
    gates, linear layers and attention, and recomputes the rest, so a decoder layer saves one payload each for norms,
    gate, up, q, k and v. Dropout and ReLU save one bit per element. Weights are saved by reference, even if autocast
    casts them. A linear layer with a frozen weight saves no input. In evaluation mode and without gradients nothing is
    saved or coded.

    It follows the torch functions that run, through views, slices, casts and dropout. So fused projections, adapters
    and subclasses of `nn.Linear` need no special support; norms and activation functions made of several functions, and
    attention written out as products and softmax, are recognized. Tensors of any other function, such as the scans of
    state-space models, and of autograd functions written in Python, except Megatron-Core's, are saved uncompressed.

    The first training pass logs the functions whose uncompressed tensors are each more than a tenth of what is kept.
    `counted` counts what a model keeps, by module: run it before and after to see what is left.

    Call it before `torch.compile`, DDP and `fully_shard`. Sharding must keep a norm together with the linear layers
    that follow it, as wrapping whole decoder layers does. In a graph of `torch.compile` each norm, activation function
    and linear layer saves its own input, and nothing is rebuilt from what another layer saved.
    Your own hooks, `retain_grad` and autograd functions see gradients computed from the rounded tensors.
    Second derivatives (`create_graph=True`) are refused, and PyTorch refuses `torch.func` (`grad`, `vmap`, ...) and
    forward-mode AD around the model.

    The default differs from AGoQ (arXiv 2605.00539), which stores norms, gates and other inputs in 4 bits and does not
    code attention: see `LayerAware`. `LayerAware.published()` is the paper's setting.

    Args:
        model: any module; its parameters, hooks and state_dict do not change.
        policy: the bits; absent: `LayerAware()`. Or a `LayerPlan` for the whole model, which defines what is kept of
            each layer; some may be checkpointed.

    Raises:
        TypeError, ValueError: the model is compressed already or has nothing to compress, or `layers` of the policy
            match no module.
    """
    if policy is None or isinstance(policy, LayerAware):
        return compress(model, policy)
    if not hasattr(policy, "apply_"):  # importing LayerPlan here would be circular, because plans call `compress`
        raise TypeError(f"policy is {type(policy).__name__}; allowed: LayerAware or LayerPlan")
    return policy.apply_(model)


def compress(model: nn.Module, policy: LayerAware | None = None) -> Compressed:
    """`compress_saved_` with a policy."""
    policy = LayerAware() if policy is None else policy
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; allowed: Module")
    # Modules that only run functions may be shared: the stages of a rank share rotary embeddings.
    marked = {n: layer for n, m in model.named_modules() if (layer := vars(m).get(MARK)) is not None}
    if twice := [name for name, layer in marked.items() if layer.kind or not name]:
        raise ValueError(f"model is compressed already ({twice[0] or 'itself'!r}); allowed: restore_(model) first")
    return Compressed(model, policy)


def restore_(model: nn.Module) -> None:
    """Undo `compress_saved_` in place, also in copies of a compressed model.

    Args:
        model: any module; parts of it that are not compressed do not change.
    """
    for module in model.modules():
        restore_checkpointed(module)
        layer = vars(module).pop(MARK, None)
        if layer is not None:
            del module.forward
            if module.forward != layer.own:  # an instance's own, not its class's
                module.forward = layer.own


class Compressed:
    """The changes that `compress_saved_` made to a model.

    Attributes:
        bits: layer type and bits (or codec) of each norm, activation function and linear layer, by name. A linear layer
            uses its bits only where its input cannot be rebuilt from another layer's payloads.
    """

    def __init__(self, model: nn.Module, policy: LayerAware) -> None:
        self.bits: dict[str, tuple[str, Format]] = {}
        self._model = model
        ask_first()
        shared = Shared(policy)
        modules = {n: m for n, m in model.named_modules() if _can_run(m) and MARK not in vars(m)}
        policy.check_layers(modules)
        for name, module in modules.items():
            kind, forward, formula = _replacement(name, module, model)
            format_of = "gate" if kind == "mlp" and formula == "silu" else kind
            layer = Layer(
                name=name, own=module.forward, shared=shared, forward=forward, kind=kind, formula=formula,
                in_graphs=name_of(policy, format_of, name),
            )  # fmt: skip
            if kind:
                self.bits[name] = (kind, policy.bits_of(format_of, name))
            # Keep the signature of the module's own forward, which callers such as trainers inspect.
            module.forward = functools.update_wrapper(
                functools.partial(followed_forward, module, layer), module.forward, updated=()
            )
            setattr(module, MARK, layer)
        if not self.bits and next(model.parameters(), None) is None:
            restore_(model)
            raise ValueError(
                f"model ({type(model).__name__}) has no module to compress; allowed: norms, linear layers, activations"
            )

    def remove(self) -> None:
        """Restore the modules' own forward."""
        restore_(self._model)

    def __repr__(self) -> str:
        kinds = Counter(f"{kind} in {f'{b} bits' if isinstance(b, int) else b}" for kind, b in self.bits.values())
        text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        return f"Compressed({text})"


def _replacement(name: str, module: nn.Module, model: nn.Module) -> tuple[str, Callable[..., Any] | None, Any]:
    """Layer type of a module, and the forward that replaces its own, if any, with parameters."""
    if change := experts(name, module, model):
        return change
    if norm := norm_like(module):
        return "norm", handlers.norm_forward, norm
    if activation := activation_like(module):
        return "mlp", handlers.activation_forward, activation
    return ("linear" if linear_like(module) else ""), None, None


def _can_run(module: nn.Module) -> bool:
    """Whether a module has its own forward, unlike a container."""
    forward = getattr(module.forward, "__func__", module.forward)
    return forward is not nn.modules.module._forward_unimplemented and not isinstance(module, torch.jit.ScriptModule)
