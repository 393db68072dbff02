"""Activation functions without kernels: any that is verified to be elementwise runs again in backward."""

import copy
import functools
import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowbit.activations import LayerAware, checkpoint_, compress_saved_, counted, follow
from lowbit.activations.structure import activation_like
from lowbit.codecs import BlockFloat8, GroupInt
from tests.lowbit.activations.models import (
    DIM,
    FFN,
    Calls,
    Gated,
    GatedBlock,
    Reversed,
    Runs,
    distance,
    gradients,
    saved_bytes,
)


def transformers_act(name: str) -> nn.Module:
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def cubed(x: Tensor) -> Tensor:
    """Somebody's own activation function."""
    return torch.where(x > 0, x * torch.tanh(x.exp()), x.square() * x.sigmoid())


class Squared(nn.Module):
    """Squared ReLU, with a child."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x) ** 2


class Plain(nn.Module):
    """A feed-forward with two matrices."""

    def __init__(self, dim: int, ffn: int, act: Any) -> None:
        super().__init__()
        self.w1, self.w2, self.act = nn.Linear(dim, ffn), nn.Linear(ffn, dim), act

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)))


ACTS: dict[str, Any] = {
    "quick_gelu": functools.partial(transformers_act, "quick_gelu"),
    "relu2": functools.partial(transformers_act, "relu2"),
    "mish": nn.Mish,
    "own module": lambda: Runs(lambda self, x: cubed(x)),
    "own module with a child": Squared,
    "own function": lambda: cubed,
    "PyTorch's function": lambda: functional.mish,
    "partial function": lambda: functools.partial(functional.softplus, beta=2),
}


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).requires_grad_()


def compared(model: nn.Module, x: Tensor, policy: LayerAware | None = None) -> tuple[float, float]:
    """Share of the plain model's bytes that the compressed one keeps, and the error of its gradients."""
    ours, kept, grads, outs = copy.deepcopy(model), [], [], []
    compress_saved_(ours, policy)
    for each in (model, ours):
        leaf = x.detach().clone().requires_grad_()
        with counted(each) as saved:
            out = each(leaf)
        kept.append(saved.total)
        outs.append(out)
        grads.append(gradients(each, out.float().square().sum()) | {"x": leaf.grad})
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    return kept[1] / kept[0], distance(grads[1], grads[0])


@pytest.mark.parametrize("kind", [Gated, Plain])
@pytest.mark.parametrize("name", ACTS)
def test_a_feed_forward_keeps_a_tenth(kind: Any, name: str):
    torch.manual_seed(0)
    model, x = kind(64, 170, ACTS[name]()), torch.randn(4, 33, 64)  # no multiples of the group
    kept, error = compared(nn.Sequential(nn.LayerNorm(64), model), x)
    assert kept < 0.13
    assert error < 0.03
    assert compared(model, x, LayerAware(bits=16))[1] < 1e-5
    assert compared(model, x, LayerAware(bits=BlockFloat8()))[1] < 0.06
    with torch.autocast("cpu", torch.bfloat16):
        assert compared(model, x)[1] < 0.03


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * x.sigmoid()


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.numel())
        return x * x.sigmoid()


def fails(self: Any, x: Tensor) -> Tensor:
    raise ValueError("not today")


NOT_ELEMENTWISE: dict[str, Any] = {
    "with parameters": nn.PReLU,
    "with parameters of a vector": lambda: nn.PReLU(FFN),
    "with parameters and buffers": functools.partial(transformers_act, "xielu"),
    "with somebody else's parameter": lambda: Runs(lambda self, x, w=nn.Parameter(torch.ones(())): x.sigmoid() * w),
    "with a tensor": lambda: Runs(lambda self, x: x.sigmoid() * self.scale[0], scale=[torch.ones(())]),
    "with a count": Counting,
    "with a list": Listing,
    "over channels": lambda: nn.Softmax(-1),
    "with a mean": lambda: Runs(lambda self, x: x.sigmoid() * x.mean()),
    "with the first channel": lambda: Runs(lambda self, x: x * x[..., :1].sigmoid()),
    "with a row of factors": lambda: Runs(lambda self, x: x.sigmoid() * torch.arange(x.shape[-1])),
    "turned": lambda: Runs(lambda self, x: x.sigmoid().flip(-1)),
    "of another shape": lambda: nn.GLU(),
    "dropout": nn.Dropout,
    "dropout that is off": lambda: nn.Dropout(0.0),
    "noise": lambda: Runs(lambda self, x: x.sigmoid() + torch.rand_like(x)),
    "noise in training": nn.RReLU,
    "in place": lambda: nn.ReLU6(inplace=True),
    "the same": nn.Identity,
    "nothing saved": lambda: Runs(lambda self, x: x * 2),
    "an error": lambda: Runs(fails),
    "another number of inputs": lambda: nn.Bilinear(2, 3, 4),
    "no tensor": lambda: Runs(lambda self, x: (x.sigmoid(),)),
    "integers": lambda: Runs(lambda self, x: (x.sigmoid() * 100).int()),
    "reading numbers": lambda: Runs(lambda self, x: x.sigmoid() * float(x.flatten()[0])),
    "a container": lambda: nn.Sequential(nn.Mish(), nn.Tanh()),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_ELEMENTWISE)
def test_what_is_not_verified_stays_as_it_was(what: str, caplog: pytest.LogCaptureFixture):
    act = NOT_ELEMENTWISE[what]()
    before = copy.deepcopy(vars(act))
    assert activation_like(act) is None
    assert repr(before) == repr(vars(act))  # it ran on a copy
    if what in ("an error", "another number of inputs", "no tensor", "integers", "of another shape"):
        return
    model = Plain(DIM, FFN, act)
    ours, x = copy.deepcopy(model), inputs(5, DIM)
    compress_saved_(ours, LayerAware(bits=16))
    grads = []
    for each in (model, ours):
        torch.manual_seed(1)
        grads.append(gradients(each, each(x).square().sum()))
    assert distance(grads[1], grads[0]) < 1e-5


def test_what_is_left_is_named(caplog: pytest.LogCaptureFixture):
    follow.say_once.cache_clear()
    model = Plain(DIM, FFN, nn.PReLU())
    compress_saved_(model)
    model(inputs(40, DIM)).sum().backward()
    assert ["PreluKernel" in r.message for r in caplog.records] == [True]


def test_errors_are_those_of_the_function():
    model = Plain(DIM, FFN, Runs(fails))
    compress_saved_(model)
    with pytest.raises(ValueError, match="not today"):
        model(inputs(5, DIM))


@pytest.mark.parametrize(("formula", "name"), [
    (lambda self, x: x * x.sigmoid(), "silu"),
    (lambda self, x: functional.relu(x), "relu"),
    (lambda self, x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)), "gelu"),
])  # fmt: skip
def test_formulas_of_the_table_are_known_in_modules_of_anybody(formula: Any, name: str):
    assert activation_like(Runs(formula)) == name


def test_it_does_not_matter_where_functions_are_tried():
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            assert activation_like(nn.SiLU()) == "silu"
            assert callable(activation_like(nn.Mish()))


@pytest.mark.parametrize("act", [nn.Tanh(), nn.ReLU6(), nn.Sigmoid(), nn.Softplus(), nn.LogSigmoid(), nn.Hardswish()])
def test_others_are_called_again(act: nn.Module):
    assert activation_like(act) == act.forward


def test_a_gradient_of_its_own_is_no_formula_of_the_table():
    act = Runs(lambda self, x: Reversed.apply(functional.silu(x)))
    assert activation_like(act) == act.forward
    assert compared(Plain(DIM, FFN, act), inputs(40, DIM))[1] < 0.03


def test_numbers_that_are_not_finite_stay_visible():
    model = Plain(DIM, FFN, transformers_act("quick_gelu"))
    compress_saved_(model)
    x = inputs(16, DIM).detach()
    x[3, 1] = torch.nan
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad[3].isnan().all()
    assert x.grad[10:].isfinite().all()


@pytest.mark.parametrize("shape", [(DIM,), (1, DIM), (3, 7, DIM), (2, 1, 3, DIM), (0, DIM)])
def test_any_shape(shape: tuple[int, ...]):
    model = Gated(DIM, FFN, transformers_act("relu2"))
    x = inputs(*shape)
    ours = copy.deepcopy(model)
    compress_saved_(ours, LayerAware(bits=8))
    found, expected = (gradients(each, each(x).square().sum()) for each in (ours, model))
    if x.numel():
        assert distance(found, expected) < 0.03


@pytest.mark.parametrize("name", ["own function", "own module"])
def test_one_payload_serves_function_product_and_layer(name: str):
    model = Gated(DIM, FFN, ACTS[name]())
    compress_saved_(model, LayerAware(bits=4))
    x = inputs(40, DIM).detach()
    with saved_bytes(model) as saved, Calls() as calls:
        loss = model(x).sum()
    assert saved == {torch.uint8: GroupInt().nbytes((40, DIM)) + 2 * GroupInt().nbytes((40, FFN))}
    assert calls.count == {"group_int_encode": 3}
    loss.backward()
    model.eval()
    with torch.no_grad():
        model(x)


@pytest.mark.parametrize("how", ["torch", "lowbit"])
@pytest.mark.parametrize("name", ["quick_gelu", "own function"])
def test_checkpointing_computes_the_same(how: str, name: str):
    model, x, found = Gated(DIM, FFN, ACTS[name]()), inputs(40, DIM), []
    compress_saved_(model)
    for again in (False, True):
        if again and how == "lowbit":
            checkpoint_(model)
        out: Any = checkpoint(model, x, use_reentrant=False) if again and how == "torch" else model(x)
        found.append(gradients(model, out.square().sum()))
    assert distance(*found) == 0


@pytest.mark.parametrize("name", ["quick_gelu", "own module with a child"])
def test_hooks_see_plain_gradients(name: str):
    model, x = Gated(DIM, FFN, ACTS[name]()), inputs(40, DIM)
    ours = copy.deepcopy(model)
    compress_saved_(ours, LayerAware(bits=16))
    seen: list[Tensor] = []
    for each in (model, ours):
        each.act.register_full_backward_hook(lambda module, grads, outs: seen.extend((*grads, *outs)))
        each.act.register_forward_hook(lambda module, args, out: out.register_hook(lambda grad: grad * 0.5) and None)
        for child in each.act.children():
            child.register_forward_hook(lambda module, args, out: out.register_hook(lambda grad: grad * 2) and None)
    expected, found = (gradients(each, each(x).square().sum()) for each in (model, ours))
    assert distance(found, expected) < 1e-5
    for one, other in zip(seen[: len(seen) // 2], seen[len(seen) // 2 :], strict=True):
        torch.testing.assert_close(other, one)


def test_functions_are_given_back():
    model = Gated(DIM, FFN, cubed)
    compressed = compress_saved_(model)
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    for twin in (copy.deepcopy(model), torch.load(written, weights_only=False)):
        x = inputs(40, DIM)
        assert distance(gradients(twin, twin(x).sum()), gradients(model, model(x).sum())) == 0
    compressed.remove()
    assert model.act is cubed


def test_only_functions_of_one_tensor_beside_linear_layers_are_tried():
    called = []
    model = nn.Sequential(nn.Linear(4, 4), Runs(called.append), Gated(DIM, FFN, lambda x, y=1, *, z=2: x.sigmoid()))
    model[2].other, model[2].dtype_of = called.append, torch.get_default_dtype
    compress_saved_(model)
    assert all(isinstance(each, Tensor) and each.numel() < 100 for each in called)
    assert model[1].function == model[2].other == called.append
    assert model[2].dtype_of is torch.get_default_dtype
    model[2].act(inputs(5, 4), 3)
    with pytest.raises(TypeError):
        model[2].act()


@pytest.mark.parametrize("call", [
    functional.mish, functional.hardswish, functional.elu, functional.selu, functional.celu, functional.relu6,
    lambda x: functional.leaky_relu(x, 0.2), lambda x: functional.elu(x, alpha=0.5),
])  # fmt: skip
def test_pytorchs_functions_are_known_where_they_are_called(call: Any):
    torch.manual_seed(0)
    model = Runs(lambda self, x: self.w2(call(self.w1(x))), w1=nn.Linear(DIM, FFN), w2=nn.Linear(FFN, DIM))
    kept, error = compared(model, inputs(40, DIM))
    assert kept < 0.2
    assert error < (0.04 if call is functional.relu6 else 0.03)  # its slope jumps at 0


def test_in_place_functions_are_pytorchs():
    model = Runs(
        lambda self, x: self.w2(functional.mish(self.w1(x), inplace=True)), w1=nn.Linear(DIM, FFN), w2=nn.Linear(FFN, 8)
    )
    assert compared(model, inputs(40, DIM))[1] < 0.03


def test_nothing_is_sent_when_functions_are_tried(monkeypatch: pytest.MonkeyPatch):
    """Ranks have other layers: one that began a collective alone would wait."""
    sent = []
    library = torch.library.Library("lowbit_test_sent", "DEF")
    library.define("exchange(Tensor x) -> Tensor")
    library.impl("exchange", lambda x: sent.append(x) or x.clone(), "CompositeExplicitAutograd")
    act = Runs(lambda self, x: torch.ops.lowbit_test_sent.exchange(x.detach()) * x.sigmoid())
    assert activation_like(act) is None
    assert not sent


@pytest.mark.parametrize("name", ["quick_gelu", "own function"])
def test_in_graphs_it_is_left(name: str):
    torch._dynamo.reset()
    model, x = GatedBlock(), inputs(4, 20, DIM)
    model.mlp = Gated(DIM, FFN, ACTS[name]())
    ours = copy.deepcopy(model)
    compress_saved_(ours, LayerAware(bits=8, norm=8))
    compiled: Any = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found, expected = (gradients(ours, each(x).square().sum()) for each in (compiled, ours))
    plain = gradients(model, model(x).square().sum())
    assert max(distance(found, plain), distance(expected, plain)) < 0.03
    torch._dynamo.reset()


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 99, "max_position_embeddings": 64, "eos_token_id": 98}
    vision = sizes | {"image_size": 32, "patch_size": 4}
    torch.manual_seed(0)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)).train()


def test_clip_keeps_little():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    plain = clip()
    ours = copy.deepcopy(plain)
    compress_saved_(ours)
    torch.manual_seed(1)
    ids, pixels = torch.randint(90, (4, 64)), torch.randn(4, 3, 32, 32)
    ids[:, -1] = 98
    kept, grads = [], []
    for model in (plain, ours):
        with counted(model) as saved:
            loss = model(input_ids=ids, pixel_values=pixels, return_loss=True).loss
        kept.append(saved.total)
        grads.append(gradients(model, loss))
    assert kept[1] < 0.15 * kept[0], kept
    assert distance(grads[1], grads[0]) < 0.03


def test_a_module_can_still_compare_its_function_with_those_that_it_knows():
    """As Megatron's feed-forward block does, to choose its fused kernels."""

    def own(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.7 * x)

    for function in (functional.silu, own):
        block = nn.Module()
        block.up, block.down, block.act = nn.Linear(8, 32), nn.Linear(32, 8), function
        block.forward = lambda x, block=block: block.down(block.act(block.up(x)))
        compress_saved_(nn.Sequential(block))
        assert block.act == function
        assert {block.act: 1}[function] == 1
        assert (block.act is function) == (function is functional.silu), "the mode sees those of PyTorch themselves"
