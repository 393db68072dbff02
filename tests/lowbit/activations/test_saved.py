"""`compress_saved_`: gradients, what is saved, and what it composes with, in one process."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import LayerAware, compress_saved_, counted, follow
from lowbit.codecs import GroupInt
from tests.lowbit.activations.models import (
    DIM,
    LENGTH,
    ROWS,
    Calls,
    GatedBlock,
    Opaque,
    Runs,
    distance,
    gradients,
    hugging_face,
    loss_of,
    reference,
    saved_bytes,
    tokens,
)
from tests.refused import refused


def block(**options: Any) -> GatedBlock:
    torch.manual_seed(3)
    model = GatedBlock(**options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def inputs() -> Tensor:
    x = torch.randn(3, 7, DIM, generator=torch.Generator().manual_seed(2))
    x[0, 0, 0], x[1] = 40.0, 0.0  # an outlier, and groups of zeros
    return x.requires_grad_()


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gradients_are_those_at_the_rounded_inputs(norm: Any, bits: int):
    ours, plain = block(norm=norm), block(norm=norm)
    compress_saved_(ours, LayerAware(bits=bits, norm=bits, group=40))
    x, x_ = inputs(), inputs()
    weights = torch.randn(3, 7, DIM)
    y, wanted_y = ours(x), reference(plain, x_, GroupInt(bits=bits, group=40))
    torch.testing.assert_close(y, wanted_y)
    grads = gradients(ours, (y * weights).sum()) | {"x": x.grad}
    expected = gradients(plain, (wanted_y * weights).sum()) | {"x": x_.grad}
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name], rtol=2e-4, atol=2e-4, msg=name)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_what_a_family_codes_and_decodes(family: str, caplog: pytest.LogCaptureFixture):
    ours, ids = hugging_face(family), tokens()
    done = compress_saved_(ours, LayerAware(bits=4, norm=4, attention=16))
    with Calls() as calls:
        loss = loss_of(ours, ids)
    with Calls() as backward:
        loss.backward()
    names = [kind for kind, _ in done.bits.values()]
    assert calls.count["norm_encode"] == backward.count["norm_backward"] == names.count("norm")
    assert calls.count["gated_encode"] == backward.count["gated_recompute"] == 2
    products = 0 if family == "gpt2" else 2  # of which `up` is coded
    assert calls.count["group_int_encode"] == products  # nothing else had to be saved
    assert backward.count["norm_recompute"] == 5  # once for q, k and v, and for gate and up
    assert not any(r.name.startswith("lowbit") for r in caplog.records)


def test_stochastic_rounding_repeats_with_the_seed():
    grads = []
    for seed in (1, 1, 2):
        ours, x = block(), inputs()
        compress_saved_(ours, LayerAware(bits=2, rounding="stochastic"))
        torch.manual_seed(seed)
        grads.append(gradients(ours, ours(x).square().sum()))
    assert distance(grads[0], grads[1]) == 0
    assert distance(grads[0], grads[2]) > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad: float):
    ours, x = block(), inputs()
    compress_saved_(ours)
    with torch.no_grad():
        x[2, 3, 5] = bad
    grads = gradients(ours, ours(x).sum())
    assert all(not g.isfinite().all() for n, g in grads.items() if n != "mlp.w2.bias")
    assert x.grad is not None
    assert x.grad[2, 3].isnan().all()
    assert x.grad[0].isfinite().all()


def test_what_several_layers_save_is_stored_once():
    def several(self: Runs, x: Tensor) -> Tensor:
        x = x * 2
        return self.a(x) + self.b(x) + self.norm(x) + self.c(x.view(-1, DIM)).view_as(x)

    model = Runs(several, **{name: nn.Linear(DIM, DIM) for name in "abc"}, norm=nn.LayerNorm(DIM))
    compress_saved_(model, LayerAware(bits=4, norm=4, smallest=0))
    with saved_bytes(model) as saved:
        model(inputs())
    assert saved == {torch.uint8: GroupInt().nbytes((3, 7, DIM))}


def test_a_changed_tensor_is_saved_anew():
    norm, linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
    compress_saved_(nn.ModuleList([norm, linear]), LayerAware(bits=8))
    x = inputs()
    h = norm(x)
    y = linear(h)
    h.add_(100)  # what is saved of it is a copy
    (y + linear(h)).sum().backward()
    expected = 21 * 100 + 2 * norm(x).detach().sum((0, 1))
    assert linear.weight.grad is not None
    torch.testing.assert_close(linear.weight.grad[0], expected, rtol=0.01, atol=2.0)


def test_weights_that_autocast_casts_are_not_saved():
    model = hugging_face("llama")
    compress_saved_(model, LayerAware(bits=8))
    expected = gradients(model, loss_of(model, tokens()))
    with saved_bytes(model) as saved, torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, tokens())
    assert saved[torch.bfloat16] <= 2 * 2 * ROWS * LENGTH * 4 * DIM
    assert distance(gradients(model, loss), expected) < 0.03


def mixing(bias: Tensor | None = None) -> Runs:
    """Attention in plain modules, with a mask that is trained."""

    def mix(self: Runs, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None if bias is None else bias * 1
        return self.out(functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    return Runs(mix, qkv=nn.Linear(DIM, 3 * DIM), out=nn.Linear(DIM, DIM), bias=bias)


def test_attention_is_known_in_plain_modules_by_its_results():
    model = mixing()
    compress_saved_(model, LayerAware(bits=4, attention=16, smallest=0))
    with saved_bytes(model) as saved:
        model(inputs() * 1)
    assert saved[torch.uint8] == GroupInt().nbytes((3, 7, DIM))
    assert saved[torch.float32] == 4 * 21 * (4 * DIM + 4)


def test_a_mask_that_is_trained():
    model = mixing(nn.Parameter(torch.randn(4, 7, 7)))
    expected = gradients(model, model(inputs()).square().sum())
    compress_saved_(model, LayerAware(bits=8, smallest=0))
    assert distance(gradients(model, model(inputs()).square().sum()), expected) < 0.03


@pytest.mark.parametrize("how", ["no_grad", "inference", "eval"])
def test_without_backward_nothing_is_coded(how: str, caplog: pytest.LogCaptureFixture):
    follow.say_once.cache_clear()
    ours, plain, x = block(), block(), inputs()
    compress_saved_(ours)
    ours.train(how != "eval")
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "eval": torch.enable_grad}
    with modes[how](), Calls() as calls:
        assert torch.equal(ours(x), plain(x))
        assert torch.equal(ours(x), plain(x))
    assert not calls.count
    assert ["evaluation mode" in r.message for r in caplog.records] == [True] * (how == "eval")


def test_checkpointing_recomputes_the_same():
    """Also the choices that the first pass makes."""
    model, ids = hugging_face("llama"), tokens()
    compress_saved_(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with saved_bytes(model) as saved:
        loss = loss_of(model, ids)
    assert saved[torch.uint8] == GroupInt(bits=8).nbytes((ROWS, LENGTH, DIM))  # the last norm's
    found = gradients(model, loss)
    model.gradient_checkpointing_disable()
    assert distance(found, gradients(model, loss_of(model, ids))) == 0


def test_a_pass_computes_only_what_it_is_asked_for():
    ours, x = block(), inputs()
    compress_saved_(ours)
    loss = ours(x * 1).square().sum()
    expected = torch.autograd.grad(loss, [x, ours.mlp.w1.weight], retain_graph=True)
    with Calls() as calls:
        of_x = torch.autograd.grad(loss, [x], retain_graph=True)
    # The gradients at the activation's and the product's outputs might be asked for: they are made from `up`.
    assert calls.count == {"gated_backward": 1, "gated_recompute": 1, "norm_backward": 1, "group_int_decode": 1}
    of_weight = torch.autograd.grad(loss, [ours.mlp.w1.weight], retain_graph=True)
    assert torch.equal(of_x[0], expected[0])
    assert torch.equal(of_weight[0], expected[1])


@pytest.mark.parametrize("name", ["norm.weight", "mlp.w1.weight", "mlp.w2.weight"])
def test_a_weight_changed_before_backward_is_noticed(name: str):
    ours = block()
    compress_saved_(ours)
    loss = ours(inputs()).sum()
    with torch.no_grad():
        ours.get_parameter(name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_dtypes_that_no_codec_takes_are_left(caplog: pytest.LogCaptureFixture):
    follow.say_once.cache_clear()
    ours, plain = block().double(), block().double()
    compress_saved_(ours)
    x = inputs().double()
    expected = gradients(plain, plain(x).sum())
    assert distance(gradients(ours, ours(x).sum()), expected) == 0
    assert "float64" in caplog.text


def test_an_empty_batch_goes_through():
    ours = block()
    compress_saved_(ours)
    grads = gradients(ours, ours(torch.empty(0, 7, DIM)).sum())
    assert all(not g.any() for g in grads.values())


def test_functions_that_save_whole_tensors_are_named_once(caplog: pytest.LogCaptureFixture):
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU())
    model[2].forward = lambda x: Opaque.apply(lambda x, _: 2 * x, x.double(), None).float()
    compress_saved_(model)
    with torch.no_grad():
        model(torch.randn(64, 8))
    assert not caplog.records
    for _ in range(2):
        with counted(model):  # its hooks hide nothing
            loss = model(torch.randn(64, 8)).sum()
        loss.backward()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == "Sequential saves whole tensors for backward in functions: Opaque, Softmax"


def test_mistakes_are_named():
    model, ours, other = block(), block(), LayerAware(layers={"layrs.*": 8})
    compress_saved_(ours)
    refused(
        (lambda: compress_saved_(model, other), ValueError, r"layers has 'layrs\.\*', which matches none"),
        (lambda: compress_saved_(model, 4), TypeError, "policy is int"),  # pyright: ignore
        (lambda: compress_saved_("model"), TypeError, "model is str"),  # pyright: ignore
        (lambda: compress_saved_(nn.Softmax(-1)), ValueError, "no module to compress"),
        (lambda: compress_saved_(nn.Sequential(ours)), ValueError, "compressed already"),
    )


PLACES, WORDS = 24, 96


def loss_model(dtype: torch.dtype, **kwargs: Any) -> Runs:
    """Logits in a dtype, cast to float32 as Hugging Face's models do."""

    def loss(self: Any, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy((x * self.scale).to(dtype).float(), target, **kwargs).sum()

    return Runs(loss, scale=nn.Parameter(torch.ones(WORDS)), kwargs=kwargs)


def both(model: nn.Module, *, ignored: slice = slice(None, None, 5)) -> tuple[dict[Any, int], Any, Any]:
    """Bytes that the compressed model saves by dtype; losses and gradients of the plain and the compressed one."""
    generator = torch.Generator().manual_seed(3)
    data, target = torch.randn(PLACES, WORDS, generator=generator) * 4, torch.arange(PLACES)
    data[0] = data[0].bfloat16()  # the first row alone does not tell
    target[ignored] = model.kwargs.get("ignore_index", -100)
    losses, grads, sizes = [], [], []
    for each in (model, copy.deepcopy(model)):
        if each is not model:
            compress_saved_(nn.ModuleList([each, nn.Linear(4, 4)]))
        x = data.clone().requires_grad_()
        with saved_bytes(each) as saved:
            loss = each(x, target)
        (loss * 3).backward()
        losses.append(loss.detach())
        sizes.append(saved)
        grads.append(x.grad)
    return sizes[1], losses, grads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kwargs", [{}, {"reduction": "sum"}, {"ignore_index": 7}], ids=str)
@pytest.mark.parametrize("chunk", [1 << 22, 200])
def test_logits_are_saved_in_16_bits(dtype: torch.dtype, kwargs: Any, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowbit.activations.handlers._CHUNK", chunk)
    saved, losses, grads = both(loss_model(dtype, **kwargs))
    assert torch.equal(*losses)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-7)
    assert saved[dtype] == 2 * PLACES * WORDS


@pytest.mark.parametrize("ignored", [-100, 7])
def test_targets_may_be_bytes(ignored: int):
    """156 is -100 as a byte, but not ignored."""
    target = torch.arange(8, 200, 4, dtype=torch.uint8)
    target[:5] = 7
    assert 156 in target
    model = Runs(
        lambda self, x: functional.cross_entropy((x * self.scale).bfloat16().float(), target, ignore_index=ignored),
        scale=nn.Parameter(torch.ones(200)),
    )
    grads = []
    for each in (model, copy.deepcopy(model)):
        if each is not model:
            compress_saved_(nn.ModuleList([each, nn.Linear(4, 4)]))
        x = torch.linspace(-4, 4, 200 * len(target)).view(-1, 200).requires_grad_()
        each(x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("kwargs", [{"label_smoothing": 0.1}, {"reduction": "none"}, {"weight": torch.ones(WORDS)}, {}])
def test_other_losses_and_logits_are_pytorchs(kwargs: Any):
    saved, losses, grads = both(loss_model(torch.bfloat16 if kwargs else torch.float32, **kwargs))
    assert torch.equal(*losses)
    assert torch.equal(*grads)
    assert torch.bfloat16 not in saved


def test_not_a_number_stays_visible():
    _, losses, grads = both(loss_model(torch.bfloat16), ignored=slice(None))
    assert losses[1].isnan()
    assert torch.equal(*grads)  # none for rows that are all ignored
    model = loss_model(torch.bfloat16)
    model.scale.data[3] = float("nan")
    _, losses, grads = both(model)
    assert losses[1].isnan()
    assert torch.equal(grads[1].isnan(), grads[0].isnan())
