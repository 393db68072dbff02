"""What changes in a model whose saved activations are compressed: the forward of each module."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowbit.activations import (
    attention,  # noqa: F401  # these register handlers
    experts_handlers,  # noqa: F401
    handlers,  # noqa: F401
    layers,
    loss,  # noqa: F401
)
from lowbit.activations.checkpoint import restore_checkpointed
from lowbit.activations.compiled import name_of
from lowbit.activations.experts import experts
from lowbit.activations.follow import MARK, Layer, Shared, followed_forward, running
from lowbit.activations.policy import Format, LayerAware
from lowbit.activations.python_functions import ask_first
from lowbit.activations.structure import activation_like, linear_like, norm_like
from lowbit.activations.survey import Survey


def compress(model: nn.Module, policy: LayerAware | None = None, *, report: bool) -> Compressed:
    """`compress_saved_` with a policy."""
    policy = LayerAware() if policy is None else policy
    for name, value, allowed in (("model", model, nn.Module), ("policy", policy, LayerAware)):
        if not isinstance(value, allowed):
            raise TypeError(f"{name} is {type(value).__name__}; allowed: {allowed.__name__}")
    # Modules that only run functions may be shared, as the stages of a rank share rotary embeddings.
    marked = {n: layer for n, m in model.named_modules() if (layer := vars(m).get(MARK)) is not None}
    if twice := [name for name, layer in marked.items() if layer.kind or not name]:
        raise ValueError(f"model is compressed already ({twice[0] or 'itself'!r}); allowed: restore_(model) first")
    return Compressed(model, policy, report)


def restore_(model: nn.Module) -> None:
    """Undo `compress_saved_` in place, also in copies of a compressed model.

    Args:
        model: any module; parts of it that are not compressed stay as they are.
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
        survey: bytes by module in the first training pass, with and without compression; None without `report`.
    """

    def __init__(self, model: nn.Module, policy: LayerAware, report: bool) -> None:
        self.bits: dict[str, tuple[str, Format]] = {}
        self.survey = Survey(running) if report else None
        self._model = model
        ask_first()
        shared = Shared(policy, self.survey)
        modules = {n: m for n, m in model.named_modules() if _can_run(m) and MARK not in vars(m)}
        policy.check_layers(modules)
        for name, module in modules.items():
            change = next(filter(None, (change(name, module, model, policy) for change in CHANGES)), None)
            kind, forward, formula = change or ("linear" if linear_like(module) else "", None, None)
            format_of = "gate" if kind == "mlp" and formula == "silu" else kind
            layer = Layer(
                name=name, own=module.forward, shared=shared, forward=forward, kind=kind, formula=formula,
                in_graphs=name_of(policy, format_of, name),
            )  # fmt: skip
            if kind:
                self.bits[name] = (kind, policy.bits_of(format_of, name))
            # Callers that inspect the signature, such as trainers, see that of the module's own forward.
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

    def __str__(self) -> str:
        if self.survey is not None and self.survey.rows:
            return f"{self!r}\n{self.survey}"
        return f"{self!r}, not counted: no training pass without other hooks on saved tensors has run yet"


Change = tuple[str, Callable[..., Any], Any]


def _norm(name: str, module: nn.Module, model: nn.Module, policy: LayerAware) -> Change | None:
    formula = norm_like(module)
    return formula and ("norm", layers.norm_forward, formula)


def _activation(name: str, module: nn.Module, model: nn.Module, policy: LayerAware) -> Change | None:
    formula = activation_like(module)
    return ("mlp", layers.activation_forward, formula) if formula else None


CHANGES: list[Callable[[str, nn.Module, nn.Module, LayerAware], Change | None]] = [
    experts, _norm, _activation,
]  # fmt: skip
"""Recognize modules to replace as a whole: name, module, model, policy -> layer type, forward, its parameters."""


def _can_run(module: nn.Module) -> bool:
    """Whether a module has a forward of its own, as containers have not."""
    forward = getattr(module.forward, "__func__", module.forward)
    return forward is not nn.modules.module._forward_unimplemented and not isinstance(module, torch.jit.ScriptModule)
