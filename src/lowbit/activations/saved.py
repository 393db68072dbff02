"""`compress_saved_`: make a model's backward keep quantized inputs and compute the rest from them again."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from lowbit.activations import layers
from lowbit.activations.hooks import attention_forward
from lowbit.activations.layers import Layer
from lowbit.activations.policy import WHOLE, LayerAware
from lowbit.activations.structure import (
    activation_like,
    feed_forward,
    in_attention,
    is_attention,
    linear_like,
    norm_like,
)
from lowbit.activations.survey import Survey

log = logging.getLogger(__name__)

# Leaves that save next to nothing: indices, masks of one byte, tables that have no gradient.
_LIGHT = (nn.Embedding, nn.Identity, nn.modules.dropout._DropoutNd)


def compress_saved_(model: nn.Module, policy: LayerAware | None = None, *, report: bool = True) -> Compressed:
    """Have a model keep its activations for backward in few bits, in place.

    Forward computes what it did, from unrounded activations; in bfloat16 and float16 all but exactly, because norms,
    and activation and product, are computed in float32 and rounded once. Backward gets rounded inputs of norms, of
    activation functions and gates, and of linear layers, and recomputes from them what else it needs: a norm's output
    for the projections that follow (once, however many there are), act(gate) * up for the layer after it. So a
    decoder layer keeps one payload for each norm, gate and up; q, k, v and the output of attention stay as they are,
    and o_proj shares the latter with attention's kernel. Weights are saved by reference, even where autocast casts
    them. A linear layer with a frozen weight keeps no input. In evaluation mode, and where no gradients are wanted,
    nothing is kept or coded.

    Norms, activation functions (SiLU, GELU of both kinds, ReLU) and feed-forward blocks are found by what they compute,
    linear layers by their class (`nn.Linear`, Hugging Face's `Conv1D`). This covers Llama, Qwen, Mistral, Gemma and
    GPT-2 of Hugging Face and plain `torch.nn`. What is left is listed in `Compressed.left`, and with its share
    of the kept bytes in the log, once, after the first training pass that is not compiled.

    Call it before `torch.compile`, DDP and `fully_shard`. Sharding must keep a norm together with the linear layers
    that follow it, as wrapping whole decoder layers does. Under `torch.compile` graphs break around compressed modules.
    Not supported: second derivatives, and `torch.func` (`grad`, `vmap`, ...) around a compressed model; PyTorch
    refuses both.

    Deviations from the paper (arXiv 2605.00539), which is silent there: groups of 64 with a middle as well as a scale,
    nearest rounding, inputs of norms in front of attention quantized like others, and 8 bits for inputs of norms.

    Args:
        model: any module; its parameters, hooks and state_dict stay as they are.
        policy: bits; `LayerAware()` if absent.
        report: log that share.

    Raises:
        TypeError, ValueError: a model that is compressed already or has nothing to compress, a policy whose `layers`
            match nothing.
    """
    policy = LayerAware() if policy is None else policy
    if not isinstance(model, nn.Module) or not isinstance(policy, LayerAware):
        wrong = ("policy", policy) if isinstance(model, nn.Module) else ("model", model)
        raise TypeError(f"{wrong[0]} is {type(wrong[1]).__name__}; allowed: Module and LayerAware")
    if twice := [n for n, m in model.named_modules() if _MARK in vars(m)]:
        raise ValueError(f"model is compressed already ({twice[0] or 'itself'!r}); allowed: restore_(model) first")
    found = {name: plan for name, m in model.named_modules() if (plan := _plan(name, m, model, policy))}
    if not found:
        raise ValueError(
            f"model ({type(model).__name__}) has no module to compress; allowed: norms, linear layers, activations"
        )
    policy.check_layers(found)
    return Compressed(model, policy, found, report)


def restore_(model: nn.Module) -> None:
    """Undo `compress_saved_`, in place, for copies of a compressed model and unpickled ones, too.

    Args:
        model: any module; parts of it that are not compressed stay as they are.
    """
    for module in model.modules():
        _restore(module)


def _restore(module: nn.Module) -> None:
    layer = vars(module).pop(_MARK, None)
    if layer is not None:
        del module.forward
        if module.forward != layer.own:  # not its class's, but somebody's own
            module.forward = layer.own


class Compressed:
    """What `compress_saved_` did to a model.

    Attributes:
        bits: for each module that was changed, by name: its layer type and its bits. A linear layer uses its bits only
            where its input follows from nothing that is kept already.
        left: how many modules there are of each type that is not understood, and whose activations stay as they are.
    """

    def __init__(self, model: nn.Module, policy: LayerAware, plans: dict[str, _Plan], report: bool) -> None:
        self.bits: dict[str, tuple[str, int]] = {}
        self._modules: list[nn.Module] = []
        for name, (kind, forward, what) in plans.items():
            module, bits = model.get_submodule(name), policy.bits_of(kind, name)
            layer = Layer(
                kind=kind, own=module.forward, codec=policy.codec(bits), what=what,
                in_attention=kind == "linear" and in_attention(name, model),
            )  # fmt: skip
            module.forward = functools.partial(forward, module, layer)
            setattr(module, _MARK, layer)
            self.bits[name] = (kind, bits)
            self._modules.append(module)
        left = {n: m for n, m in model.named_modules() if _is_left(m) and n not in plans}
        self.left: Counter[str] = Counter(type(m).__name__ for m in left.values())
        self._survey = Survey(model, left) if left and report else None

    def remove(self) -> None:
        """Give the modules their own forward back."""
        if self._survey is not None:
            self._survey.remove()
        for module in self._modules:
            _restore(module)

    def __repr__(self) -> str:
        kinds = Counter(f"{kind} in {bits} bits" for kind, bits in self.bits.values())
        text = ", ".join(f"{count} x {what}" for what, count in kinds.items())
        return f"Compressed({text}; left: {dict(self.left)})"


_MARK = "_lowbit_saved"
_Plan = tuple[str, Callable[..., Any], Any]


def _plan(name: str, module: nn.Module, model: nn.Module, policy: LayerAware) -> _Plan | None:
    """Layer type, new forward and what it needs to know; None: the module stays as it is."""
    if (transposed := linear_like(module)) is not None:
        return "linear", layers.linear_forward, transposed
    if norm := norm_like(module):
        return "norm", layers.norm_forward, norm
    if activation := activation_like(module):
        return "mlp", layers.activation_forward, activation
    if parts := feed_forward(module):
        return "mlp", layers.feed_forward_forward, parts
    if policy.attention != WHOLE and is_attention(module) and not in_attention(name, model):
        return "attention", attention_forward, policy
    return None


def _is_left(module: nn.Module) -> bool:
    """Whether a module that was not changed computes something itself, as far as one can tell."""
    if isinstance(module, _LIGHT) or "rotary" in type(module).__name__.lower():
        return False
    has_weights = next(module.parameters(recurse=False), None) is not None
    is_leaf = next(module.children(), None) is None
    return has_weights or (is_leaf and not isinstance(module, nn.ModuleList | nn.ModuleDict))
