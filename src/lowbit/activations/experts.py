"""Mixture-of-experts layers with the weights of all experts in one tensor, as Hugging Face implements them.

They are recognized by what they compute for a few tokens with small weights: any class whose forward takes hidden
states, and indices and weights of the chosen experts, with any implementation (a loop, batched or grouped products).

Backward starts from rounded inputs; routing stays exact. The outputs of the first matrices are saved in few bits. The
tokens' hidden states are rebuilt from their recipe and gathered again; activations are recomputed. The gradient of a
routing weight is a scalar product at the input of the last matrix, so the experts' outputs are not needed.

Shape suffixes: N tokens, K choices of each, S rows (token and expert) sorted by expert, E experts, I inputs, O outputs
of an expert's matrix, F inner features.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from lowbit.activations import structure
from lowbit.activations.follow import MARK, Layer, TorchCall
from lowbit.activations.functions import first_order, needed_now
from lowbit.activations.gated import reference as gated
from lowbit.activations.recipes import Rebuilt, SavedTensors, is_fused, plain_gated, room
from lowbit.codecs import Codec
from lowbit.codecs.checks import draw_seed

_UP, _DOWN = ("gate_up_proj", "up_proj"), "down_proj"
_TOKENS, _CHOICES, _INPUTS, _INNER = 12, 2, 24, 8  # sizes of the test run; some kernels require multiples of 4
_ROWS = 4096  # rows at a time, where float32 copies are needed


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The formula of a layer: the name of the first weights, whether they are (E, inputs, outputs), and the gate."""

    up: str
    transposed: bool
    gate: Gate

    def weights(self, module: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        up, down = getattr(module, self.up), getattr(module, _DOWN)
        return up, getattr(module, f"{self.up}_bias", None), down, getattr(module, f"{_DOWN}_bias", None)

    def inputs_first(self, weight: Tensor) -> Tensor:
        """Convert a weight, or its gradient, to (E, I, O), or back."""
        return weight if self.transposed else weight.transpose(1, 2)


def experts_like(module: nn.Module) -> Experts | None:
    """The formula of a mixture-of-experts layer; None for any other module."""
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
            experts = Experts(up=up, transposed=transposed, gate=gate)
            if all(_computes(module, experts, scale) for scale in (0.1, 1.0)):
                return experts
    return None


def _gate(module: Any, has_up: bool) -> Gate | None:
    """The function between the products; None if it is unknown."""
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
    candidates = ((name, plain_gated(gate, up, name)) for name in gated.TABLE)
    activation = next((name for name, y in candidates if torch.allclose(value, y, rtol=1e-5, atol=1e-5)), None)
    return Gate(formula=formula, activation=activation, has_up=has_up)


def _first_half_gates(act: Callable[[Tensor], Tensor], pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return act(gate) * up


def _computes(module: nn.Module, experts: Experts, scale: float) -> bool:
    """Whether a module computes this formula with weights of this scale."""
    numbers = functools.partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    outputs, count = _INNER * (2 if experts.gate.has_up else 1), len(getattr(module, experts.up))
    sizes = {experts.up: (_INPUTS, outputs), _DOWN: (_INNER, _INPUTS)}
    small = {
        name: numbers(count, *(size if experts.transposed else size[::-1])) * scale for name, size in sizes.items()
    }
    small |= {
        f"{name}_bias": numbers(count, size[1]) for name, size in sizes.items() if hasattr(module, f"{name}_bias")
    }
    x, weights = numbers(_TOKENS, _INPUTS), numbers(_TOKENS, _CHOICES)
    index = torch.arange(_TOKENS * _CHOICES, device="cpu").view(_TOKENS, _CHOICES) % count
    training = [(part, "training", True) for part in module.modules()]  # so that dropout changes the result
    with structure._changed(training), torch.random.fork_rng(devices=[]):
        y = structure._try(module, small, x, index, weights)
    routing = Routing.of(index, count)
    if y is None or y.shape != x.shape or routing is None:
        return False
    first, last = ((small[name], small.get(f"{name}_bias")) for name in sizes)
    with torch.no_grad():
        expected = ExpertsFunction.apply(x, weights, *first, *last, experts, None, x.dtype, routing, None, ())
    return torch.allclose(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def experts(name: str, module: nn.Module, model: nn.Module) -> Any:
    """Layer type, forward and its parameters for a mixture-of-experts layer, and for what lies inside one."""
    if formula := experts_like(module):
        return "mlp", _run, formula
    above = vars(model.get_submodule(name.rpartition(".")[0])).get(MARK) if name else None
    return ("", _run_as_it_is, None) if above is not None and above.forward in (_run, _run_as_it_is) else None


def _run(module: Any, layer: Layer, *args: Any, **kwargs: Any) -> Any:
    """A mixture-of-experts layer that saves hidden states, once, and what the gate gets, in few bits."""
    formula: Experts = layer.formula
    call = TorchCall(layer.own, module, layer)
    inputs = _inputs(layer.own, args, kwargs) if _is_passive(module) else None
    routing = None if inputs is None else _routing(call, formula, *inputs)
    if inputs is None or routing is None:
        return layer.own(*args, **kwargs)
    x, _, weights = inputs
    up, up_bias, down, down_bias = formula.weights(module)
    dtype, way = up.dtype, getattr(getattr(module, "config", None), "_experts_implementation", None)
    if torch.is_autocast_enabled(x.device.type) and way != "grouped_mm":  # it does not know autocast
        dtype = torch.get_autocast_dtype(x.device.type)
    with torch._C.DisableTorchFunction():
        rebuilt, saved = call.source(x, dtype) if up.requires_grad else (None, ())
        return ExpertsFunction.apply(
            x, weights, up, up_bias, down, down_bias, formula, call.codec(layer.kind), dtype, routing, rebuilt, saved
        )


def _run_as_it_is(module: Any, layer: Layer, *args: Any, **kwargs: Any) -> Any:
    """Run a module between the products unchanged: backward runs it again in full precision."""
    with torch._C.DisableTorchFunction():
        return layer.own(*args, **kwargs)


def _inputs(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """Hidden states (N, I), indices and weights (N, K) of a call; None for another kind of call."""
    if kwargs:
        try:
            args = tuple(inspect.signature(own).bind(*args, **kwargs).arguments.values())
        except TypeError:  # the module's own forward will raise it
            return None
    if len(args) != 3 or not all(isinstance(t, Tensor) and t.dim() == 2 for t in args):
        return None
    x, index, weights = args
    fits = index.shape == weights.shape and len(x) == len(index) and not index.is_floating_point()
    return (x, index, weights) if fits else None


def _routing(call: TorchCall, formula: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Routing | None:
    """The routing of a call; None if the module's own forward has nothing to save, or has to raise an error."""
    tensors = [t for t in formula.weights(call.module) if t is not None]
    if tensors[0].shape[1 if formula.transposed else 2] != x.shape[1] or not call.saves(x, weights, *tensors):
        return None
    if {t.device for t in (x, index, weights, *tensors)} != {x.device}:
        return None
    if not torch.is_autocast_enabled(x.device.type) and len({t.dtype for t in (x, *tensors)}) > 1:
        return None
    with torch.no_grad():
        routing = Routing.of(index, len(tensors[0]))
    return routing if routing is not None and routing.ends[-1] else None


def _is_passive(module: nn.Module) -> bool:
    """Whether the gate's modules have no side effects: no dropout, and no hooks except this library's."""
    drops = any(isinstance(c, nn.Dropout) and c.training and c.p > 0 for c in module.children())
    return not drops and not structure.is_observed(module)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The function between the products: (S, F) from (S, 2F), or from (S, F) without an `up` half.

    `activation`: name in the formula act(gate) * up with gate in the first half, for which there are operators; None:
    only `formula`, the module's own function, is known.
    """

    formula: Callable[[Tensor], Tensor]
    activation: str | None
    has_up: bool

    def encode(self, pre_SO: Tensor, codec: Codec | None, dtype: torch.dtype) -> tuple[Tensor, SavedTensors]:
        """Compute the gate's output in `dtype`; also return the tensors that backward needs."""
        if codec is None:
            return self.formula(pre_SO).to(dtype), (pre_SO,)
        if self.activation is None or not is_fused(codec):
            return self.formula(pre_SO).to(dtype), (codec.encode(pre_SO),)
        gate, up = (half.contiguous() for half in pre_SO.chunk(2, -1)) if self.has_up else (pre_SO, None)
        saved = (room(codec, gate), None if up is None else room(codec, up))
        out = torch.empty_like(gate, dtype=dtype)
        seed = draw_seed(codec.rounding, gate.device)
        gated.encode(gate, up, saved[0], saved[1], out, self.activation, codec.bits, codec.group, seed)
        return out, saved

    def backward(self, saved: SavedTensors, codec: Codec | None, grad_SF: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return the gradient of the gate's input, and the gate's output again, both in the dtype of `grad_SF`."""
        first, second = (*saved, None)[:2]
        assert first is not None
        out = torch.empty_like(grad_SF)
        if self.activation is not None and is_fused(codec):
            grad_gate, grad_up = torch.empty_like(grad_SF), torch.empty_like(grad_SF) if self.has_up else None
            gated.backward(first, second, grad_SF, grad_gate, grad_up, out, self.activation, codec.bits, codec.group)
            return grad_gate if grad_up is None else torch.cat([grad_gate, grad_up], -1), out
        shape = (len(grad_SF), width)
        pre_SO = first if codec is None else codec.decode(first, shape=shape, dtype=grad_SF.dtype)
        grad = torch.empty(shape, dtype=grad_SF.dtype, device=grad_SF.device)
        # In pieces: float32 copies of all rows would be the largest tensors of backward.
        for start in range(0, len(grad_SF), _ROWS):
            rows = slice(start, start + _ROWS)
            with torch.enable_grad():
                leaf = pre_SO[rows].detach().float().requires_grad_()
                value = self.formula(leaf)
            (grad[rows],) = torch.autograd.grad(value, leaf, grad_SF[rows].to(value.dtype))
            out[rows] = value.detach()
        return grad, out


class ExpertsFunction(torch.autograd.Function):
    """sum over a token's choices of weight * down_e(gate(up_e(x))), where e is the expert that it chose."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weights_NK: Tensor,
        up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
        form: Experts, codec: Codec | None, dtype: torch.dtype,
        routing: Routing, rebuilt: Rebuilt | None, saved: SavedTensors,
    ) -> Tensor:  # fmt: skip
        """`codec`: of the gate; `dtype`: of products; `rebuilt`: x in backward, from `saved`; None: `up` is frozen."""
        ctx.present = (True, True, True, up_bias is not None, True, down_bias is not None)
        ctx.form, ctx.codec, ctx.rebuilt, ctx.ends, ctx.choices = form, codec, rebuilt, routing.ends, routing.choices
        ctx.x_dtype, ctx.dtype = x_NI.dtype, dtype
        with torch.autocast(x_NI.device.type, enabled=False):
            pre_SO = product(routing.gather(x_NI).to(dtype), form.inputs_first(up), routing)
            ctx.width = pre_SO.shape[1]
            if up_bias is not None:
                pre_SO = pre_SO + bias_rows(up_bias, routing)
            inner_SF, of_gate = form.gate.encode(pre_SO, codec, dtype)
            # Free it before the next product: it is among the largest tensors of the layer.
            del pre_SO
            out_SI = product(inner_SF, form.inputs_first(down), routing)
            del inner_SF
            if down_bias is not None:
                out_SI = out_SI + bias_rows(down_bias, routing)
            out_SI = out_SI * weights_NK.reshape(-1, 1).index_select(0, routing.order)
            out = routing.sums(out_SI, len(x_NI)).to(x_NI.dtype)
        ctx.of_gate = len(of_gate)
        ctx.save_for_backward(weights_NK, up, down, up_bias, down_bias, routing.order, *of_gate, *saved)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        weights_NK, up, down, up_bias, down_bias, order, *rest = ctx.saved_tensors
        of_gate, saved = tuple(rest[: ctx.of_gate]), tuple(rest[ctx.of_gate :])
        form: Experts = ctx.form
        routing = Routing(order, ctx.ends, ctx.choices)
        needs_x, needs_weights, needs_up, needs_up_bias, needs_down, needs_down_bias = needed_now(ctx)
        grad_x = grad_weights = grad_up = grad_up_bias = grad_down = grad_down_bias = None
        g_SI = routing.gather(grad_out.to(ctx.dtype))
        weights_S1 = weights_NK.reshape(-1, 1).index_select(0, order).to(ctx.dtype)
        unweighted_SF = product(g_SI, form.inputs_first(down).transpose(1, 2), routing)
        grad_pre_SO, inner_SF = form.gate.backward(of_gate, ctx.codec, unweighted_SF * weights_S1, ctx.width)
        if needs_weights:
            along_S = (unweighted_SF * inner_SF).sum(-1, dtype=torch.float32)
            if down_bias is not None:
                along_S += (g_SI * bias_rows(down_bias, routing)).sum(-1, dtype=torch.float32)
            grad_weights = torch.zeros(weights_NK.numel(), dtype=torch.float32, device=grad_out.device)
            grad_weights = grad_weights.index_copy_(0, order.long(), along_S).view_as(weights_NK)
            grad_weights = grad_weights.to(weights_NK.dtype)
        del unweighted_SF
        g_SI *= weights_S1
        if needs_down_bias and down_bias is not None:
            grad_down_bias = bias_gradient(g_SI, down_bias, routing)
        if needs_down:
            grad_down = form.inputs_first(weight_gradient(inner_SF, g_SI, form.inputs_first(down), routing))
        del g_SI, inner_SF
        if needs_up_bias and up_bias is not None:
            grad_up_bias = bias_gradient(grad_pre_SO, up_bias, routing)
        if needs_up:
            x_SI = routing.gather(ctx.rebuilt.get(saved, ctx.dtype).reshape(len(weights_NK), -1))
            grad_up = form.inputs_first(weight_gradient(x_SI, grad_pre_SO, form.inputs_first(up), routing))
            del x_SI
        if needs_x:
            grad_SI = product(grad_pre_SO, form.inputs_first(up).transpose(1, 2), routing)
            grad_x = routing.sums(grad_SI, len(weights_NK)).to(ctx.x_dtype)
        return grad_x, grad_weights, grad_up, grad_up_bias, grad_down, grad_down_bias, *[None] * 6


@dataclass(frozen=True)
class Routing:
    """The assignment of tokens to experts: exact, and the same in forward and backward.

    Attributes:
        order: (S,) positions in the flat (tokens, choices) index, sorted by expert, without those that have none.
        ends: for each expert, the end of its rows.
        choices: number of choices of each token, including those without an expert.
    """

    order: Tensor
    ends: tuple[int, ...]
    choices: int

    @classmethod
    def of(cls, index_NK: Tensor, experts: int) -> Routing | None:
        """Build the routing of an index; None if a number is not in 0 to `experts`, where `experts` means no expert."""
        # Stable: the rows of an expert keep the order of tokens, so sums round alike each time.
        ids, order = torch.sort(index_NK.reshape(-1), stable=True)
        if isinstance(ids, FakeTensor):  # it has no values: share rows evenly, so that bytes can be counted
            even = tuple(len(ids) * (expert + 1) // experts for expert in range(experts))
            return cls(order.to(torch.int32), even, index_NK.shape[1])
        limits = torch.arange(experts + 2, device=ids.device, dtype=ids.dtype)
        first, *ends, last = torch.searchsorted(ids, limits).tolist()
        if first != 0 or last != len(ids):
            return None
        return cls(order[: ends[-1]].to(torch.int32), tuple(ends), index_NK.shape[1])

    def gather(self, x_NC: Tensor) -> Tensor:
        return x_NC.index_select(0, self.order // self.choices)

    def sums(self, x_SC: Tensor, tokens: int) -> Tensor:
        """Add up the rows of each token, in a fixed order."""
        all_rows = x_SC.new_zeros(tokens * self.choices, x_SC.shape[1])
        all_rows.index_copy_(0, self.order.long(), x_SC)
        return all_rows.view(tokens, self.choices, -1).sum(1)

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Yield the experts that have rows, with their rows."""
        start = 0
        for expert, end in enumerate(self.ends):
            if end > start:
                yield expert, slice(start, end)
            start = end


def product(x_SI: Tensor, weight_EIO: Tensor, routing: Routing) -> Tensor:
    """Multiply each row by its expert's matrix, in the dtype of the rows."""
    if _in_one_launch(x_SI, weight_EIO):
        return functional.grouped_mm(x_SI, weight_EIO.to(x_SI.dtype), offs=_offsets(routing, x_SI))
    out = x_SI.new_empty(len(x_SI), weight_EIO.shape[2])
    for expert, rows in routing.slices():
        torch.mm(x_SI[rows], weight_EIO[expert].to(x_SI.dtype), out=out[rows])
    return out


def weight_gradient(x_SI: Tensor, grad_SO: Tensor, like_EIO: Tensor, routing: Routing) -> Tensor:
    """The gradient of `product` at the weights, in their dtype and layout; 0 for experts without rows."""
    if _in_one_launch(x_SI, like_EIO):
        grad = functional.grouped_mm(x_SI.t(), grad_SO, offs=_offsets(routing, x_SI))
        out = torch.empty_like(like_EIO).copy_(grad)
        used = {expert for expert, _ in routing.slices()}
        for expert in set(range(len(out))) - used:  # kernels may leave these uninitialized
            out[expert] = 0
        return out
    out = torch.zeros_like(like_EIO)
    for expert, rows in routing.slices():
        out[expert] = x_SI[rows].t() @ grad_SO[rows]
    return out


def bias_rows(bias_EO: Tensor, routing: Routing) -> Tensor:
    """Each row's expert's bias."""
    ends = torch.tensor(routing.ends)
    counts = ends.diff(prepend=ends.new_zeros(1))
    experts = torch.repeat_interleave(counts, output_size=routing.ends[-1])
    return bias_EO.index_select(0, experts.to(bias_EO.device))


def bias_gradient(grad_SO: Tensor, like_EO: Tensor, routing: Routing) -> Tensor:
    """The gradient of `bias_rows` at the biases."""
    out = torch.zeros_like(like_EO)
    for expert, rows in routing.slices():
        out[expert] = grad_SO[rows].sum(0)
    return out


def _offsets(routing: Routing, x: Tensor) -> Tensor:
    return torch.tensor(routing.ends, dtype=torch.int32, device=x.device)


def _in_one_launch(x_SI: Tensor, weight_EIO: Tensor) -> bool:
    """Whether PyTorch has a kernel for all experts at once; on CPUs it loops over them like this module."""
    if not x_SI.is_cuda or x_SI.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x_SI.device) < (8, 0):
        return False
    return all(size % 8 == 0 for size in weight_EIO.shape[1:])  # rows aligned to 16 bytes
