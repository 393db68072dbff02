"""Codecs inside one process give the numbers of the pipeline."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowbit.codecs import AQSGD, Cast, Codec, TAHQuant, TransformQuant
from lowbit.pipeline import emulate_
from lowbit.pipeline.emulate import Emulation
from tests.lowbit.pipeline import toy
from tests.lowbit.pipeline.toy import INT4, INT6
from tests.processes import Ranks
from tests.refused import refused

STEPS = 5


def trained(in_pipeline: bool, forward: Codec, backward: Codec) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and the gradients of the last step; batches come twice."""
    options: Any = {"forward": forward, "backward": backward, "warmup_steps": 1}
    run = toy.Run("1f1b", toy.lowbit(**options, timeout=30)) if in_pipeline else toy.Emulated(**options)
    for step in range(STEPS):
        number = step % 2
        ids = torch.arange(toy.ROWS * toy.MICRO_BATCHES) + 1000 * number
        if isinstance(run, toy.Run):
            run.stages[0].set_samples(ids)
            run.train(number)
        else:
            run.train(number, ids)
    return run.losses, [p.grad for p in run.parameters if p.grad is not None]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (TAHQuant(), INT6),
        (INT4, Cast(dtype=torch.bfloat16)),
        (AQSGD(inner=INT4), INT6),
        (TransformQuant(), TransformQuant(step="message")),
    ],
    ids=["tah-quant", "int4", "aq-sgd", "transform"],
)
def test_numbers_are_those_of_the_pipeline(ranks: Ranks, forward: Codec, backward: Codec):
    (_, first), (losses, last) = ranks.run(trained, True, forward, backward)
    # In a process like the ranks': the number of threads changes the last bit of a matrix product.
    [(expected_losses, expected_grads)] = ranks.run(trained, False, forward, backward, ranks=1)
    assert toy.same(losses, expected_losses)
    assert toy.same(first + last, expected_grads)
    [(plain, _)] = ranks.run(trained, False, Cast(), Cast(), ranks=1)
    assert not toy.same(losses, plain)


class Masking(toy.Block):
    """A block that hands over an additive mask, before its activations."""

    def forward(self, x: Any, y: Tensor | None = None) -> Any:
        mask, y = x if isinstance(x, tuple) else (x, y)
        if y is None:
            return torch.full((8, 8), -1e4).triu(1), super().forward(x)
        assert set(mask.unique().tolist()) <= {0, -1e4}  # zeros in a trial
        return super().forward((y @ y.mT + mask).softmax(-1) @ y)


def masked(in_pipeline: bool) -> list[Tensor]:
    """Losses of training steps, each followed by an evaluation."""
    options: Any = {"forward": TAHQuant(), "backward": INT6}
    if in_pipeline:
        run = toy.Run("1f1b", toy.lowbit(**options, timeout=30), kind=Masking)
    else:
        run = toy.Emulated(Masking, **options)
    for step in range(3):
        run.train(step)
        if isinstance(run, toy.Run):
            run.losses += run.feed(*toy.batch(step), training=False)[1]
            continue
        with torch.no_grad():
            pairs = zip(*(each.split(toy.ROWS) for each in toy.batch(step)), strict=True)
            run.losses += [toy.loss_of(run.model(x), target) for x, target in pairs]
    return run.losses


def test_constants_stay_exact_as_in_the_pipeline(ranks: Ranks):
    _, losses = ranks.run(masked, True)
    [expected] = ranks.run(masked, False, ranks=1)
    assert toy.same(losses, expected)


WARM = 3  # ends between the two batches of an optimizer's step


def accumulating(in_pipeline: bool, codec: Codec) -> tuple[list[Tensor], list[int]]:
    """Losses where gradients of two batches add up, and the bytes sent forward for each batch."""
    options: Any = {"forward": codec, "backward": codec, "warmup_steps": WARM}
    run = toy.Run("1f1b", toy.lowbit(**options, timeout=30)) if in_pipeline else toy.Emulated(**options)
    traffic = run.stages[0].traffic if isinstance(run, toy.Run) else run.emulation.traffic
    losses, sent = [], []
    for number in range(8):
        before = traffic.forward_bytes
        losses += run.feed(*toy.batch(number))[1]
        sent.append(traffic.forward_bytes - before)
        if number % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()
    return losses, sent


@pytest.mark.parametrize("codec", [INT4, TransformQuant()], ids=str)
def test_warm_up_counts_batches_under_gradient_accumulation(ranks: Ranks, codec: Codec):
    (_, sent), (losses, _) = ranks.run(accumulating, True, codec)
    [(expected, expected_sent)] = ranks.run(accumulating, False, codec, ranks=1)
    assert toy.same(losses, expected)
    assert sent == expected_sent
    assert max(sent[WARM:]) < min(sent[:WARM])


class Named(NamedTuple):
    hidden: Tensor
    other: Any


def of_hugging_face(y: Tensor) -> Any:
    return pytest.importorskip("transformers.modeling_outputs").BaseModelOutput(last_hidden_state=y)


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, "kept"),
    "list": lambda y: [y, "kept"],
    "named": lambda y: Named(y, "kept"),
    "mapping": lambda y: {"hidden": y, "other": "kept"},
    "nested": lambda y: ((y, "kept"), "kept"),
    "hugging face": of_hugging_face,
}


class Wrap(nn.Module):
    """A module that returns its input in some container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return CONTAINERS[self.kind](x * 1)


def first_of(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_first_tensor_of_any_container_is_coded(kind: str):
    model = nn.Sequential(Wrap(kind))
    emulate_(model, at=["0"], forward=INT4, backward=INT6)
    x = torch.randn(4, 64, requires_grad=True)
    output = model(x)
    assert type(output) is type(CONTAINERS[kind](x))
    assert torch.equal(first_of(output), INT4.round_trip(x.detach()))
    grad = torch.randn(4, 64)
    first_of(output).backward(grad)
    assert torch.equal(x.grad, INT6.round_trip(grad))  # type: ignore[arg-type]
    if kind not in ("tensor", "hugging face"):
        assert "kept" in (output.values() if kind == "mapping" else output)


def identity(forward: Codec = INT4, **options: Any) -> tuple[nn.Sequential, Emulation]:
    model = nn.Sequential(nn.Identity())
    return model, emulate_(model, at=["0"], forward=forward, backward=INT6, **options)


def test_floating_tensors_are_coded_whatever_autocast_says_and_integers_refused():
    for forward, shape in ((INT4, (2, 3, 64)), (INT4, (3, 0)), (INT4, (5,)), (TAHQuant(), (2, 4, 64))):
        model, _ = identity(forward)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(shape).to(dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=forward is not INT4):
                y = model(x)
            assert (y.shape, y.dtype) == (x.shape, dtype)
            assert torch.equal(y, forward.round_trip(x))
    with pytest.raises(TypeError, match="int64"):
        model(torch.arange(3))


def test_evaluation_is_coded_unless_told_otherwise_and_remove_restores_the_model():
    x = torch.randn(2, 64)
    for in_evaluation in (True, False):
        model, emulation = identity(in_evaluation=in_evaluation)
        assert not torch.equal(model(x), x)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), INT4.round_trip(x) if in_evaluation else x)
        emulation.remove()
        emulation.remove()
        assert torch.equal(model.train()(x), x)


def test_a_codec_that_remembers_samples_leaves_evaluation_alone():
    model, emulation = identity(AQSGD(inner=INT4))
    x = torch.randn(2, 64)
    with pytest.raises(ValueError, match="set_samples"):
        model(x)
    assert torch.equal(model.eval()(x), x)
    assert emulation.state_bytes() == 0
    emulation.set_samples([4, 7])
    model.train()
    assert torch.equal(model(x), x)  # a first visit
    assert not torch.equal(model(x + 1), x + 1)
    assert emulation.state_bytes() == 2 * x.numel() * 4


def checkpointed(forward: Codec, *, reentrant: bool | None, warmup_steps: int = 0) -> Any:
    """Two steps of a model whose middle is computed again during backward, or not (None)."""
    model = nn.Sequential(*toy.blocks(3))
    emulation = emulate_(model, at=["1"], forward=forward, backward=INT6, warmup_steps=warmup_steps)
    for step in range(2):
        x = model[0](toy.batch(step)[0])
        inside = nn.Sequential(model[1], model[2])
        y = inside(x) if reentrant is None else checkpoint(inside, x, use_reentrant=reentrant)
        y.square().mean().backward()
        emulation.step()
    sent = emulation.traffic.forward_bytes, emulation.traffic.backward_bytes
    return [p.grad for p in model.parameters()], sent


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_is_no_second_message(reentrant: bool):
    for forward, steps in ((TAHQuant(), 0), (TransformQuant(), 2)):
        plain = checkpointed(forward, reentrant=None, warmup_steps=steps)
        found = checkpointed(forward, reentrant=reentrant, warmup_steps=steps)
        assert all(torch.equal(a, b) for a, b in zip(plain[0], found[0], strict=True))
        assert plain[1] == found[1]
    with pytest.raises(RuntimeError, match=r"boundary 0 is computed again .*checkpointing"):
        checkpointed(TransformQuant(), reentrant=reentrant, warmup_steps=1)  # by then directions have moved


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_with_a_codec_that_learns():
    def losses(backend: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        codec = TransformQuant()
        emulate_(model, at=["0"], forward=codec, backward=codec)
        run = torch.compile(model, backend=backend) if backend else model
        found = []
        for _ in range(3):
            loss = run(torch.randn(8, 32)).square().mean()
            loss.backward()
            found += [loss.detach(), model[0].weight.grad.clone()]
        return found

    for a, b in zip(losses(None), losses("aot_eager"), strict=True):
        assert torch.equal(a, b)


def test_codecs_by_boundary_and_what_is_refused():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    x, coded = torch.randn(2, 64), partial(emulate_, model, backward=INT6)
    refused(
        (partial(coded, at=["0", "1"], forward={0: INT4}), ValueError, "forward has no codec for boundary 1"),
        (partial(coded, at=[], forward=INT4), ValueError, "at is"),
        (partial(coded, at="0", forward=INT4), ValueError, "at is '0'"),
        (partial(coded, at=["9"], forward=INT4), ValueError, "names such as 0"),
        (partial(coded, at=["0", "0"], forward=INT4), ValueError, "twice"),
        (partial(coded, at=[""], forward=INT4), ValueError, "does not have"),
    )
    assert torch.equal(model(x), x)
    coded(at=["0", "1"], forward={0: Cast(), 1: INT4})
    assert torch.equal(model(x), INT4.round_trip(x))
