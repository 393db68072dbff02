"""Training loops that know nothing of `GradientStorage`: PyTorch's own clipping, scaling and steps."""

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.codecs import BlockFloat8
from lowbit.gradients import GradientStorage
from lowbit.gradients.stored import StoredGradient

CODEC = BlockFloat8()


def toy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 24))


def loss(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x.roll(1, 1)).square().mean()


def rounded(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = CODEC.round_trip(p.grad)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("foreach", [False, None, True])
def test_a_loop_that_knows_nothing_of_the_storage(foreach: bool | None):
    """Two models, each with a storage of its own, and one optimizer; and two plain ones with an optimizer each."""
    models, plain, start = [toy(), toy()], [toy(), toy()], toy()
    for model in models:
        GradientStorage(model)
    kind = functools.partial(torch.optim.AdamW, lr=0.01, foreach=foreach)
    optimizers = [kind([p for m in models for p in m.parameters()]), *(kind(m.parameters()) for m in plain)]
    for step in range(3):
        norms = []
        for i, model in enumerate([*models, *plain]):
            loss(model, 10 * step + i % 2).backward()
            if i > 1:
                rounded(model)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        torch.testing.assert_close(norms[:2], norms[2:])
        assert min(norms) > 0.1
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, other in zip(models, plain, strict=True):
        for p, q in zip(ours.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            assert p.grad is None
        assert not same(ours, start)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_starts_a_new_sum(set_to_none: bool):
    model, plain = toy(), toy()
    storage = GradientStorage(model)
    loss(model, 1).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=set_to_none)
    assert storage.norm() == 0
    for each in (model, plain):
        loss(each, 2).backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert storage.norm() == pytest.approx(norm.item(), rel=0.02)


def test_a_closure_runs_once_before_the_gradients_are_read():
    ours, plain = toy(), toy()
    GradientStorage(ours)
    results, calls = [], []
    for model in (ours, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            calls.append(model)
            optimizer.zero_grad()
            value = loss(model, 3)
            value.backward()
            if model is plain:
                rounded(model)
            return value

        results.append([optimizer.step(closure), optimizer.step(closure)])
    assert results[0] == results[1]
    assert calls.count(ours) == 2
    assert same(ours, plain)


class Sharpness(torch.optim.SGD):
    """Wants gradients at parameters that it has changed."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].add_(0.1)
        return super().step(closure)


def test_an_optimizer_that_moves_before_the_closure_is_refused():
    model = toy()
    GradientStorage(model)

    def closure() -> Tensor:
        value = loss(model, 3)
        value.backward()
        return value

    with pytest.raises(RuntimeError, match="changes parameters before it calls the closure"):
        Sharpness(model.parameters(), lr=0.1).step(closure)
    loss(model, 1).backward()  # goes on
    assert all(isinstance(p.grad, StoredGradient) for p in model.parameters())


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if any(p.grad is not None and p.dim() == 1 for g in self.param_groups for p in g["params"]):
            raise OSError("no")
        return super().step(closure)


def test_gradients_survive_a_step_that_fails():
    model = toy()
    storage = GradientStorage(model)
    loss(model, 1).backward()
    before = storage.norm()
    optimizer = Fails(model.parameters(), lr=0.0)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            storage.step(optimizer)
        assert storage.norm() == before


def scaled_steps(model: nn.Module, *, clip: float, fused: bool, stored: bool) -> list[float]:
    """Four steps, the second of which overflows; the scale after each."""
    storage = GradientStorage(model) if stored else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(4):
        before = copy.deepcopy(model)
        for micro_batch in range(2):
            value = scaler.scale(loss(model, 10 * step + micro_batch))
            (value * (math.inf if step == 1 and micro_batch else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        assert same(model, before) == (step == 1)
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    assert storage is None or storage.norm() == 0
    return scales


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_scaler_unscales_checks_and_skips(clip: float, fused: bool):
    ours, plain = toy(), toy()
    scales = scaled_steps(ours, clip=clip, fused=fused, stored=True)
    assert scales == scaled_steps(plain, clip=clip, fused=fused, stored=False)
    assert scales[1] == 2.0**9
    start, mine, exact = (nn.utils.parameters_to_vector(model.parameters()) for model in (toy(), ours, plain))
    assert (mine - exact).norm() < 0.15 * (exact - start).norm()


def stored() -> tuple[nn.Parameter, Tensor, GradientStorage]:
    """A parameter with a stored gradient, and that gradient."""
    p = nn.Parameter(torch.zeros(5, 40))
    storage = GradientStorage([p])
    g = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    (p * g).sum().backward()
    return p, CODEC.round_trip(g), storage


def test_operators_read_and_change_what_is_stored():
    p, g, storage = stored()
    view: Any = p.grad
    assert torch.equal(view + 1, g + 1)
    assert torch.equal(torch.cat([view, view]), torch.cat([g, g]))
    assert torch.equal(view.detach().clone(), g)
    assert type(view.clone()) is Tensor
    assert repr(view).startswith("StoredGradient(tensor([[")
    assert view.numpy().tolist() == view[:].tolist() == view.tolist() == g.tolist()
    for change, expected in [
        (lambda x: x.mul_(0.5), g * 0.5),
        (lambda x: x.div_(torch.tensor(2.0)), g * 0.25),
        (lambda x: x.add_(g, alpha=0.75), CODEC.round_trip(g)),
        (lambda x: x.clamp_(-1, 1), CODEC.round_trip(g.clamp(-1, 1))),
        (lambda x: x.copy_(g), g),
        (lambda x: x.div_(0.0), g / 0.0),
        (lambda x: x.zero_(), g * 0),
        (lambda x: x.add_(2.0), g * 0 + 2),
    ]:
        assert change(view) is view
        torch.testing.assert_close(storage.gradient(p), expected, equal_nan=True)
    assert p.grad is view
    torch._foreach_mul_([view, g], 3.0)  # pyright: ignore[reportPrivateImportUsage]
    assert torch.equal(storage.gradient(p), torch.full_like(p, 6.0))


def test_a_gradient_that_is_gone_says_so(tmp_path: Any):
    p, g, storage = stored()
    old: Any = p.grad
    torch.save(old, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), g)
    storage.zero_()
    (p * g).sum().backward()
    for use in (lambda: old + 1, lambda: old.mul_(2), lambda: old.add_(g)):
        with pytest.raises(RuntimeError, match="this gradient of '0' is gone"):
            use()


def test_optimizers_of_other_models_are_left_alone():
    other = toy()
    GradientStorage(toy())
    loss(other, 1).backward()
    optimizer = torch.optim.LBFGS(other.parameters(), max_iter=1)
    before = copy.deepcopy(other)
    optimizer.step(lambda: loss(other, 1))
    assert not same(other, before)


def test_a_compiled_step_and_replaced_parameters_are_refused():
    model = toy()
    GradientStorage(model)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    loss(model, 1).backward()
    with pytest.raises(RuntimeError, match="parameter '0.weight' was replaced or added after"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    p, _, storage = stored()
    optimizer = torch.optim.SGD([p], lr=0.1)
    with pytest.raises(RuntimeError, match="optimizer.step runs inside torch.compile"):
        torch.compile(optimizer.step, backend="eager")()
    torch._dynamo.reset()
    storage.close()


def test_elements_can_be_clipped_and_set_and_copies_made():
    p, g, storage = stored()
    nn.utils.clip_grad_value_([p], 0.5)
    assert torch.equal(storage.gradient(p), CODEC.round_trip(g.clamp(-0.5, 0.5)))
    p.grad[:1] = 0
    assert not storage.gradient(p)[:1].any()
    assert storage.gradient(p)[1:].any()
    assert torch.equal(copy.deepcopy(p.grad), storage.gradient(p))
    assert torch.equal(torch.from_dlpack(p.grad), storage.gradient(p))
    with pytest.raises(TypeError, match="stored in few bits"):
        p.grad.share_memory_()
