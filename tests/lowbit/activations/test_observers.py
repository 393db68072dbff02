"""What users put between compressed operators sees and changes the gradients that it would see and change without."""

import contextlib
import copy
import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

from lowbit.activations import LayerAware, compress_saved_
from tests.lowbit.activations.models import DIM, FFN, LENGTH, ROWS, GatedBlock, Reversed, distance, hugging_face

MORE: dict[str, dict[str, Any]] = {
    "llama": {}, "gpt2": {"resid_pdrop": 0.0}, "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 2},
}  # fmt: skip
FAMILIES = ("plain", *MORE)


@functools.cache
def model_of(family: str) -> Any:
    """One layer of a family, from embedded tokens to hidden states."""
    return GatedBlock(DIM, FFN) if family == "plain" else hugging_face(family, 1, **MORE[family]).base_model


def forward(model: Any, x: Tensor) -> Tensor:
    return model(x) if isinstance(model, GatedBlock) else model(inputs_embeds=x, use_cache=False).last_hidden_state


Seen = list[Tensor]
Later = Callable[[Tensor], Any]
"""What is done between forward and backward, with the loss; returns what is to be added to it, or None."""


def halve(grad: Tensor) -> Tensor:
    return grad * 0.5


def halves(grads: Any) -> tuple[Tensor | None, ...]:
    return tuple(g * 0.5 if g is not None and g.is_floating_point() else g for g in grads)


def note(grads: Any, seen: Seen) -> None:
    seen.extend(g.clone() for g in grads if g is not None)


def on_output(act: Callable[[Tensor, Seen], Any]) -> Callable[[nn.Module, Seen], None]:
    """Do something with the output of a module, which may give another one."""

    def install(module: nn.Module, seen: Seen) -> None:
        def hook(_: Any, args: Any, out: Any) -> Any:
            new = act(out[0] if isinstance(out, tuple) else out, seen)
            if isinstance(new, Tensor):
                return (new, *out[1:]) if isinstance(out, tuple) else new

        module.register_forward_hook(hook)

    return install


def full_hook(module: nn.Module, seen: Seen) -> None:
    def hook(_: Any, grads: Any, outs: Any) -> Any:
        note((*grads, *outs), seen)
        return halves(grads)

    module.register_full_backward_hook(hook)


def full_pre_hook(module: nn.Module, seen: Seen) -> None:
    module.register_full_backward_pre_hook(lambda _, outs: halves(outs))


def full_hook_later(module: nn.Module, seen: Seen) -> None:
    """A hook on every tensor that the module gave, registered after the forward pass."""
    outs: Seen = []
    on_output(lambda x, _: outs.append(x))(module, seen)
    LATER.append(lambda loss: [x.register_hook(halve) for x in outs] and None)


def asked_for(of: Callable[[Tensor], Any]) -> Callable[[nn.Module, Seen], None]:
    """Ask for the gradients of outputs, or of their edges, alone."""

    def install(module: nn.Module, seen: Seen) -> None:
        outs: list[Any] = []
        on_output(lambda x, _: outs.append(of(x)))(module, seen)
        LATER.append(lambda loss: seen.extend(torch.autograd.grad(loss, outs, retain_graph=True)))

    return install


def read_twice(module: nn.Module, seen: Seen) -> None:
    outs: Seen = []
    on_output(lambda x, _: outs.append(x.square().mean()))(module, seen)
    LATER.append(lambda loss: sum(outs))


def twice(module: nn.Module, seen: Seen) -> None:
    LATER.append(lambda loss: loss.backward(retain_graph=True))


LATER: list[Later] = []
ON_OUTPUTS: dict[str, Any] = {
    name: on_output(act)
    for name, act in {
        "output hook": lambda x, seen: x.register_hook(halve),
        "output retain_grad": lambda x, seen: (x.retain_grad(), seen.append(x)),  # read when all is done
        "output node hook": lambda x, seen: x.grad_fn.register_hook(lambda grads, outs: halves(grads)),
        "output node prehook": lambda x, seen: x.grad_fn.register_prehook(halves),
        "output multi hook": lambda x, seen: register_multi_grad_hook([x], lambda grads: note(grads, seen)),
        "output reversed": lambda x, seen: Reversed.apply(x),
    }.items()
}
ON_MODULES = ON_OUTPUTS | {
    "full hook": full_hook, "full pre-hook": full_pre_hook, "hook after forward": full_hook_later,
    "autograd.grad": asked_for(lambda x: x), "edge": asked_for(get_gradient_edge), "another reader": read_twice,
}  # fmt: skip
PLACEMENTS: dict[str, tuple[str, Any]] = (
    {f"activation: {name}": ("act", install) for name, install in ON_MODULES.items()}
    | {"activation: detached": ("act", on_output(lambda x, seen: x.detach()))}
    | {"activation: in place": ("act", on_output(lambda x, seen: x.mul_(0.5)))}
    | {"two passes": ("act", twice)}
    | {f"norm: {name}": ("norm", install) for name, install in ON_MODULES.items()}
    | {f"last linear: {name}": ("linear", install) for name, install in ON_OUTPUTS.items()}
    | {f"{part}: full hook": (part, full_hook) for part in ("mlp", "attention")}
)
"""What is observed, and how."""


def parts(model: nn.Module, kind: str) -> list[nn.Module]:
    names = {"act": "SiLU|GELU", "norm": "Norm", "mlp": "MLP|Gated|Experts", "attention": "Attention"}
    modules = [m for m in model.modules() if m is not model]
    if kind == "linear":
        return [m for m in modules if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"][-1:]
    return [m for m in modules if re.search(names[kind], type(m).__name__)]


def observed(family: str, place: str, bits: int | None) -> tuple[dict[str, Tensor], Seen]:
    """All gradients, and what was seen; without bits, of the plain model."""
    model = copy.deepcopy(model_of(family))
    if bits is not None:
        compress_saved_(model, LayerAware(bits=bits, attention=bits))
    kind, install = PLACEMENTS[place]
    LATER.clear()
    seen: Seen = []
    for module in parts(model, kind):
        install(module, seen)
    x = torch.randn(ROWS, LENGTH, DIM, generator=torch.Generator().manual_seed(3)).requires_grad_()
    loss = (forward(model, x) * torch.randn(DIM, generator=torch.Generator().manual_seed(4))).sum()
    added = [later(loss) for later in LATER]
    sum((more for more in added if more is not None), loss).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return grads | {"x": x.grad}, [t.grad if t.retains_grad and t.grad is not None else t for t in seen]


@pytest.mark.parametrize("family", FAMILIES)
def test_observers_get_the_plain_gradient(family: str):
    wrong = []
    for place in PLACEMENTS:
        plain, expected = observed(family, place, None)
        for bits, allowed in ((16, 1e-5), (8, 0.03))[: 2 if "activation" in place else 1]:
            grads, seen = observed(family, place, bits)
            assert len(seen) == len(expected), place
            pairs = [{str(i): grad for i, grad in enumerate(each)} for each in (seen, expected)]
            error = max(distance(grads, plain), distance(*pairs) if seen else 0.0)
            if not error < allowed:
                wrong.append(f"{place}, {bits} bits: {error:.3g}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", ["plain", "mixtral"])
def test_second_derivatives_are_refused(family: str):
    model = copy.deepcopy(model_of(family))
    compress_saved_(model)
    x = torch.randn(ROWS, LENGTH, DIM)

    def loss(x: Tensor) -> Tensor:
        return forward(model, x).square().sum()

    def penalty() -> None:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        torch.autograd.grad(grad.square().sum(), [leaf, *model.parameters()], allow_unused=True)

    functional: Any = torch.autograd.functional
    ways = [penalty, lambda: loss(x).backward(create_graph=True)]
    ways += [lambda way=way: way(loss, x, x) for way in (functional.hvp, functional.vhp, functional.jvp)]
    for way in ways:
        with pytest.raises(RuntimeError, match=r"create_graph=True in a model whose .*; allowed: create_graph=False"):
            way()


def once(out: Tensor, act: Callable[[], Any]) -> None:
    """Do something in the middle of the first pass that comes to `out`."""

    def hook(grad: Tensor) -> None:
        handle.remove()
        act()

    handle = out.register_hook(hook)


def within(loss: Tensor, out: Tensor) -> None:
    """A pass that starts in the middle of another one of the same graph."""
    once(out, lambda: loss.backward(retain_graph=True))
    loss.backward(retain_graph=True)


def in_threads(loss: Tensor, out: Tensor) -> None:
    """Two passes of the same graph at the same time: the first waits in the middle for the second."""
    second = threading.Thread(target=lambda: loss.backward(retain_graph=True))
    once(out, lambda: (second.start(), second.join(30)))
    loss.backward(retain_graph=True)


def after_a_failure(loss: Tensor, out: Tensor) -> None:
    """A pass that fails in the middle, then one for some of the gradients, then a whole one."""
    once(out, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    torch.autograd.grad(loss, out, retain_graph=True)
    loss.backward()


def global_hooks(loss: Tensor, out: Tensor) -> None:
    """A whole pass; see `block_gradients` for the hooks."""
    loss.backward()


def block_gradients(passes: Callable[[Tensor, Tensor], None], policy: LayerAware | None) -> dict[str, Tensor]:
    """All gradients of a gated block whose activation two products read; without a policy, of the plain block."""
    torch.manual_seed(0)
    block = TwoProducts()
    if policy is not None:
        compress_saved_(block, policy)
    outs: Seen = []
    block.mlp.w3.register_forward_hook(lambda _, args, out: outs.append(out))
    x = torch.randn(ROWS, LENGTH, DIM, requires_grad=True)
    with contextlib.ExitStack() as stack:
        if passes is global_hooks:
            stack.enter_context(register_module_forward_hook(lambda module, args, out: out * 0.9))
            halved = register_module_full_backward_hook(lambda module, grads, _: tuple(halve(g) for g in grads))
            stack.enter_context(halved)
        passes(block(x).square().sum(), outs[0])
    assert x.grad is not None
    return {name: p.grad for name, p in block.named_parameters() if p.grad is not None} | {"x": x.grad}


class TwoProducts(GatedBlock):
    """The gated block, whose activation is read by two products and by a sum."""

    def forward(self, x: Tensor) -> Tensor:
        h, mlp = self.norm(x), self.mlp
        activation, up = mlp.act(mlp.w1(h)), mlp.w3(h)
        return x + mlp.w2(activation * up + activation * (up + 1)) + activation.sum(-1, keepdim=True)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("passes", [within, in_threads, after_a_failure, global_hooks])
def test_passes_that_meet_in_one_graph(passes: Any, bits: int):
    grads = block_gradients(passes, LayerAware(bits=bits, smallest=0))
    assert distance(grads, block_gradients(passes, None)) < (1e-5 if bits == 16 else 0.03)
