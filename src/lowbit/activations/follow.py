"""Follows the torch functions that a model calls, and passes those that save activations to their handlers.

The outermost module of a compressed model that is called enters a `TorchFunctionMode`. It sees every torch function
inside, whichever module calls it. A function with a handler saves payloads; all others run unchanged. `recipes.attach`
records for later functions how a tensor was computed.

In graphs of `torch.compile` functions cannot be followed. There norms, activation functions and linear layers that are
modules each save a payload of their own input. They share no table of recipes; if several layers save the same tensor,
the compiler computes the payload once.
"""

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowbit.activations.checkpoint import first_pass
from lowbit.activations.counting import uncompressed
from lowbit.activations.functions import ActivationFunction, LinearFunction
from lowbit.activations.gated.reference import TABLE
from lowbit.activations.policy import LOST, LayerAware, error_of_groups
from lowbit.activations.recipes import (
    FEWEST,
    GatedOutput,
    Itself,
    Norm,
    Rebuilt,
    Recipe,
    SavedTensors,
    attach,
    bits_of,
    checkpoint_hook,
    default_eps,
    recipe_of,
    room,
    takes,
)
from lowbit.activations.sharded import on_shards
from lowbit.codecs import Codec, GroupInt
from lowbit.codecs.checks import FLOATS

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
    """What the modules of one compressed model share.

    `looked`: names of modules after whose first pass it looked. `lost`: norms whose format loses much, and how much.
    """

    policy: LayerAware
    looked: set[str] = field(default_factory=set)
    lost: dict[str, float] = field(default_factory=dict)
    _codecs: dict[tuple[str, str, int], Codec | None] = field(default_factory=dict)  # and by width

    def codec(self, kind: str, name: str, x: Tensor | None = None) -> Codec | None:
        """The format for a layer type in the module of this name, chosen at its first input `x`; None: unchanged."""
        codec = self.policy.codec(self.policy.bits_of(kind, name))
        # Not cached: only an input with values shows whether there are outliers.
        if x is None or x.is_meta or isinstance(x, FakeTensor):
            return codec
        key = kind, name, x.shape[-1] if x.dim() else 1
        if key not in self._codecs:
            chosen = self._codecs[key] = self.policy.for_outliers(kind, codec, x)
            if chosen != codec:
                log.info("%s has outliers: its input is saved as %r", name, chosen)
            if kind == "norm" and isinstance(chosen, GroupInt) and (lost := error_of_groups(x, chosen)) > LOST:
                self.lost[name] = lost
        return self._codecs[key]


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


@dataclass(frozen=True)
class TorchCall:
    """A call of a torch function, with the module that makes it."""

    func: Any
    module: Any
    layer: Layer

    def codec(self, kind: str, x: Tensor | None = None) -> Codec | None:
        """The format for the input of a layer type here; None: saved unchanged."""
        return self.layer.shared.codec(kind, self.layer.name, x)

    def saves(self, first: Tensor, *others: Tensor | None) -> bool:
        """Whether autograd would save one of these tensors here, and few bits of the first take fewer bytes."""
        tensors = first, *others
        if first.numel() < FEWEST or not any(t is not None and t.requires_grad for t in tensors):
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
    recipe = recipe_of(x)
    if recipe is None or (isinstance(recipe.form, Itself) and bits_of(recipe.form.codec) < bits_of(codec)):
        saved: SavedTensors = (x.to(dtype) if codec is None else encoded(codec, x),)
        recipe = Recipe(Itself(x.shape, codec), saved, weak=True)
        attach(x, recipe)
    else:
        saved = recipe.saved() or ()
    recipe.rebuilt.add_user()
    return recipe.rebuilt, saved


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
        return _compiled_forward(module, layer, *args, **kwargs)
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
    if layer.shared.lost:
        _warn_of_lost(layer.shared)
    if module.training and layer.name not in layer.shared.looked and not detect_fake_mode():
        names = uncompressed(module, (args, kwargs), out)
        # None: this pass kept nothing for backward, so look again after the next one.
        if names is not None:
            layer.shared.looked.add(layer.name)
        if names:
            say_once(f"{type(module).__name__} saves whole tensors for backward in functions: {', '.join(names)}")
    return out


def _warn_of_lost(shared: Shared) -> None:
    """Say before the first step that a format spoils norms' inputs, from which most gradients follow."""
    worst = max(shared.lost, key=shared.lost.__getitem__)
    log.warning(
        "saved inputs of norms (%d) lose %.0f %% and more of their channels' values (%s %.0f %%), next to channels "
        "that are far larger: gradients of many weights will be wrong; allowed: norm=8, which examines outliers",
        len(shared.lost), 100 * LOST, worst, 100 * shared.lost[worst],
    )  # fmt: skip
    shared.lost.clear()


class Following(TorchFunctionMode):
    """Hands functions to their handlers while gradients are enabled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        modules = _threads.running
        # A graph of `torch.compile` inside cannot see recipes of tensors (`_compiled_forward` runs there).
        if torch.compiler.is_compiling() or not modules or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if func is Tensor.view_as and modules and (recipe := recipe_of(args[0])) is not None:
                attach(out, recipe)  # in `from_local` and `to_local` of a DTensor
            return out
        module, layer, checkpoint = modules[-1]
        handler = HANDLERS.get(func)
        if handler is None or not _fits(handler, len(args), tuple(kwargs)):
            return func(*args, **kwargs)
        # The second run of a checkpoint that began in this module's forward calls functions without the module.
        if checkpoint_hook() is checkpoint and not selective():
            handler = functools.partial(handler, TorchCall(func, module, layer))
            sharded = any(isinstance(arg, DTensor) for arg in args)
            out = on_shards(func, handler, *args, **kwargs) if sharded else handler(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


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


_codecs: dict[str, Codec] = {}


@torch.library.custom_op("lowbit::saved_encode", mutates_args=())
def _encode(x: Tensor, codec: str) -> Tensor:
    return _codecs[codec].encode(x)


@_encode.register_fake
def _(x: Tensor, codec: str) -> Tensor:
    return x.new_empty(_codecs[codec].nbytes(x.shape), dtype=torch.uint8)


@torch.library.custom_op("lowbit::saved_decode", mutates_args=())
def _decode(payload: Tensor, shape: list[int], dtype: torch.dtype, codec: str) -> Tensor:
    return _codecs[codec].decode(payload, shape=shape, dtype=dtype)


@_decode.register_fake
def _(payload: Tensor, shape: list[int], dtype: torch.dtype, codec: str) -> Tensor:
    return payload.new_empty(shape, dtype=dtype)


def name_of(policy: LayerAware, kind: str, name: str) -> str | None:
    """Name of a layer's format for operators in graphs; None: its input is saved unchanged."""
    codec = policy.codec(policy.bits_of(kind, name)) if kind in ("norm", "mlp", "gate", "linear") else None
    if codec is None:
        return None
    _codecs[repr(codec)] = codec
    return repr(codec)


@dataclass(frozen=True)
class _InGraph:
    """A format whose encoding and decoding are nodes of a graph."""

    name: str

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Leave `out` alone: it is the payload, because nodes fill no tensors that others have made."""

    def decode(self, payload: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.ops.lowbit.saved_decode(payload, shape, dtype, self.name)


@torch.compiler.allow_in_graph  # what it calls reads the state of threads; the compiler's next stage traces it
def _linear_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, codec: str) -> Tensor:
    rebuilt = Rebuilt(Itself(x.shape, _InGraph(codec)))  # pyright: ignore[reportArgumentType]
    payload = torch.ops.lowbit.saved_encode(x.detach(), codec)
    return LinearFunction.apply(x, weight, bias, False, dtype, rebuilt, (payload,))


@torch.compiler.allow_in_graph
def _activation_in_graph(x: Tensor, activation: str, codec: str) -> Tensor:
    form = GatedOutput(x.shape, _InGraph(codec), activation)  # pyright: ignore[reportArgumentType]
    return ActivationFunction.apply(x, form, torch.ops.lowbit.saved_encode(x.detach(), codec))


class _NormInGraph(torch.autograd.Function):
    """A norm over the last dimension, with `scale` and `shift` in float32.

    Not `NormFunction`: its sums, those of kernels or of PyTorch's own norms, have another order, and the compiler joins
    the steps written out here with those around them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, centred: bool, eps: float,
        dtype: torch.dtype, codec: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(torch.ops.lowbit.saved_encode(x, codec), scale)
        ctx.shape, ctx.dtype, ctx.codec, ctx.centred, ctx.eps = x.shape, x.dtype, codec, centred, eps
        ctx.has_shift = shift is not None
        out, _ = _normal(x, centred, eps)
        out = out if scale is None else out * scale
        return (out if shift is None else out + shift).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        payload, scale = ctx.saved_tensors
        x = torch.ops.lowbit.saved_decode(payload, ctx.shape, torch.float32, ctx.codec)
        normal, factor = _normal(x, ctx.centred, ctx.eps)
        grad = grad_out.float()
        rows = tuple(range(grad.dim() - 1))
        grad_scale = None if scale is None else (grad * normal).sum(rows)
        grad_shift = grad.sum(rows) if ctx.has_shift else None
        grad = grad if scale is None else grad * scale
        along = grad - normal * (grad * normal).mean(-1, keepdim=True)
        if ctx.centred:
            along = along - grad.mean(-1, keepdim=True)
        return (along * factor).to(ctx.dtype), grad_scale, grad_shift, None, None, None, None


def _normal(x: Tensor, centred: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize rows to a mean square of 1, and to a mean of 0 if `centred`; also return the factors."""
    x = x.float()
    x = x - x.mean(-1, keepdim=True) if centred else x
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * factor, factor


@torch.compiler.assume_constant_result  # so that these run while the graph is made
def _default_eps(dtype: torch.dtype, device: str) -> float:
    return default_eps(dtype, device)


@torch.compiler.assume_constant_result
@functools.cache
def _say_left() -> None:
    log.warning("activations are saved in full where graphs of torch.compile have DTensors")


def _compiled_forward(module: nn.Module, layer: Layer, *args: Any, **kwargs: Any) -> Any:
    x = args[0] if len(args) == 1 and not kwargs else None
    codec: str | None = layer.in_graphs
    if codec is None or not isinstance(x, Tensor) or not module.training or x.dtype not in FLOATS or x.dim() < 2:
        return layer.own(*args, **kwargs)
    if isinstance(x, DTensor):
        _say_left()
        return layer.own(x)
    if layer.kind == "linear":
        return _linear(module, layer, x, codec)
    if x.numel() < FEWEST:
        return layer.own(x)
    if layer.kind == "norm":
        return _norm(module, layer.formula, x, codec)
    supported = layer.formula in TABLE and x.requires_grad
    return _activation_in_graph(x, layer.formula, codec) if supported else layer.own(x)


def _linear(module: Any, layer: Layer, x: Tensor, codec: str) -> Tensor:
    weight, bias = module.weight, module.bias
    plain = type(module).forward is nn.Linear.forward and weight.requires_grad and weight.dtype in FLOATS
    if not plain or x.numel() < max(FEWEST, layer.shared.policy.smallest):
        return layer.own(x)
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return _linear_in_graph(x, weight, bias, dtype, codec)


def _norm(module: Any, norm: Norm, x: Tensor, codec: str) -> Tensor:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = _default_eps(x.dtype, x.device.type) if norm.eps is None else norm.eps
    scale = None if weight is None else weight.float() + norm.offset
    shift = None if bias is None else bias.float()
    dtype = x.dtype
    if norm.promotes and weight is not None:
        dtype = torch.promote_types(x.dtype, weight.dtype)
    return _NormInGraph.apply(x, scale, shift, norm.centred, eps, dtype, codec)
