"""Codecs inside one process give the numbers of the pipeline."""

from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowbit.codecs import AQSGD, Cast, Codec, TAHQuant, TransformQuant
from lowbit.pipeline import LowBitStage, emulate_
from tests.pipeline import toy
from tests.pipeline.toy import INT4, INT6
from tests.processes import Ranks

STEPS = 5


def pipeline(forward: Codec, backward: Codec) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of a real pipeline, and the gradients of the last step; batches come twice."""
    options = {"forward": forward, "backward": backward, "warmup_steps": 1, "timeout": 30}
    run = toy.Run("1f1b", toy.lowbit(**options))
    grads = []
    for step in range(STEPS):
        for stage in run.stages:
            stage.set_samples(ids(step))
        grads = run.train(step % 2)
    return run.losses, grads


def ids(step: int) -> Tensor:
    return torch.arange(toy.ROWS * toy.MICRO_BATCHES) + 1000 * (step % 2)


def one_process(forward: Codec, backward: Codec) -> tuple[list[Tensor], list[Tensor]]:
    model = nn.Sequential(*toy.blocks(2))
    emulation = emulate_(model, at=["0"], forward=forward, backward=backward, warmup_steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        samples = ids(step).split(toy.ROWS)
        losses += toy.alone(model, *toy.batch(step % 2), lambda i, samples=samples: emulation.set_samples(samples[i]))
        optimizer.step()
        emulation.step()
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (TAHQuant(), INT6),
        (INT4, Cast(dtype=torch.bfloat16)),
        (AQSGD(inner=INT4), INT6),
        (TransformQuant(), TransformQuant(step="message")),
        (TransformQuant(bits="auto"), TransformQuant(bits="auto")),
    ],
    ids=["tah-quant", "int4", "aq-sgd", "transform", "transform-auto"],
)
def test_numbers_are_those_of_the_pipeline(ranks: Ranks, forward: Codec, backward: Codec):
    (_, first), (losses, last) = ranks.run(pipeline, forward, backward)
    # In a process like the ranks': the number of threads changes the last bit of a matrix product.
    [(expected_losses, expected_grads)] = ranks.run(one_process, forward, backward, ranks=1)
    assert torch.equal(torch.stack(losses), torch.stack(expected_losses))
    assert all(torch.equal(a, b) for a, b in zip(first + last, expected_grads, strict=True))
    [(plain, _)] = ranks.run(one_process, Cast(), Cast(), ranks=1)
    assert not torch.equal(torch.stack(losses), torch.stack(plain))


WARM = 3  # ends between the two batches of an optimizer's step


def accumulating(in_pipeline: bool, codec: Codec) -> tuple[list[Tensor], list[int]]:
    """Losses where gradients of two batches add up, and the bytes sent forward for each batch."""
    options: Any = {"forward": codec, "backward": codec, "warmup_steps": WARM}
    losses, sent = [], []
    if in_pipeline:
        run = toy.Run("1f1b", toy.lowbit(**options, timeout=30))
        optimizer, losses = run.optimizer, run.losses
        traffic = [cast("LowBitStage", stage).traffic for stage in run.stages]
    else:
        model = nn.Sequential(*toy.blocks(2))
        emulation = emulate_(model, at=["0"], **options)
        optimizer, traffic = torch.optim.SGD(model.parameters(), lr=0.1), [emulation.traffic]
    for number in range(8):
        before = sum(t.forward_bytes for t in traffic)
        x, target = toy.batch(number)
        if in_pipeline:
            found: list[Tensor] = []
            run.runner.step(*([x] if run.first else []), target=target, losses=found)
            losses += [loss.detach() for loss in found]
        else:
            losses += toy.alone(model, x, target)
            emulation.step()
        sent.append(sum(t.forward_bytes for t in traffic) - before)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, sent


@pytest.mark.parametrize("codec", [INT4, TransformQuant(bits="auto")], ids=str)
def test_warm_up_counts_batches_under_gradient_accumulation(ranks: Ranks, codec: Codec):
    (_, sent), (losses, _) = ranks.run(accumulating, True, codec)
    [(expected, expected_sent)] = ranks.run(accumulating, False, codec, ranks=1)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert sent == expected_sent
    assert max(sent[WARM:]) < min(sent[:WARM])


class Named(NamedTuple):
    hidden: Tensor
    other: Any


class Wrap(nn.Module):
    """A module that returns its input in some container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = x * 1
        if self.kind == "hugging face":
            return pytest.importorskip("transformers.modeling_outputs").BaseModelOutput(last_hidden_state=y)
        return {
            "tensor": y,
            "tuple": (y, "kept"),
            "list": [y, "kept"],
            "named": Named(y, "kept"),
            "mapping": {"hidden": y, "other": "kept"},
            "nested": ((y, "kept"), "kept"),
        }[self.kind]


def first_of(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "named", "mapping", "nested", "hugging face"])
def test_the_first_tensor_of_any_container_is_coded(kind: str):
    model = nn.Sequential(Wrap(kind))
    emulate_(model, at=["0"], forward=INT4, backward=INT6)
    x = torch.randn(4, 64, requires_grad=True)
    output = model(x)
    assert type(output) is type(Wrap(kind)(x))
    assert torch.equal(first_of(output), INT4.round_trip(x.detach()))
    grad = torch.randn(4, 64)
    first_of(output).backward(grad)
    assert torch.equal(x.grad, INT6.round_trip(grad))  # type: ignore[arg-type]
    if kind not in ("tensor", "hugging face"):
        assert "kept" in (output.values() if kind == "mapping" else output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 64), (3, 0), (5,)])
def test_dtypes_and_shapes(dtype: torch.dtype, shape: tuple[int, ...]):
    model = nn.Sequential(nn.Identity())
    emulate_(model, at=["0"], forward=INT4, backward=INT6)
    x = torch.randn(shape).to(dtype)
    y = model(x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert torch.equal(y, INT4.round_trip(x))


def test_evaluation_is_coded_unless_told_otherwise_and_remove_restores_the_model():
    x = torch.randn(2, 64)
    for in_evaluation in (True, False):
        model = nn.Sequential(nn.Identity())
        emulation = emulate_(model, at=["0"], forward=INT4, backward=INT6, in_evaluation=in_evaluation)
        assert not torch.equal(model(x), x)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), INT4.round_trip(x) if in_evaluation else x)
        emulation.remove()
        emulation.remove()
        assert torch.equal(model.train()(x), x)


def test_a_codec_that_remembers_samples_leaves_evaluation_alone():
    model = nn.Sequential(nn.Identity())
    emulation = emulate_(model, at=["0"], forward=AQSGD(inner=INT4), backward=INT6)
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
        if reentrant is None:
            y = inside(x)
        else:
            y = checkpoint(inside, x, use_reentrant=reentrant)
        y.square().mean().backward()
        emulation.step()
    traffic = emulation.traffic
    sent = (traffic.forward_bytes, traffic.backward_bytes)
    return [p.grad for p in model.parameters()], sent, emulation.chosen()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_is_no_second_message(reentrant: bool):
    auto = TransformQuant(bits="auto")
    for forward, steps in ((TAHQuant(), 0), (auto, 2)):
        plain = checkpointed(forward, reentrant=None, warmup_steps=steps)
        found = checkpointed(forward, reentrant=reentrant, warmup_steps=steps)
        assert all(torch.equal(a, b) for a, b in zip(plain[0], found[0], strict=True))
        assert plain[1:] == found[1:]
    with pytest.raises(RuntimeError, match=r"boundary 0 is computed again .*checkpointing"):
        checkpointed(auto, reentrant=reentrant, warmup_steps=1)  # by then directions have moved


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


def test_codecs_by_boundary():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    emulate_(model, at=["0", "1"], forward={0: Cast(), 1: INT4}, backward=INT6)
    x = torch.randn(2, 64)
    assert torch.equal(model(x), INT4.round_trip(x))
    with pytest.raises(ValueError, match="forward has no codec for boundary 1"):
        emulate_(model, at=["0", "1"], forward={0: INT4}, backward=INT6)


@pytest.mark.parametrize(
    ("at", "said"),
    [([], "at is"), ("0", "at is '0'"), (["9"], "names such as 0"), (["0", "0"], "twice"), ([""], "does not have")],
)
def test_bad_names_are_refused(at: Any, said: str):
    model = nn.Sequential(nn.Identity())
    with pytest.raises(ValueError, match=said):
        emulate_(model, at=at, forward=INT4, backward=INT6)
    x = torch.randn(2, 64)
    assert torch.equal(model(x), x)


def test_autocast_does_not_reach_into_the_codec_and_integers_are_refused():
    model = nn.Sequential(nn.Identity())
    emulate_(model, at=["0"], forward=TAHQuant(), backward=INT6)
    x = torch.randn(2, 4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert torch.equal(y, TAHQuant().round_trip(x))
    with pytest.raises(TypeError, match="int64"):
        model(torch.arange(3))
