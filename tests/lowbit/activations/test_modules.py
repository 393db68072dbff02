"""Modules that are called or changed in ways of their own: results are those of the modules themselves."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.activations import LayerAware, compress_saved_, restore_
from lowbit.activations.recipes import Norm
from lowbit.activations.structure import activation_like, norm_like
from lowbit.codecs import GroupInt
from tests.lowbit.activations.models import DIM, FFN, Calls, Gated, Reversed, Runs, distance, gradients, saved_bytes


def rows() -> Tensor:
    return torch.randn(5, DIM, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("training", [True, False])
def test_calls_by_keyword(training: bool):
    for module in (nn.Linear(DIM, 4), nn.LayerNorm(DIM), nn.GELU()):
        expected = module(rows())
        compress_saved_(module, LayerAware(smallest=0))
        module.train(training)
        with saved_bytes(module) as saved:
            torch.testing.assert_close(module(input=rows()), expected)
        assert bool(saved[torch.uint8]) == training
        with pytest.raises(TypeError):
            module(other=rows())
        with pytest.raises(TypeError):
            module(rows(), rows())


class OwnNorm(Runs):
    """A norm of anybody's: without weight, as OLMo's, or one that does not tell its epsilon, or adds it elsewhere."""

    normalized_shape = (DIM,)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
def test_norms_without_weight(bias: bool, bits: int):
    given = {"bias": nn.Parameter(torch.randn(DIM))} if bias else {}
    norm = OwnNorm(lambda self, x: functional.layer_norm(x, (DIM,), None, getattr(self, "bias", None)), **given)
    plain = nn.Sequential(nn.Linear(DIM, DIM), norm, nn.Linear(DIM, 8))
    ours = copy.deepcopy(plain)
    compress_saved_(ours, LayerAware(bits=bits, norm=bits))
    expected = gradients(plain, plain(rows()).square().sum())
    with Calls() as calls:
        y = ours(rows())
    assert calls.count["norm_encode"] == (bits == 8)
    assert distance(gradients(ours, y.square().sum()), expected) < (0.03 if bits == 8 else 1e-6)


def test_dropout_that_is_turned_on_later_drops():
    mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM), nn.Dropout(0.0))
    compress_saved_(mlp, LayerAware(bits=4, smallest=0))
    assert mlp(rows()).all()
    mlp[3].p = 0.5
    with saved_bytes(mlp) as saved:
        y = mlp(rows())
    assert (y == 0).float().mean() > 0.3
    mask = 5 * DIM // 8
    assert saved == {torch.uint8: GroupInt().nbytes((5, DIM)) + GroupInt().nbytes((5, 64)) + mask}


@pytest.mark.parametrize(("linear", "norm", "norm_first", "stored"), [
    (8, 4, False, [8]), (6, 6, False, [6]), (4, 8, False, [4, 8]), (4, 8, True, [8]), (8, 8, True, [8]),
    (16, 8, True, [8]),
])  # fmt: skip
def test_a_norm_and_a_linear_layer_store_one_input_if_the_first_ones_will_do(
    linear: int, norm: int, norm_first: bool, stored: list[int]
):
    plain = nn.LayerNorm(DIM)
    ours = nn.ModuleList([nn.Linear(DIM, 4), copy.deepcopy(plain)])
    compress_saved_(ours, LayerAware(linear=linear, norm=norm, smallest=0))
    x, codecs = rows(), [GroupInt(bits=bits, group=64) for bits in stored]
    shared = x * 1
    with saved_bytes(ours) as saved:
        first, y = (module(shared) for module in (reversed(ours) if norm_first else ours))
    assert saved[torch.uint8] == sum(codec.nbytes(x.shape) for codec in codecs)
    assert saved[torch.float32] == (4 * x.numel() if linear == 16 else 0)
    rounded, grad = codecs[-1].round_trip(x.detach()).requires_grad_(), torch.randn(x.shape)
    (first if norm_first else y).backward(grad)
    plain(rounded).backward(grad)
    torch.testing.assert_close(x.grad, rounded.grad)
    torch.testing.assert_close(ours[1].weight.grad, plain.weight.grad)


@pytest.mark.parametrize("bits", [4, 16])
def test_a_feed_forward_with_nothing_but_its_last_layer_to_train(bits: int):
    ours = Gated(DIM, FFN)
    for frozen in (ours.w1, ours.w3):
        frozen.requires_grad_(False)
    x = rows().detach()
    product = (functional.silu(ours.w1(x)) * ours.w3(x)).detach()
    compress_saved_(ours, LayerAware(bits=bits, smallest=0))
    codec = GroupInt(bits=bits, group=64) if bits < 16 else None
    with saved_bytes(ours) as saved:
        y = ours(x)
    assert saved[torch.uint8] == (codec.nbytes(product.shape) if codec else 0)
    torch.testing.assert_close(y, functional.linear(product, ours.w2.weight, ours.w2.bias))
    seen = codec.round_trip(product) if codec else product
    grad = torch.randn(y.shape)
    y.backward(grad)
    torch.testing.assert_close(ours.w2.weight.grad, grad.t() @ seen)
    assert ours.w1.weight.grad is ours.w3.bias.grad is None


@pytest.mark.parametrize(("module", "dtype"), [
    (nn.Linear(DIM, 4), torch.bfloat16),
    (nn.Linear(DIM, 4).bfloat16(), torch.float32),
    (nn.LayerNorm(DIM).bfloat16(), torch.float32),
])  # fmt: skip
def test_dtypes_that_pytorch_refuses_are_refused(module: nn.Module, dtype: torch.dtype):
    compress_saved_(module)
    with pytest.raises(RuntimeError, match="dtype"):
        module(rows().to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(rows().to(dtype)).requires_grad


def test_copies_are_given_back_their_own_forward():
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), Gated(DIM, 64), nn.GELU())
    expected = model(rows())
    done = compress_saved_(model)
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    copies = copy.deepcopy(model), torch.load(written, weights_only=False)
    done.remove()
    assert not any("forward" in vars(m) for m in model.modules())
    with torch.no_grad():
        model[0].weight.zero_()  # the copies have their own
    for twin in copies:
        with Calls() as calls:
            twin(rows())
        assert calls.count
        restore_(twin)
        with Calls() as calls:
            assert torch.equal(twin(rows()), expected)
        assert not calls.count
        assert not any("forward" in vars(m) for m in twin.modules())
    compress_saved_(copies[0])


class MyNorm(nn.Module):
    """`mean` and `offset` make it one or the other of those that are known, `power` one that is not."""

    def __init__(self, mean: bool = False, offset: float = 0.0, power: float = 0.5) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(24)), 1e-3
        self.mean, self.offset, self.power = mean, offset, power

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.mean else x
        scale = (x.square().mean(-1, keepdim=True) + self.epsilon) ** -self.power
        return x * scale * (self.weight + self.offset)


@pytest.mark.parametrize(("module", "norm"), [
    (MyNorm(), Norm(eps=1e-3)),
    (MyNorm(offset=1.0), Norm(eps=1e-3, offset=1.0)),
    (MyNorm(mean=True), Norm(eps=1e-3, centred=True)),
    (MyNorm(power=0.25), None),
    (MyNorm().to("meta"), Norm(eps=1e-3)),
    (nn.RMSNorm(24), Norm(eps=None)),
    (nn.LayerNorm(24, elementwise_affine=False), Norm(eps=1e-5, centred=True)),
    (nn.LayerNorm(24, bias=False), Norm(eps=1e-5, centred=True)),
    (nn.LayerNorm((3, 24)), None),
    (nn.GroupNorm(1, 24), None),
    (nn.BatchNorm1d(24), None),
    (nn.Linear(24, 24), None),
    (OwnNorm(lambda _, x: functional.layer_norm(x, (DIM,), eps=1e-5)), Norm(eps=1e-5, centred=True)),
    (OwnNorm(lambda _, x: functional.rms_norm(x, (DIM,), eps=1e-6)), Norm(eps=1e-6)),
    (OwnNorm(lambda _, x: functional.rms_norm(x, (DIM,), eps=3e-7)), None),
    (OwnNorm(lambda _, x: x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5)), None),
])  # fmt: skip
def test_norms_are_known_by_what_they_compute(module: nn.Module, norm: Norm | None):
    recognized = norm_like(module)
    assert (recognized and replace(recognized, promotes=False)) == norm


def test_defaults_of_dtype_do_not_matter():
    torch.set_default_dtype(torch.bfloat16)
    try:
        recognized = norm_like(nn.LayerNorm(24)), activation_like(nn.GELU())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(recognized)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_default_epsilon_is_that_of_pytorch(dtype: torch.dtype):
    x = torch.randn(4, 24).to(dtype) * 1e-3
    y = Norm(eps=None).in_float32(x, None, None).to(dtype)
    torch.testing.assert_close(y, nn.RMSNorm(24, dtype=dtype)(x))


@pytest.mark.parametrize(("module", "name"), [
    (nn.SiLU(), "silu"), (nn.GELU(), "gelu"), (nn.GELU(approximate="tanh"), "gelu_tanh"), (nn.ReLU(), "relu"),
    (nn.ReLU(inplace=True), None), (nn.Softmax(-1), None),
])  # fmt: skip
def test_activations_are_known_by_what_they_compute(module: nn.Module, name: str | None):
    assert activation_like(module) == name


def test_nobodys_hooks_see_what_is_made_up():
    norm, activation, seen = nn.LayerNorm(8), nn.SiLU(), []
    for module in (norm, activation):
        module.register_forward_hook(lambda *given: seen.append(given))
    assert norm_like(norm)
    assert activation_like(activation)
    assert not seen
    activation(norm(torch.zeros(8)))
    assert len(seen) == 2


def test_an_activation_of_somebodys_own_keeps_its_own_gradient():
    model = nn.Sequential(nn.Linear(64, 64), Runs(lambda self, x: Reversed.apply(functional.gelu(x))))
    x = torch.randn(32, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    compress_saved_(model, LayerAware(bits=16))
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
