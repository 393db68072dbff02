"""Models small enough for tests, what autograd saves of them, and gradients the slow and obvious way."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.codecs import GroupInt

DIM, FFN, ROWS, LENGTH, VOCAB = 32, 72, 2, 20, 31


class Runs(nn.Module):
    """Calls a function with itself and its inputs; `parts`: its modules and parameters."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Reversed(torch.autograd.Function):
    """The same tensor, whose gradient is turned around and halved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return -0.5 * grad


class Opaque(torch.autograd.Function):
    """A formula of a tensor and another one, or None, whose functions nobody can follow."""

    @staticmethod
    def forward(ctx: Any, formula: Any, x: Tensor, other: Tensor | None) -> Tensor:
        ctx.formula = formula
        ctx.save_for_backward(x, other)
        return formula(x, other)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.formula(*leaves)
        grads = torch.autograd.grad(out, [t for t in leaves if t is not None], grad_out)
        return None, *grads, *[None] * leaves.count(None)


class Gated(nn.Module):
    """A gated feed-forward in plain PyTorch; `act`: a module or a function."""

    def __init__(self, dim: int, ffn: int, act: Any = None) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn)
        self.w2, self.act = nn.Linear(ffn, dim), nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class GatedBlock(nn.Module):
    """Norm and gated feed-forward with a residual; widths are no multiples of the group."""

    def __init__(self, dim: int = DIM, ffn: int = FFN, norm: Any = nn.RMSNorm) -> None:
        super().__init__()
        self.norm, self.mlp = norm(dim), Gated(dim, ffn)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def causal_model(family: str, attention: str = "sdpa", **sizes: Any) -> Any:
    """A causal language model of Hugging Face in training mode, float32, weights from a fixed seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    how = {"experts_implementation": sizes.pop("experts")} if "experts" in sizes else {}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(family, **none | sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, **how).float().train()


def hugging_face(family: str, layers: int = 2, **more: Any) -> Any:
    """A small causal language model."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "max_position_embeddings": 64, "hidden_size": DIM, "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }  # fmt: skip
    if family == "gpt2":
        sizes |= {"n_inner": FFN, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.1}
    else:
        sizes |= {"intermediate_size": FFN, "num_key_value_heads": 2, "head_dim": 8}
    return causal_model(family, "eager" if family == "gemma2" else "sdpa", **sizes | more)


def tokens() -> Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    torch.manual_seed(1)  # dropout
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of all parameters; the model is left without."""
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def distance(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative error of all gradients together."""
    assert grads.keys() == expected.keys()
    error = sum((grads[n] - expected[n]).float().square().sum() for n in expected)
    return float((error / sum(expected[n].float().square().sum() for n in expected)) ** 0.5)


@contextlib.contextmanager
def saved_bytes(model: nn.Module) -> Iterator[Counter[torch.dtype]]:
    """Bytes that autograd saves in the block by dtype, each storage once, parameters left out."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, Any] = {}
    saved: Counter[torch.dtype] = Counter()

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own and storage._cdata not in seen:
            seen[storage._cdata] = storage
            saved[x.dtype] += storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


class Calls(TorchDispatchMode):
    """Counts calls of lowbit's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lowbit":
            self.count[func._schema.name.removeprefix("lowbit::")] += 1
        return func(*args, **(kwargs or {}))


def at(function: Callable[..., Tensor], *pairs: tuple[Tensor, Tensor]) -> Tensor:
    """`function` of the first of each pair, with the gradients that it has at the second."""
    moved = [x + (rounded - x).detach() for x, rounded in pairs]
    y = function(*moved)
    return y + (function(*(x for x, _ in pairs)) - y).detach()


def reference(block: GatedBlock, x: Tensor, codec: GroupInt) -> Tensor:
    """The block's output, with the gradients that its backward has from rounded inputs of norm, gate and product."""
    mlp, x_ = block.mlp, codec.round_trip(x)
    h, h_ = at(block.norm, (x, x_)), block.norm(x_)
    gate, up = at(mlp.w1, (h, h_)), at(mlp.w3, (h, h_))

    def product(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.act(gate) * up

    rounded = codec.round_trip(gate), codec.round_trip(up)
    y = at(product, (gate, rounded[0]), (up, rounded[1]))
    return x + at(mlp.w2, (y, product(*rounded)))
