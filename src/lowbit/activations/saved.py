"""`compress_saved_`: save quantized activations for backward, and recompute the rest from them."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, overload

import torch
from torch import nn

from lowbit.activations import layers
from lowbit.activations.checkpoint import restore_checkpointed
from lowbit.activations.counting import Watch
from lowbit.activations.hooks import attention_forward
from lowbit.activations.layer_plan import Applied, LayerPlan
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

log = logging.getLogger(__name__)

# Leaves that save little: indices, masks of one byte, tables without gradients.
_LIGHT = (nn.Embedding, nn.Identity, nn.modules.dropout._DropoutNd)


@overload
def compress_saved_(model: nn.Module, policy: LayerAware | None = None, *, report: bool = True) -> Compressed: ...
@overload
def compress_saved_(model: nn.Module, policy: LayerPlan, *, report: bool = True) -> Applied: ...
def compress_saved_(
    model: nn.Module, policy: LayerAware | LayerPlan | None = None, *, report: bool = True
) -> Compressed | Applied:
    """Save a model's activations for backward in few bits; changes the model in place.

    Forward uses unrounded activations. Its results are unchanged in float32; in bfloat16 and float16 nearly so, because
    norms, and the product of activation and up, are computed in float32 and rounded once. Backward gets rounded inputs
    of norms, activation functions, gates and linear layers, and recomputes the rest: a norm's output for the
    projections that follow (once for all of them), act(gate) * up for the layer after it. So a decoder layer saves one
    payload for each norm, gate and up. q, k, v and the output of attention are saved as they are, and o_proj shares the
    latter with attention's kernel. Weights are saved by reference, even where autocast casts them. A linear layer with
    a frozen weight saves no input. In evaluation mode and without gradients nothing is saved or coded.

    Norms, activation functions (SiLU, GELU of both kinds, ReLU) and feed-forward blocks are recognized by what they
    compute, linear layers by their class (`nn.Linear`, Hugging Face's `Conv1D`). This covers Llama, Qwen, Mistral,
    Gemma and GPT-2 of Hugging Face and plain `torch.nn`. `Compressed.left` lists all other modules; the log tells their
    share of the saved bytes, once, after the first training pass that is not compiled.

    Call it before `torch.compile`, DDP and `fully_shard`. Sharding must keep a norm together with the linear layers
    that follow it, as wrapping whole decoder layers does. Under `torch.compile` graphs break around compressed modules.
    Not supported, and refused by PyTorch: second derivatives, and `torch.func` (`grad`, `vmap`, ...) around the model.

    Deviations where the paper (arXiv 2605.00539) is silent: groups of 64 with a middle as well as a scale, nearest
    rounding, inputs of norms in front of attention quantized like others, and 8 bits for inputs of norms.

    Args:
        model: any module; its parameters, hooks and state_dict stay as they are.
        policy: the bits; absent: `LayerAware()`. `BitPlan.policy` makes it from a plan. Or a `LayerPlan` for the whole
            model: what is kept of each layer, some of which may be checkpointed.
        report: log that share.

    Raises:
        TypeError, ValueError: a model that is compressed already or has nothing to compress, or a policy whose
            `layers` match no module.
    """
    if isinstance(policy, LayerPlan):
        return policy.apply_(model)
    policy = LayerAware() if policy is None else policy
    for name, value, allowed in (("model", model, nn.Module), ("policy", policy, LayerAware)):
        if not isinstance(value, allowed):
            raise TypeError(f"{name} is {type(value).__name__}; allowed: {allowed.__name__}")
    if twice := [n for n, m in model.named_modules() if _MARK in vars(m)]:
        raise ValueError(f"model is compressed already ({twice[0] or 'itself'!r}); allowed: restore_(model) first")
    changes = {name: change for name, m in model.named_modules() if (change := _change(name, m, model, policy))}
    if not changes:
        raise ValueError(
            f"model ({type(model).__name__}) has no module to compress; allowed: norms, linear layers, activations"
        )
    policy.check_layers(changes)
    return Compressed(model, policy, changes, report)


def restore_(model: nn.Module) -> None:
    """Undo `compress_saved_` in place, also in copies of a compressed model.

    Args:
        model: any module; parts of it that are not compressed stay as they are.
    """
    for module in model.modules():
        restore_checkpointed(module)
        _restore(module)


def _restore(module: nn.Module) -> None:
    layer = vars(module).pop(_MARK, None)
    if layer is not None:
        del module.forward
        if module.forward != layer.own:  # an instance's own, not its class's
            module.forward = layer.own


class Compressed:
    """The changes that `compress_saved_` made to a model.

    Attributes:
        bits: layer type and bits of each module that was changed, by name. A linear layer uses its bits only where its
            input cannot be rebuilt from another layer's payloads.
        left: number of modules of each type that is not recognized; their activations are saved as they are.
    """

    def __init__(self, model: nn.Module, policy: LayerAware, changes: dict[str, _Change], report: bool) -> None:
        self.bits: dict[str, tuple[str, int]] = {}
        self._modules: list[nn.Module] = []
        for name, (kind, forward, formula) in changes.items():
            module, bits = model.get_submodule(name), policy.bits_of(kind, name)
            layer = Layer(
                kind=kind, own=module.forward, codec=policy.codec(bits), formula=formula,
                in_attention=kind == "linear" and in_attention(name, model),
            )  # fmt: skip
            module.forward = functools.partial(forward, module, layer)
            setattr(module, _MARK, layer)
            self.bits[name] = (kind, bits)
            self._modules.append(module)
        left = {n: type(m).__name__ for n, m in model.named_modules() if _is_left(m) and n not in changes}
        self.left: Counter[str] = Counter(left.values())
        self._survey = _Survey(model, left) if left and report else None

    def remove(self) -> None:
        """Restore the modules' own forward."""
        if self._survey is not None:
            self._survey.remove()
        for module in self._modules:
            _restore(module)

    def __repr__(self) -> str:
        kinds = Counter(f"{kind} in {bits} bits" for kind, bits in self.bits.values())
        text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        return f"Compressed({text}; left: {dict(self.left)})"


_MARK = "_lowbit_saved"
_Change = tuple[str, Callable[..., Any], Any]


def _change(name: str, module: nn.Module, model: nn.Module, policy: LayerAware) -> _Change | None:
    """Layer type, new forward and its parameters (`Layer.formula`); None: the module stays as it is."""
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
    """Whether an unchanged module probably computes something itself: it has weights or no children."""
    if isinstance(module, _LIGHT) or "rotary" in type(module).__name__.lower():
        return False
    has_weights = next(module.parameters(recurse=False), None) is not None
    is_leaf = next(module.children(), None) is None
    return has_weights or (is_leaf and not isinstance(module, nn.ModuleList | nn.ModuleDict))


class _Survey:
    """Watches the first training pass of a model and logs one line.

    Args:
        model: whose forward is watched. left: types of its modules that are not compressed, by name.
    """

    def __init__(self, model: nn.Module, left: dict[str, str]) -> None:
        self._left, self._watch, self._pass = left, None, ExitStack()
        self._handles = [
            model.register_forward_pre_hook(self._start, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._finish, always_call=True),
        ]

    def remove(self) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()

    def _start(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        if self._watch is None and not _hooked():  # hooks of ours would hide those of others
            self._watch = Watch(model, (args, kwargs))
            self._pass.enter_context(self._watch.active())

    def _finish(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._watch is None:
            return
        self._pass.close()
        self.remove()
        sizes: Counter[str] = Counter()
        for (_, name), size in self._watch.saved.modules.items():
            if name in self._left:
                sizes[self._left[name]] += size
        total, counts = sum(self._watch.saved.modules.values()), Counter(self._left.values())
        shares = ", ".join(
            f"{kind} ({counts[kind]} modules, {size / total:.1%} of the bytes saved for backward)"
            for kind, size in sizes.items()
        )
        if shares:
            log.warning("activations of these types are saved uncompressed: %s", shares)


def _hooked() -> bool:
    """Whether somebody's saved_tensors_hooks are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore
