"""Autograd functions whose backward starts from rounded inputs, or rebuilds them (`lowbit.activations.recipes`).

Forward computes from the unrounded inputs. Everything is saved through `save_for_backward`, so PyTorch's own checks,
hooks and checkpointing see it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import TensorWeakRef

from lowbit.activations.checkpoint import first_pass, product_needed
from lowbit.activations.gated import reference as gated
from lowbit.activations.norm import reference as norm_operators
from lowbit.activations.policy import WithRows
from lowbit.activations.recipes import (
    GatedOutput,
    Masked,
    NormOutput,
    Operand,
    Rebuilt,
    Recipe,
    SavedTensors,
    check_present,
    decoded,
    plain_gated,
)
from lowbit.codecs.checks import draw_seed


def first_order(backward: Any) -> Any:
    """Make a backward that refuses to be differentiated, drops the output's recipe and runs without autocast.

    `once_differentiable` would not raise in a second pass that only needs gradients of inputs: its results have no path
    to them, so they would silently get 0, or None.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True in a model whose saved activations are compressed, which have no second "
                "derivatives; allowed: create_graph=False, or restore_(model) before the forward pass"
            )
        recipe: Recipe | None = getattr(ctx, "recipe", lambda: None)()
        if recipe is not None:
            recipe.release()
        with torch.autocast(grad_out.device.type, enabled=False):
            return backward(ctx, grad_out)

    return checked


def owned(out: Tensor) -> Tensor:
    """Hide that `out` is a view: PyTorch forbids in-place changes of views that an autograd function returns."""
    return torch.ops.aten._unsafe_view(out, out.shape)


class NormFunction(torch.autograd.Function):
    """norm(x) of (..., C); saves x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
        form: NormOutput, saved: SavedTensors, fresh: bool, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """`saved`: an empty payload to fill if `fresh`, otherwise a payload of x, or x; `dtype`: of the output."""
        ctx.form, ctx.shape, ctx.dtype = form, x.shape, x.dtype
        ctx.present = (True, weight is not None, bias is not None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*saved, weight)
        norm, payload = form.norm, saved[0]
        assert payload is not None
        codec, coded = form.in_kernels(payload)
        first = first_pass()
        # Kernels encode and normalize at once, so not if the payload exists already, or is not kept.
        if codec is None or not fresh or first:
            if form.codec is not None and fresh and not first:
                form.codec.encode(x, out=payload)
            return norm.in_float32(x, weight, bias).to(dtype)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        norm_operators.encode(
            _rows(x), weight, bias, coded, _rows(out), form.eps, norm.centred, norm.offset,
            codec.bits, codec.group, draw_seed(codec.rounding, x.device),
        )  # fmt: skip
        if isinstance(form.codec, WithRows):
            # The kernel has coded all tokens; zeros replace those that are kept exactly.
            form.codec.keep(x.contiguous(), payload)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        saved, weight = ctx.saved_tensors
        form: NormOutput = ctx.form
        check_present(weight)
        _, needs_weight, needs_bias = needed_now(ctx)
        bias = None  # the gradients do not depend on its values
        if needs_bias:
            # Kernels write the gradient into it.
            bias = torch.zeros(ctx.shape[-1:], dtype=ctx.bias_dtype, device=grad_out.device)
        codec, coded = form.in_kernels(saved)
        if codec is None:
            x = decoded(form.codec, saved, ctx.shape, ctx.dtype)
            grads = _differentiate(form.norm.in_float32, x, weight, bias, grad_out=grad_out)
            return *grads, None, None, None, None
        grad_x = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad_out.device)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        norm_operators.backward(
            coded, weight, _rows(grad_out), _rows(grad_x), grad_weight, bias,
            form.eps, form.norm.centred, form.norm.offset, codec.bits, codec.group,
        )  # fmt: skip
        if isinstance(form.codec, WithRows):
            # The kernel saw zeros for these tokens, which add nothing to the weight's gradient.
            index, kept = form.codec.kept(saved, ctx.shape)
            at_kept = _rows(grad_out)[index].float()
            grad_kept, more, _ = _differentiate(form.norm.in_float32, kept, weight, None, grad_out=at_kept)
            assert grad_kept is not None
            _rows(grad_x)[index] = grad_kept.to(grad_x.dtype)
            if grad_weight is not None and more is not None:
                grad_weight += more
        return grad_x, grad_weight, bias, None, None, None, None


class ActivationFunction(torch.autograd.Function):
    """act(x); saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: GatedOutput, saved: Tensor) -> Tensor:
        """`saved`: an empty payload, or x."""
        ctx.form, ctx.dtype, ctx.observed, ctx.handed = form, x.dtype, False, {}
        ctx.save_for_backward(saved)
        kernels, first = form.in_kernels(), first_pass()
        if kernels is None or first:
            if form.codec is not None and not first:
                form.codec.encode(x, out=saved)
            if not isinstance(form.activation, str):
                return owned(form.activation(x))
            return plain_gated(x, None, form.activation, wide=not first).to(x.dtype)
        name, codec = kernels
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        seed = draw_seed(codec.rounding, x.device)
        gated.encode(x.contiguous(), None, saved, None, out, name, codec.bits, codec.group, seed)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        (saved,) = ctx.saved_tensors
        sent, handed = ctx.handed.pop(torch._C._current_graph_task_id(), (None, None))
        # The same object: no other reader of the activation has added a gradient to the zeros.
        if handed is not None and grad_out is sent:
            return handed, None, None
        grad_x = _gated_gradients(ctx.form, (saved, None), (ctx.dtype, None), grad_out)[0]
        assert grad_x is not None
        return grad_x if handed is None else grad_x + handed, None, None


class ProductFunction(torch.autograd.Function):
    """act(gate) * up; saves gate and up.

    One operator computes the gradients of gate and up. In a pass that runs all nodes, the former is handed directly to
    the activation's node, which is next in the graph, and zeros are returned as the gradient of the activation. The
    true gradient is returned whenever it may be observed: if either node or the activation has a hook, if the
    activation retains its gradient, and in passes for only some gradients, because it may be one of them. It is also
    returned if the factor was computed from the activation's output: then another node is next.
    """

    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, up: Tensor, leaf: Tensor, form: GatedOutput, saved: SavedTensors
    ) -> Tensor:  # fmt: skip
        """`saved`: payloads of gate and up, or both unchanged; `leaf`: from `anchor_leaf`."""
        ctx.form, ctx.dtypes, ctx.present, ctx.observed = form, (activation.dtype, up.dtype), (True, True), False
        ctx.save_for_backward(*saved)
        ctx.activation = TensorWeakRef(activation)
        return activation * up

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        form: GatedOutput = ctx.form
        needs_activation, needs_up = needed_now(ctx)[:2]
        if needs_activation and _hands_on(ctx):
            grad_gate, grad_up = _gated_gradients(form, saved, ctx.dtypes, grad_out)
            assert grad_gate is not None
            zeros = grad_gate.new_zeros(()).expand(grad_gate.shape)  # what other readers send is added to these
            # Stored by the number of the pass: others may run on the same graph at the same time, in other threads or
            # from hooks, and an earlier one may have failed halfway.
            node, task = ctx.next_functions[0][0], torch._C._current_graph_task_id()
            _, others = node.handed.get(task, (None, None))  # of other products of the same activation
            node.handed[task] = zeros, grad_gate if others is None else others + grad_gate
            return zeros, grad_up, None, None, None
        gate, up = saved
        grad_activation = grad_up = None
        if needs_up:
            grad_up = (grad_out * form.rebuild((gate, None), ctx.dtypes[0])).to(ctx.dtypes[1])
        if needs_activation:
            up = decoded(form.codec, up, form.shape, ctx.dtypes[1])
            grad_activation = (grad_out * up).to(ctx.dtypes[0])
        return grad_activation, grad_up, None, None, None


def _hands_on(product: Any) -> bool:
    """Whether a product's node may hand the gradient of gate to the activation's, unobserved in this pass."""
    (node, _), _, (leaf, _) = product.next_functions
    if not isinstance(node, _ActivationNode) or node.form is not product.form:  # pyright: ignore
        return False
    activation = product.activation()  # None once nobody can read its gradient
    if product.observed or node.observed or (activation is not None and activation.retains_grad):
        return False
    return torch._C._will_engine_execute_node(leaf)  # pyright: ignore


def _gated_gradients(
    form: GatedOutput, saved: SavedTensors, dtypes: tuple[torch.dtype, torch.dtype | None], grad_out: Tensor
) -> list[Tensor | None]:
    """Gradients of act(gate) * up at gate and up, or of act(gate), in these dtypes."""
    gate, up = saved
    gate_dtype, up_dtype = dtypes
    assert gate is not None
    kernels = form.in_kernels()
    if kernels is None:
        formula = functools.partial(plain_gated, activation=form.activation)
        gate = decoded(form.codec, gate, form.shape, gate_dtype)
        up = None if up is None or up_dtype is None else decoded(form.codec, up, form.shape, up_dtype)
        return _differentiate(formula, gate, up, grad_out=grad_out)
    name, codec = kernels
    grad_gate = torch.empty(form.shape, dtype=gate_dtype, device=grad_out.device)
    grad_up = None if up_dtype is None else torch.empty_like(grad_gate, dtype=up_dtype)
    gated.backward(gate, up, grad_out.contiguous(), grad_gate, grad_up, None, name, codec.bits, codec.group)
    return [grad_gate, grad_up]


@functools.cache
def anchor_leaf(device: torch.device) -> Tensor:
    """A leaf whose gradient is never requested: its node runs only in passes that run all nodes."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        return torch.zeros((), device=device, requires_grad=True)


_ActivationNode: Any = ActivationFunction._backward_cls  # pyright: ignore
_ProductNode: Any = ProductFunction._backward_cls  # pyright: ignore


def _noting(kind: Any, register: str) -> Callable[..., Any]:
    def noted(node: Any, *args: Any, **kwargs: Any) -> Any:
        node.observed = True
        return getattr(super(kind, node), register)(*args, **kwargs)

    return noted


# Only hooks that run after a product's node can see its gradients; earlier hooks see only what the node receives.
for _name in ("register_hook", "register_prehook", "_register_hook_dict"):  # the last: `Tensor.register_hook`
    setattr(_ActivationNode, _name, _noting(_ActivationNode, _name))
_ProductNode.register_hook = _noting(_ProductNode, "register_hook")


class MaskFunction(torch.autograd.Function):
    """Dropout, and ReLU: saves which elements pass, a bit for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, mask: Tensor, scale: float) -> Tensor:
        """`out`: the result; `mask`: bits of the elements that pass, times `scale`."""
        ctx.scale = scale
        ctx.save_for_backward(mask)
        return owned(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        (mask,) = ctx.saved_tensors
        return Masked(ctx.scale)(grad_out, mask), None, None, None


class LinearFunction(torch.autograd.Function):
    """x (..., I) times weight (O, I), or (I, O) if `transposed`, plus bias; saves tensors that rebuild x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
        transposed: bool, dtype: torch.dtype, rebuilt: Rebuilt | None, saved: SavedTensors,
    ) -> Tensor:  # fmt: skip
        """Computes in `dtype`. `rebuilt`: x in backward, from `saved`; None if the weight is frozen."""
        ctx.transposed, ctx.rebuilt, ctx.dtype = transposed, rebuilt, dtype
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        ctx.present = (True, True, bias is not None)
        ctx.save_for_backward(weight, *saved)
        if not product_needed():
            # A checkpointed layer runs again and ends here: nothing will read the product.
            return x.new_empty((*x.shape[:-1], weight.shape[1 if transposed else 0]), dtype=dtype)
        with torch.autocast(x.device.type, enabled=False):  # casts cached under no_grad would have no gradient
            w = weight.to(dtype)
            shift = None if bias is None else bias.to(dtype)
            return owned(functional.linear(x.to(dtype), w.t() if transposed else w, shift))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        weight, *saved = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = needed_now(ctx)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            w = weight.to(ctx.dtype)
            grad_x = (grad_out @ (w.t() if ctx.transposed else w)).to(ctx.x_dtype)
        g_NO = grad_out.reshape(-1, grad_out.shape[-1])
        if needs_weight:
            x_NI = ctx.rebuilt.get(tuple(saved), ctx.dtype).reshape(len(g_NO), -1)
            product = x_NI.t() @ g_NO if ctx.transposed else g_NO.t() @ x_NI
            grad_weight = product.to(weight.dtype)
        if needs_bias:
            grad_bias = g_NO.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None


class MatmulFunction(torch.autograd.Function):
    """alpha * x @ y of two activations, and what is added to it; saves tensors that rebuild both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, out: Tensor, parts: tuple[Operand, Operand], alpha: float, saved: SavedTensors
    ) -> Tensor:
        """`out`: the result; `parts`: x and y in backward, from `saved`."""
        ctx.parts, ctx.alpha, ctx.present, ctx.dtypes = parts, alpha, (True, True), (x.dtype, y.dtype)
        ctx.save_for_backward(*saved)
        return owned(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        first, second = ctx.parts
        needs_x, needs_y = needed_now(ctx)
        grad_x = grad_y = None
        if ctx.alpha != 1:
            grad_out = grad_out * ctx.alpha
        if needs_x:
            grad_x = grad_out @ second.get(saved[first.count :], grad_out.dtype).mT
            grad_x = grad_x.sum_to_size(first.shape).to(ctx.dtypes[0])
        if needs_y:
            grad_y = first.get(saved[: first.count], grad_out.dtype).mT @ grad_out
            grad_y = grad_y.sum_to_size(second.shape).to(ctx.dtypes[1])
        return grad_x, grad_y, None, None, None, None


class OutputFunction(torch.autograd.Function):
    """A function whose gradient needs its output alone; saves tensors that rebuild that."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Tensor, rebuilt: Rebuilt, gradient: Callable[..., Tensor], saved: SavedTensors
    ) -> Tensor:
        """`out`: the result; `gradient`: of x, from that of the output and the output, which `rebuilt` gives."""
        ctx.rebuilt, ctx.gradient, ctx.dtypes, ctx.shape = rebuilt, gradient, (x.dtype, out.dtype), out.shape
        ctx.save_for_backward(*saved)
        return owned(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        saved = tuple(ctx.saved_tensors)
        out = ctx.rebuilt.get(saved, ctx.dtypes[1]).reshape(ctx.shape)
        return ctx.gradient(grad_out, out).to(ctx.dtypes[0]), None, None, None, None


def needed_now(ctx: Any) -> list[bool]:
    """Whether this backward pass needs the gradient of each input; `ctx.present` marks the inputs that are tensors.

    `needs_input_grad` only shows whether any pass could need it; zero-bubble schedules compute gradients of inputs and
    of weights in separate passes.
    """
    needs = []
    nodes = iter(ctx.next_functions)  # of the tensors among the inputs
    for present, needed in zip(ctx.present, ctx.needs_input_grad, strict=False):
        node = next(nodes)[0] if present else None
        if needed:
            try:
                needed = torch._C._will_engine_execute_node(node)  # pyright: ignore
            except RuntimeError:  # a leaf whose gradient torch.autograd.grad computes
                needed = True
        needs.append(needed)
    return needs


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _differentiate(formula: Any, *inputs: Tensor | None, grad_out: Tensor) -> list[Tensor | None]:
    """Gradients of a formula at these inputs by PyTorch's autograd; None for inputs that are None."""
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        out = formula(*leaves)
    gradients = iter(torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], grad_out.to(out.dtype)))
    return [None if leaf is None else next(gradients) for leaf in leaves]
