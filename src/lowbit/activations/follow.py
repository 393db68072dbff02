"""Follows the torch functions that a model calls, and passes those that save activations to their handlers.

The outermost module of a compressed model that is called enters a `TorchFunctionMode`. It sees every torch function
inside, whichever module calls it. A function with a handler saves payloads; all others run unchanged. `recipes.attach`
records for later functions how a tensor was computed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowbit.activations.checkpoint import first_pass
from lowbit.activations.compiled import compiled_forward
from lowbit.activations.policy import LayerAware
from lowbit.activations.recipes import (
    FEWEST,
    Itself,
    Rebuilt,
    Recipe,
    SavedTensors,
    attach,
    checkpoint_hook,
    recipe_of,
    room,
    takes,
)
from lowbit.activations.sharded import on_shards
from lowbit.activations.uncompressed import uncompressed
from lowbit.codecs import Codec

log = logging.getLogger(__name__)

MARK = "_lowbit_saved"
"""The attribute of a followed module that holds its `Layer`."""
HANDLERS: dict[Any, Callable[..., Any]] = {}
"""Handlers by torch function, called with a `TorchCall` and its arguments; NotImplemented runs the function itself."""

_VIEWS = ("View", "ReshapeAlias", "Transpose", "Permute", "Squeeze", "_FromTorchTensor", "_ToTorchTensor")
_ATTENTION = ("Attention", "attention", "Attn")


def handles(*functions: Any) -> Callable[[Any], Any]:
    """Register a handler for these torch functions."""

    def register(handler: Any) -> Any:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@dataclass
class Shared:
    """What the modules of one compressed model share. `looked`: names of modules after whose first pass it looked."""

    policy: LayerAware
    looked: set[str] = field(default_factory=set)
    _codecs: dict[tuple[str, str], Codec | None] = field(default_factory=dict)

    def codec(self, kind: str, name: str, x: Tensor | None = None) -> Codec | None:
        """The format for a layer type in the module of this name, chosen at its first input `x`; None: unchanged."""
        if (kind, name) not in self._codecs:
            codec = self.policy.codec(self.policy.bits_of(kind, name))
            if x is None:
                return codec
            chosen = self._codecs[kind, name] = self.policy.for_outliers(kind, codec, x)
            if chosen != codec:
                log.info("%s has outliers: its input is saved as %r", name, chosen)
        return self._codecs[kind, name]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """A module that is followed: its name, its own forward, and what its model shares.

    Args:
        forward: replaces the module's own forward (`own`); called with the module, this object and the arguments.
            None: the module's own runs.
        kind: the layer type of such a module. formula: parameters of `forward`: `Norm`, the name of an activation.
        in_graphs: the format's name in graphs of `torch.compile`; None: saved unchanged.
    """

    name: str
    own: Callable[..., Any]
    shared: Shared
    forward: Callable[..., Any] | None = None
    kind: str = ""
    formula: Any = None
    in_graphs: str | None = None

    @property
    def codec(self) -> Codec | None:
        """The format for the layer type; None: saved unchanged, or the module has no layer type."""
        return self.shared.codec(self.kind, self.name) if self.kind else None


@dataclass(frozen=True)
class TorchCall:
    """A call of a torch function, with the module that makes it."""

    func: Any
    module: Any
    layer: Layer

    def codec(self, kind: str, x: Tensor | None = None) -> Codec | None:
        """The format for the input of a layer type here; None: saved unchanged."""
        return self.layer.shared.codec(kind, self.layer.name, x)

    def saves(self, *tensors: Tensor | None) -> bool:
        """Whether autograd would save one of these tensors here, and it can be saved in few bits."""
        if not any(t is not None and t.requires_grad for t in tensors):
            return False
        if not self.module.training:
            say_once(
                "a model with compressed activations runs in evaluation mode with gradients enabled: activations are "
                "saved in full there; call model.train() to train it, or use torch.no_grad() to evaluate it"
            )
            return False
        if not takes(*tensors):
            kinds = sorted({f"{type(t).__name__} of {t.dtype}" for t in tensors if t is not None and not takes(t)})
            say_once(f"activations are saved in full where they are {kinds}")
            return False
        return True

    def source(self, x: Tensor, dtype: torch.dtype) -> tuple[Rebuilt, SavedTensors]:
        """Return how a layer rebuilds its input in backward, and the tensors that it saves for that."""
        # Attention's kernel saves its output as it is, so saving that again costs nothing.
        smallest = max(FEWEST, self.layer.shared.policy.smallest)
        return source_of(x, None if from_attention(x) or x.numel() < smallest else self.codec("linear", x), dtype)


def source_of(x: Tensor, codec: Codec | None, dtype: torch.dtype) -> tuple[Rebuilt, SavedTensors]:
    """Return how backward rebuilds a tensor, by its recipe or from a payload in this format or one with more bits."""
    own, recipe = Itself(x.shape, codec), recipe_of(x)
    if recipe is None or (isinstance(recipe.form, Itself) and recipe.form.bits < own.bits):
        saved: SavedTensors = (x.to(dtype) if codec is None else encoded(codec, x),)
        recipe = Recipe(own, saved, weak=True)
        attach(x, recipe)
    else:
        saved = recipe.saved() or ()
    recipe.rebuilt.add_user()
    return recipe.rebuilt, saved


def large_enough(x: Tensor) -> bool:
    """Whether a tensor is so large that few bits take fewer bytes."""
    return x.numel() >= FEWEST


def encoded(codec: Codec, x: Tensor) -> Tensor:
    """Encode `x`; the payload is empty in a checkpointed layer's first pass, which keeps none."""
    payload = room(codec, x)
    if not first_pass():
        with torch.no_grad():
            codec.encode(x, out=payload)
    return payload


def saved_recipe(x: Tensor) -> Recipe | None:
    """The recipe of `x`, also if attention's kernel has saved it anyway; None: `x` is not saved."""
    recipe = recipe_of(x)
    if recipe is None and from_attention(x):
        recipe = Recipe(Itself(x.shape, None), (x,))
    return recipe


def from_attention(x: Tensor) -> bool:
    """Whether `x` is a view of an attention kernel's output."""
    node = x.grad_fn
    for _ in range(8):
        if node is None:
            return False
        name = node.name()
        if any(word in name for word in _ATTENTION) or not any(view in name for view in _VIEWS):
            return any(word in name for word in _ATTENTION)
        node = node.next_functions[0][0]
    return False


class _Threads(threading.local):
    """The stack of modules that run in a thread, each with the checkpoint in which it was called."""

    def __init__(self) -> None:
        self.running: list[tuple[nn.Module, Layer, Any]] = []


_threads = _Threads()


def followed_forward(module: nn.Module, layer: Layer, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward and follow its functions."""
    if not torch.is_grad_enabled():
        return layer.own(*args, **kwargs)
    if torch.compiler.is_compiling():
        return compiled_forward(module, layer, *args, **kwargs)
    if not _threads.running:
        return _outermost(module, layer, *args, **kwargs)
    return _run(module, layer, *args, **kwargs)


def _run(module: nn.Module, layer: Layer, *args: Any, **kwargs: Any) -> Any:
    modules = _threads.running
    modules.append((module, layer, checkpoint_hook()))
    try:
        if layer.forward is not None and not selective():
            return layer.forward(module, layer, *args, **kwargs)
        return layer.own(*args, **kwargs)
    finally:
        modules.pop()


@torch.compiler.disable(reason="lowbit.activations follows tensors, which graphs do not see")
def _outermost(module: nn.Module, layer: Layer, *args: Any, **kwargs: Any) -> Any:
    with Following():
        out = _run(module, layer, *args, **kwargs)
    if module.training and layer.name not in layer.shared.looked:
        names = uncompressed(module, (args, kwargs), out)
        if names is not None:
            layer.shared.looked.add(layer.name)
        if names:
            say_once(f"{type(module).__name__} saves whole tensors for backward in functions: {', '.join(names)}")
    return out


class Following(TorchFunctionMode):
    """Hands functions to their handlers while gradients are enabled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        modules = _threads.running
        # A graph of `torch.compile` inside cannot see recipes of tensors (`compiled_forward` runs there).
        if torch.compiler.is_compiling() or not modules or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if func is Tensor.view_as and modules and (recipe := recipe_of(args[0])) is not None:
                attach(out, recipe)  # in `from_local` and `to_local` of a DTensor
            return out
        module, layer, checkpoint = modules[-1]
        handler = HANDLERS.get(func)
        # The second run of a checkpoint that began in this module's forward calls functions without the module.
        if handler is not None and checkpoint_hook() is checkpoint and not selective():
            fits = _fits(handler, len(args), tuple(kwargs))
            out = _handled(handler, TorchCall(func, module, layer), args, kwargs) if fits else NotImplemented
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


def _handled(handler: Callable[..., Any], call: TorchCall, args: Any, kwargs: Any) -> Any:
    handler = functools.partial(handler, call)
    if any(isinstance(arg, DTensor) for arg in args):
        return on_shards(call.func, handler, *args, **kwargs)
    return handler(*args, **kwargs)


@functools.cache  # binding takes longer than a view, and most calls are views
def _fits(handler: Callable[..., Any], count: int, names: tuple[str, ...]) -> bool:
    """Whether a handler accepts this many arguments, and these names; if not (`out`, say), the function itself runs."""
    try:
        inspect.signature(handler).bind(None, *range(count), **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def selective() -> bool:
    """Whether a selective checkpoint runs: the results that it keeps must be the same in backward."""
    if not torch._C._len_torch_dispatch_stack():  # pyright: ignore
        return False
    if not any(type(mode).__name__ in _SELECTIVE for mode in _get_current_dispatch_mode_stack()):
        return False
    say_once("activations inside a selective checkpoint are saved uncompressed")
    return True


_SELECTIVE = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")


@functools.cache
def say_once(text: str) -> None:
    """Log a line, but only once."""
    log.warning(text)
