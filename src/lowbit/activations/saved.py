"""`compress_saved_`: saves quantized activations for backward, and recomputes the rest from them.

It replaces the forward of each module, and lets the mode that follows a model see Megatron-Core's linear layers and
gates: PyTorch does not pass it autograd functions written in Python, but `apply` of these classes does. Megatron is not
imported: functions that are not loaded are not used.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from lowbit.activations.checkpoint import is_checkpointed, restore_checkpointed
from lowbit.activations.experts import experts
from lowbit.activations.follow import (
    HANDLERS,
    MARK,
    Following,
    Layer,
    Shared,
    TorchCall,
    followed_forward,
    name_of,
    say_once,
)
from lowbit.activations.functions import first_order
from lowbit.activations.handlers import Followed, norm_or_activation
from lowbit.activations.policy import GATES, KINDS, WHOLE, Format, LayerAware
from lowbit.activations.recipes import Rebuilt, SavedTensors
from lowbit.activations.structure import activation_like, is_activation, linear_like, norm_like
from lowbit.codecs import GroupInt

if TYPE_CHECKING:
    from lowbit.activations.layer_plan import LayerPlan


def compress_saved_(model: nn.Module, policy: "LayerAware | LayerPlan | None" = None) -> "Compressed":
    """Save a model's activations for backward in few bits; changes the model in place.

    Forward uses unrounded activations. Its results are unchanged, except for the last bits where norms and activation
    functions are computed in float32 and rounded once. Backward gets rounded inputs of norms, activation functions,
    gates, linear layers and attention, and recomputes the rest, so a decoder layer saves one payload each for norms,
    gate, up, q, k and v. Dropout and ReLU save one bit per element. Weights are saved by reference, even if autocast
    casts them. A linear layer with a frozen weight saves no input. In evaluation mode and without gradients nothing is
    saved or coded.

    It follows the torch functions that run, through views, slices, casts and dropout. So fused projections, adapters
    and subclasses of `nn.Linear` need no special support; norms and activation functions made of several functions, and
    attention written out as products and softmax, are recognized. Backward calls activation functions without kernels
    again, if they are modules, or attributes of a module with linear layers, and a trial run shows them to be
    elementwise, without parameters, state and random numbers. Tensors of any other function, such as the scans of
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
        return compress(model, policy or LayerAware())
    if not hasattr(policy, "apply_"):  # importing LayerPlan here would be circular, because plans call `compress`
        raise TypeError(f"policy is {type(policy).__name__}; allowed: LayerAware or LayerPlan")
    return policy.apply_(model)


def compress(model: nn.Module, policy: LayerAware) -> "Compressed":
    """`compress_saved_` with a policy."""
    check_new(model)
    _ask_first()
    bits: dict[str, tuple[str, Format]] = {}
    shared = Shared(policy)
    modules = {n: m for n, m in model.named_modules() if _can_run(m) and MARK not in vars(m)}
    policy.check_layers(modules)
    inside: tuple[str, ...] = ()  # activation functions, which run as a whole
    for name, module in modules.items():
        if name.startswith(inside):
            continue
        kind, forward, formula = _replacement(name, module, model)
        if callable(formula):
            inside += (f"{name}." if name else "",)
        _follow_functions(module)
        format_of = "gate" if kind == "mlp" and formula in GATES else kind
        layer = Layer(
            name=name, own=module.forward, shared=shared, forward=forward, kind=kind, formula=formula,
            in_graphs=name_of(policy, format_of, name),
        )  # fmt: skip
        if kind:
            bits[name] = (kind, policy.bits_of(format_of, name))
        # Keep the signature of the module's own forward, which callers such as trainers inspect.
        module.forward = functools.update_wrapper(
            functools.partial(followed_forward, module, layer), module.forward, updated=()
        )
        setattr(module, MARK, layer)
    if not bits and next(model.parameters(), None) is None:
        restore_(model)
        raise ValueError(
            f"model ({type(model).__name__}) has no module to compress; allowed: norms, linear layers, activations"
        )
    return Compressed(model, bits, [policy.bits_of("attention")])


def check_new(model: nn.Module) -> None:
    """Raise TypeError or ValueError unless this is a module of which no part is compressed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; allowed: Module")
    # Modules that only run functions may be shared: the stages of a rank share rotary embeddings.
    marked = {n: layer for n, m in model.named_modules() if (layer := vars(m).get(MARK)) is not None}
    if twice := [name for name, layer in marked.items() if layer.kind or not name]:
        raise ValueError(f"model is compressed already ({twice[0] or 'itself'!r}); allowed: restore_(model) first")


def restore_(model: nn.Module) -> None:
    """Undo `compress_saved_` in place, also in copies of a compressed model.

    Args:
        model: any module; parts of it that are not compressed do not change.
    """
    for module in model.modules():
        restore_checkpointed(module)
        for name, value in [*vars(module).items()]:
            if isinstance(value, Followed):
                setattr(module, name, value.function)
        layer = vars(module).pop(MARK, None)
        if layer is not None:
            del module.forward
            if module.forward != layer.own:  # an instance's own, not its class's
                module.forward = layer.own


class Compressed:
    """The changes that `compress_saved_` made to a model.

    Attributes:
        bits: layer type and bits (or codec) of each norm, activation function and linear layer, by name. A linear layer
            uses its bits only where its input cannot be rebuilt from another layer's payloads. With a `LayerPlan`: of
            modules in few bits.
        attention: bits (or codec) of the values of attention; several if a `LayerPlan` has several.
    """

    def __init__(self, model: nn.Module, bits: dict[str, tuple[str, Format]], attention: Sequence[Format] = ()) -> None:
        self.bits, self.attention, self._model = bits, list(attention), model

    def remove(self) -> None:
        """Restore the modules' own forward."""
        restore_(self._model)

    def __repr__(self) -> str:
        """Return a table: what is kept in how many bits, in how many modules, and their names within a layer."""
        modules: dict[tuple[str, str], list[str]] = {}
        for name, (kind, bits) in sorted(self.bits.items(), key=lambda each: KINDS.index(each[1][0])):
            modules.setdefault((kind, _in_words(bits)), []).append(name.rpartition(".")[2])
        rows = [(*key, str(len(names)), ", ".join(dict.fromkeys(names))) for key, names in modules.items()]
        for bits in self.attention:
            more = "values; queries and keys take 2.25 bits more" if bits in range(WHOLE) else ""
            rows.append(("attention", _in_words(bits), "all", more))
        if count := sum(is_checkpointed(module) for module in self._model.modules()):
            rows.append(("checkpoint", "input", str(count), "layers that backward computes again"))
        lines = [("kept", "bits", "modules", "where"), *rows]
        first, second = (max(len(line[i]) for line in lines) for i in (0, 1))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {c:>7}  {d}".rstrip() for a, b, c, d in lines)


def _in_words(bits: Format) -> str:
    """Return a number of bits, also that of a codec with integers; another codec in full."""
    return "as it is" if bits == WHOLE else str(bits.bits if isinstance(bits, GroupInt) else bits)


def _replacement(name: str, module: nn.Module, model: nn.Module) -> tuple[str, Callable[..., Any] | None, Any]:
    """Layer type of a module, and the forward that replaces its own, if any, with parameters."""
    if change := experts(name, module, model):
        return change
    if norm := norm_like(module):
        return "norm", norm_or_activation, norm
    if (activation := activation_like(module)) is not None:
        return "mlp", norm_or_activation, activation
    return ("linear" if linear_like(module) else ""), None, None


def _follow_functions(module: nn.Module) -> None:
    """Let the mode see the activation functions that a feed-forward block holds as attributes."""
    if not any(map(linear_like, module.children())):
        return
    for name, value in [*vars(module).items()]:
        known = name.startswith("_") or name == "forward" or isinstance(value, type | Followed)
        known = known or any(value is function for function in HANDLERS)  # the mode sees these themselves
        if callable(value) and not known and is_activation(value):
            setattr(module, name, Followed(value))


def _can_run(module: nn.Module) -> bool:
    """Whether a module has its own forward, unlike a container."""
    forward = getattr(module.forward, "__func__", module.forward)
    return forward is not nn.modules.module._forward_unimplemented and not isinstance(module, torch.jit.ScriptModule)


def _ask_first() -> None:
    """Pass calls of the functions below to the mode, if they are loaded; outside of followed models nothing changes."""
    for (module, name), handler in _KNOWN.items():
        owner: Any = sys.modules.get(module)
        own = getattr(owner, name, None)
        if isinstance(own, type):
            owner, name, own = own, "apply", own.apply  # pyright: ignore
        if own is not None and own not in HANDLERS:
            asking = _asking(own)
            HANDLERS[asking] = handler
            setattr(owner, name, staticmethod(asking) if isinstance(owner, type) else asking)


def _asking(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*args: Any) -> Any:
        tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
        return handle_torch_function(apply, tensors, *args) if has_torch_function(tensors) else own(*args)

    apply.__name__ = getattr(own, "__self__", own).__name__  # of the class
    apply.function = getattr(own, "__self__", None)  # pyright: ignore
    return apply


def _linear(call: TorchCall, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """A column- or row-wise linear layer: Megatron's own forward and backward, which gets the rebuilt input."""
    if not weight.requires_grad or not call.saves(input, weight, bias):
        return NotImplemented
    return _Rebuilding.apply(input, weight, bias, call.func.function, rest, *call.source(input, input.dtype))


class _Rebuilding(torch.autograd.Function):
    """Wraps another function of x, weight and bias; saves tensors that rebuild x instead of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, function: Any, rest: tuple[Any, ...],
        rebuilt: Rebuilt, saved: SavedTensors,
    ) -> Tensor:  # fmt: skip
        """`function`: the class, which also gets `rest`; `rebuilt`: x in backward, from `saved`."""
        given: list[Tensor] = []
        ctx.own = SimpleNamespace(save_for_backward=lambda *tensors: given.extend(tensors))
        out = function.forward(ctx.own, x, weight, bias, *rest)
        # It refers to `given`, and so to x, which would stay alive until backward.
        del ctx.own.save_for_backward
        ctx.is_x, ctx.function = [t is x for t in given], function
        ctx.rebuilt, ctx.shape, ctx.dtype = rebuilt, x.shape, x.dtype
        ctx.save_for_backward(*saved, *(t for t in given if t is not x))
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        split = len(ctx.saved_tensors) - ctx.is_x.count(False)
        saved, others = ctx.saved_tensors[:split], iter(ctx.saved_tensors[split:])
        x = ctx.rebuilt.get(saved, ctx.dtype).reshape(ctx.shape)
        # A new object: in `ctx.own` the rebuilt x would live as long as the graph.
        own = SimpleNamespace(**vars(ctx.own), needs_input_grad=ctx.needs_input_grad[:3])
        own.saved_tensors = tuple(x if is_x else next(others) for is_x in ctx.is_x)
        return *ctx.function.backward(own, grad_out)[:3], None, None, None, None


def _gate(call: TorchCall, x: Tensor, *rest: Any, activation: Callable[..., Tensor], has_up: bool = True) -> Any:
    """Compute act(gate) * up, or act(gate), by torch functions, which are followed.

    `rest`: a bias of `x`, if there is one, and for SwiGLU whether Megatron saves in FP8 or moves to the CPU.
    """
    if any(arg is True for arg in rest):
        say_once("gates that Megatron saves in FP8 or moves to the CPU are left to it")
        return NotImplemented
    bias = next((arg for arg in rest if isinstance(arg, Tensor)), None)
    if not call.saves(x, bias):
        return NotImplemented
    with Following():
        x = x if bias is None else x + bias
        if not has_up:
            return activation(x)
        gate, up = torch.chunk(x, 2, -1)
        return activation(gate) * up


_gelu = functools.partial(functional.gelu, approximate="tanh")
_swiglu, _geglu = (functools.partial(_gate, activation=each) for each in (functional.silu, _gelu))
_FUSIONS = "megatron.core.fusions.fused_bias_"
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("megatron.core.tensor_parallel.layers", "LinearWithGradAccumulationAndAsyncCommunication"): _linear,
    (f"{_FUSIONS}swiglu", "SwiGLUFunction"): _swiglu,
    (f"{_FUSIONS}swiglu", "BiasSwiGLUFunction"): _swiglu,
    (f"{_FUSIONS}geglu", "GeGLUFunction"): _geglu,
    (f"{_FUSIONS}geglu", "BiasGeGLUFunction"): _geglu,
    # It is bound when Megatron is imported.
    ("megatron.core.transformer.mlp", "bias_gelu_impl"): functools.partial(_geglu, has_up=False),
}
