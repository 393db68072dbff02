"""Functions of a compressed model may be called in each way that PyTorch allows."""

import copy
import functools
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowbit.activations import LayerAware, compress_saved_, counted, follow, handlers, saved
from lowbit.activations.follow import HANDLERS
from tests.lowbit.activations.models import DIM, Calls, Opaque, Runs, distance, gradients
from tests.lowbit.activations.test_observers import forward, model_of


@dataclass(frozen=True)
class Values:
    """What functions are called with: `h` has a recipe."""

    x: Tensor
    w: nn.Parameter

    @property
    def h(self) -> Tensor:
        return functional.silu(self.x @ self.w)


SHAPE = {"normalized_shape": [DIM]}
WEIGHT = {"weight": lambda v: v.w[0]}
ON_H: dict[str, Any] = {"input": lambda v: v.h}
ARGUMENTS: dict[Any, dict[str, Any]] = {
    functional.scaled_dot_product_attention: {
        "query": lambda v: v.h.view(1, 4, 10, DIM), "key": lambda v: v.h.view(1, 4, 10, DIM),
        "value": lambda v: v.h.view(1, 4, 10, DIM), "attn_mask": None, "dropout_p": 0.0, "is_causal": True,
        "scale": 0.5, "enable_gqa": False,
    },
    functional.linear: ON_H | {"weight": lambda v: v.w, "bias": lambda v: v.w[0]},
    functional.layer_norm: ON_H | SHAPE | WEIGHT | {"bias": lambda v: v.w[1], "eps": 1e-3},
    functional.rms_norm: ON_H | SHAPE | WEIGHT | {"eps": 1e-3},
    functional.silu: ON_H | {"inplace": False},
    functional.relu: ON_H | {"inplace": False},
    functional.gelu: ON_H | {"approximate": "tanh"},
    **{each: ON_H | {"inplace": False} for each in (functional.mish, functional.hardswish)},
    **{each: ON_H | {"inplace": False} for each in (functional.selu, functional.relu6)},
    **dict.fromkeys((functional.elu, functional.celu), ON_H | {"alpha": 0.5, "inplace": False}),
    functional.leaky_relu: ON_H | {"negative_slope": 0.2, "inplace": False},
    handlers.called: ON_H | {"function": lambda v: torch.erf},
    functional.dropout: ON_H | {"p": 0.5, "training": True, "inplace": False},
    functional.softmax: ON_H | {"dim": -1, "_stacklevel": 3, "dtype": torch.float32},
    functional.cross_entropy: {
        "input": lambda v: v.h.bfloat16().float(), "target": torch.arange(40) % DIM, "weight": None,
        "size_average": None, "ignore_index": 3, "reduce": None, "reduction": "sum", "label_smoothing": 0.0,
    },
    torch.split: {"tensor": lambda v: v.h, "split_size_or_sections": [8, 24], "dim": 1},
    Tensor.split: ON_H | {"split_size": [8, 24], "dim": 1},
    Tensor.unflatten: ON_H | {"dim": 1, "sizes": (4, -1)},
}  # fmt: skip
BY_NAME: dict[str, dict[str, Any]] = {
    "mm": ON_H | {"mat2": lambda v: v.w}, "matmul": ON_H | {"other": lambda v: v.w},
    "__matmul__": ON_H | {"": lambda v: v.w},
    "addmm": {"input": lambda v: v.w[0], "mat1": lambda v: v.h, "mat2": lambda v: v.w},
    "mul": ON_H | {"other": lambda v: v.x @ v.w}, "multiply": ON_H | {"other": lambda v: v.x @ v.w},
    "__mul__": ON_H | {"": lambda v: v.x @ v.w}, "__rmul__": ON_H | {"": lambda v: v.x @ v.w},
    "relu": ON_H, "dropout": ON_H | {"p": 0.5, "train": True},
    "view": ON_H | {"size": (20, -1)}, "view_as": ON_H | {"other": lambda v: v.x}, "reshape": ON_H | {"shape": (-1,)},
    "reshape_as": ON_H | {"other": lambda v: v.x}, "flatten": ON_H | {"start_dim": 0, "end_dim": 1},
    "unflatten": ON_H | {"dim": 1, "sizes": (4, -1)}, "squeeze": ON_H | {"dim": 0}, "unsqueeze": ON_H | {"dim": 0},
    "contiguous": ON_H | {"memory_format": torch.contiguous_format},
    "clone": ON_H, "to": ON_H | {"dtype": torch.float64}, "type": ON_H | {"dtype": torch.float64},
    "type_as": ON_H | {"other": lambda v: v.x}, "float": ON_H, "bfloat16": ON_H, "half": ON_H,
    "transpose": ON_H | {"dim0": 0, "dim1": 1}, "swapaxes": ON_H | {"axis0": 0, "axis1": 1},
    "permute": ON_H | {"dims": (1, 0)}, "movedim": ON_H | {"source": 0, "destination": 1}, "t": ON_H, "__get__": ON_H,
    "chunk": ON_H | {"chunks": 2, "dim": 1}, "unbind": ON_H | {"dim": 1},
    "narrow": ON_H | {"dim": 1, "start": 2, "length": 9}, "select": ON_H | {"dim": 0, "index": 1},
    "__getitem__": ON_H | {"": slice(4)}, "expand": ON_H | {"size": (2, 40, DIM)}, "repeat": ON_H | {"repeats": (2, 1)},
    "repeat_interleave": ON_H | {"repeats": 2, "dim": 0},
    "bmm": {"input": lambda v: v.h[None], "mat2": lambda v: v.w[None]},
    "baddbmm": {"input": lambda v: v.w[None], "batch1": lambda v: v.h[None, :DIM], "batch2": lambda v: v.h[None, :DIM]},
    "tanh": ON_H, "softmax": ON_H | {"dim": -1, "dtype": torch.float32},
    **{name: ON_H | {"other": 3.0} for name in ("div", "divide", "true_divide", "div_", "mul_", "add", "add_")},
    **{name: ON_H | {"": 3.0} for name in ("__truediv__", "__idiv__", "__imul__", "__add__", "__radd__", "__iadd__")},
    **{name: ON_H | {"mask": lambda v: v.x > 0, "value": -2.0} for name in ("masked_fill", "masked_fill_")},
}  # fmt: skip


METHODS = [f for f in HANDLERS if getattr(f, "__objclass__", None) or f is getattr(Tensor, f.__name__, None)]


def spellings(func: Any) -> list[functools.partial[Any]]:
    """Calls of a function with each number of its arguments by position, and the others by PyTorch's names."""
    arguments = ARGUMENTS.get(func) or BY_NAME[func.__name__]
    first = int(func in METHODS)  # these have no name for `self`

    def call(count: int, without: int, values: Values) -> Any:
        given = [*arguments.items()][: len(arguments) - without]
        of = [(name, value(values) if callable(value) else value) for name, value in given]
        return func(*(value for _, value in of[:count]), **dict(of[count:]))

    counts = range(first, len(arguments) + 1)
    return [functools.partial(call, count, without) for count in counts for without in range(len(arguments))]


@pytest.mark.parametrize("func", HANDLERS, ids=lambda func: func.__name__)
def test_every_spelling_of_every_function(func: Any):
    torch.manual_seed(0)
    x, taken = torch.randn(40, DIM), 0
    for call in spellings(func):
        weight = nn.Parameter(torch.randn(DIM, DIM))
        model = Runs(lambda self, x, call=call: call(Values(x, self.weight)), weight=weight)
        plain = outcome(model, x)
        compress_saved_(model, LayerAware(bits=16))
        ours = outcome(model, x)
        if isinstance(plain, str):  # no legal call
            assert isinstance(ours, str)
            continue
        assert not isinstance(ours, str), f"{call.args}: {ours}"
        taken += 1
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2)
    assert taken, "no spelling is legal"


def outcome(model: Runs, x: Tensor) -> list[Tensor] | str:
    """Results and the gradient of the weight, or the error."""
    torch.manual_seed(1)
    try:
        out = model(x)
        if isinstance(out, str):  # `Tensor.type()`
            return out
        outs = [out] if isinstance(out, Tensor) else [*out]
        loss = sum((o.float().square().mean() for o in outs), torch.zeros(()))
        return [*outs, *torch.autograd.grad(loss, [model.weight])]
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("family", ["plain", "llama"])
def test_selective_checkpoints_save_as_they_are(family: str):
    torch.manual_seed(0)
    model, x = copy.deepcopy(model_of(family)), torch.randn(2, 20, DIM)
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        lambda _, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
        ),
    )
    grads = []
    for compressed in (False, True):
        if compressed:
            compress_saved_(model)
        out: Any = checkpoint(forward, model, x, use_reentrant=False, context_fn=contexts)
        grads.append(gradients(model, out.square().sum()))
    assert distance(grads[1], grads[0]) < 1e-5


MODULE, NAME = "megatron.core.tensor_parallel.layers", "LinearWithGradAccumulationAndAsyncCommunication"


class Own(torch.autograd.Function):
    """x times the transposed weight, times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return factor * (x @ weight.t())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_out = ctx.factor * grad_out
        return grad_out @ weight, grad_out.flatten(0, -2).t() @ x.flatten(0, -2), None, None


def kept_and_gradients(model: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    with counted(model) as kept:
        loss = model(x)[..., :50].sum()
    return kept.total, list(torch.autograd.grad(loss, [*model.parameters()], retain_graph=True))


@pytest.mark.parametrize(("bits", "tolerance"), [(16, 1e-6), (8, 0.02), (4, 0.2)])
def test_a_function_of_its_own_gets_its_input_rebuilt(monkeypatch: pytest.MonkeyPatch, bits: int, tolerance: float):
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(**{NAME: Own}))  # pyright: ignore
    monkeypatch.setattr(Own, "apply", Own.apply)  # for the time of this test
    torch.manual_seed(0)
    layer = Runs(lambda self, x: Own.apply(x, self.weight, None, 2.0), weight=nn.Parameter(torch.randn(96, 64) / 8))
    model, x = nn.Sequential(nn.RMSNorm(64), layer), torch.randn(4, 32, 64)
    size, expected = kept_and_gradients(model, x)
    compressed = compress_saved_(model, LayerAware(bits=bits))
    for _ in range(2):
        kept, ours = kept_and_gradients(model, x)
        assert kept < (0.6 if bits == 16 else 0.3) * size
        for g, e in zip(ours, expected, strict=True):
            assert (g - e).norm() <= tolerance * e.norm()
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(model(x).sum(), [*model.parameters()], create_graph=True)
    compressed.remove()
    assert kept_and_gradients(model, x)[0] == size


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def gated(activation: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return activation(gate) * up


FUSIONS = "megatron.core.fusions.fused_bias_"
GATES: dict[tuple[str, str], Any] = {
    (f"{FUSIONS}swiglu", "SwiGLUFunction"): lambda x, bias: gated(functional.silu, x),
    (f"{FUSIONS}swiglu", "BiasSwiGLUFunction"): lambda x, bias: gated(functional.silu, x + bias),
    (f"{FUSIONS}geglu", "GeGLUFunction"): lambda x, bias: gated(gelu, x),
    (f"{FUSIONS}geglu", "BiasGeGLUFunction"): lambda x, bias: gated(gelu, x + bias),
    ("megatron.core.transformer.mlp", "bias_gelu_impl"): lambda x, bias: gelu(x + bias),
}


def call_gate(self: Any, x: Tensor) -> Tensor:
    """Call a function of Megatron's as its layers do."""
    module, name = self.place
    given = (x, *([self.bias] if "ias" in name else []), *([False, False] if "Swi" in name else []))
    function = getattr(sys.modules[module], name)
    return (function.apply if isinstance(function, type) else function)(*given)


@pytest.mark.parametrize("place", GATES, ids=lambda place: place[1])
@pytest.mark.parametrize(("bits", "tolerance"), [(16, 1e-5), (8, 0.03)])
def test_gates_are_computed_by_functions_that_are_followed(
    monkeypatch: pytest.MonkeyPatch, place: tuple[str, str], bits: int, tolerance: float
):
    def own(x: Tensor, *rest: Any) -> Any:
        return Opaque.apply(GATES[place], x, rest[0] if "ias" in place[1] else None)

    module, name = place
    stand_in = type(name, (), {"apply": staticmethod(own)}) if name.endswith("Function") else own
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: stand_in}))  # pyright: ignore
    torch.manual_seed(0)
    gate = Runs(call_gate, place=place, bias=nn.Parameter(torch.randn(128)))
    model, x = nn.Sequential(nn.Linear(64, 128), gate), torch.randn(4, 32, 64)

    def grads() -> list[Tensor]:
        parameters = [p for p in model.parameters() if p is not model[1].bias or "ias" in name]
        return list(torch.autograd.grad(model(x).square().sum(), parameters))

    expected = grads()
    compress_saved_(model, LayerAware(bits=bits))
    with Calls() as calls:
        ours = grads()
    assert ("gated_encode" in calls.count) == (bits == 8)
    for g, e in zip(ours, expected, strict=True):
        assert (g - e).norm() <= tolerance * e.norm()


def test_nothing_is_changed_where_megatron_is_not_loaded(monkeypatch: pytest.MonkeyPatch):
    for name, _ in saved._KNOWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = dict(follow.HANDLERS)
    saved._ask_first()
    assert before == follow.HANDLERS
