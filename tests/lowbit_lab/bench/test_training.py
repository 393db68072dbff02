import dataclasses

import pytest
import torch
from torch import Tensor, nn

from lowbit.activations import LayerAware
from lowbit.codecs import AQSGD, BlockFloat8, Cast, parse
from lowbit.wire.checksum import CHECKSUM_BYTES
from lowbit_lab.bench import training
from lowbit_lab.bench.training import Formats, Replicas, TrainingRecipe, boundary_modules, evaluate, formats_in, train
from lowbit_run.train.config import DataConfig, ModelConfig, OptimizerConfig
from lowbit_run.train.data import load_data
from lowbit_run.train.model import build_model
from lowbit_run.train.optim import make_optimizer

FP32 = Cast()
CHECKSUM_BITS = 8 * CHECKSUM_BYTES / (2 * 16 * 32)  # an element, in messages of (2, 16, 32)
INT2, INT6 = "GroupInt(bits=2, group=64)", "GroupInt(bits=6, group=32, symmetric=True)"
CODED = f"{INT2} / {INT6}"
pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def recipe(text: str) -> TrainingRecipe:
    return TrainingRecipe(
        model=ModelConfig(dim=32, layers=4, heads=2),
        data=DataConfig(text=(text,), sequence=16, batch=2, held_out_share=0.2),
        optimizer=OptimizerConfig(lr_warmup_steps=2),
        steps=4,
        warmup_steps=2,
        stages=3,
        eval_windows=6,
    )


def test_gradients_and_activations_in_few_bits_train_too(recipe: TrainingRecipe):
    _, plain = train(recipe, seed=0)
    for name in ("gradients:fp8", "activations:norm-8", "activations:uniform"):
        model, found = train(recipe, name, seed=0)
        assert found["curve"][0] == pytest.approx(plain["curve"][0], rel=1e-6), f"{name}: forward is exact"
        assert found["loss"] != plain["loss"], name
        assert found["loss"] == pytest.approx(plain["loss"], abs=0.05), name
        assert not any("forward" in vars(module) for module in model.modules()), name


def test_formats_by_name_and_agoq_in_8_bits(recipe: TrainingRecipe, monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(training, "eight_bit_adamw", lambda *a, compiled: made.append(compiled) or make_optimizer(*a))
    published = LayerAware.published()
    assert formats_in("gradients:fp8", "int6") == Formats(gradients=BlockFloat8())
    assert formats_in("activations:norm-8", "int8") == Formats(activations=training.POLICIES["norm-8"])
    with pytest.raises(ValueError, match="boundary is 'activations:4'; allowed: activations:default, act"):
        formats_in("activations:4")
    with pytest.raises(ValueError, match="keeps state between messages"):
        formats_in("gradients:aq-sgd")
    assert formats_in("activations:agoq") == Formats(activations=published)
    agoq = Formats(gradients=BlockFloat8(), activations=published, eight_bit=True)
    assert formats_in("agoq") == formats_in("activations:agoq+8bit") == agoq
    losses = {
        name: first_losses(recipe, name) for name in ("fp32", "activations:agoq", "agoq", "activations:agoq+8bit")
    }
    assert losses["agoq"] == losses["activations:agoq+8bit"] == pytest.approx(losses["fp32"], abs=0.05)
    assert len({tuple(each) for each in losses.values()}) == 3
    assert made == [True, True]


def first_losses(recipe: TrainingRecipe, boundary: str, *, seed: int = 0) -> list[float]:
    losses: list[float] = []
    train(recipe, boundary, seed=seed, on_step=lambda step, loss: losses.append(loss))
    return losses


def test_runs_differ_by_the_codec_alone_and_only_after_warm_up(recipe: TrainingRecipe):
    plain, coded = first_losses(recipe, "fp32"), first_losses(recipe, CODED)
    assert coded[:2] == plain[:2]
    assert coded[2:] != plain[2:]
    assert first_losses(recipe, CODED) == coded
    assert first_losses(recipe, "fp32", seed=1)[0] != plain[0]
    recipe = dataclasses.replace(recipe, steps=20, warmup_steps=0)
    losses, coded = first_losses(recipe, "fp32"), first_losses(recipe, f"Cast() / {INT2}")
    assert losses[-1] < losses[0] - 0.5, "training lowers the loss"
    assert coded[0] == losses[0]
    assert coded[1:] != losses[1:], "the codec of gradients matters"


def test_optimizer_precision_and_boundaries_are_the_recipes(recipe: TrainingRecipe):
    still = dataclasses.replace(recipe, optimizer=OptimizerConfig(lr=0.0))
    _, result = train(still, seed=0)
    fresh = build_model(recipe.model, vocab=256, sequence=16, seed=0)
    assert evaluate(fresh, load_data(recipe.data).held_out, recipe) == result["loss"]
    clipped = dataclasses.replace(recipe, optimizer=OptimizerConfig(lr_warmup_steps=2, clip=1e-9))
    for family, place in {"llama": "model.layers", "gpt2": "transformer.h"}.items():
        deeper = build_model(ModelConfig(family=family, dim=32, layers=5, heads=2), vocab=256, sequence=16, seed=0)
        assert boundary_modules(deeper, 3) == [f"{place}.1", f"{place}.3"]
    plain = first_losses(recipe, "fp32")
    assert first_losses(clipped, "fp32")[2] != plain[2]
    rounded = first_losses(dataclasses.replace(recipe, precision="bf16"), "fp32")
    assert rounded != plain
    assert rounded == pytest.approx(plain, rel=0.01)


def test_bits_are_counted_with_and_without_warm_up(recipe: TrainingRecipe):
    _, result = train(recipe, CODED, seed=0)
    there, back = (parse(codec).bits_per_element((2, 16, 32)) + CHECKSUM_BITS for codec in (INT2, INT6))
    assert result["bits_forward"] == there
    assert result["bits_backward"] == back
    assert result["bits_forward_run"] == (32 + CHECKSUM_BITS + there) / 2
    assert result["state_bytes"] == 0
    assert result["loss_through_codecs"] != result["loss"]
    assert [step for step, _ in result["curve"]] == [1, 2, 3, 4]


def test_a_format_with_memory_sees_its_samples_again(recipe: TrainingRecipe):
    recipe = dataclasses.replace(recipe, warmup_steps=0, samples=4)
    _, result = train(recipe, f"aq-sgd / {INT6}", seed=0)
    # Two steps bring four new samples, the other two differences.
    later = AQSGD().inner.bits_per_element((16, 32))
    assert result["bits_forward"] == pytest.approx((32 + later) / 2 + CHECKSUM_BITS)
    ends, boundaries = 2, 2
    assert result["state_bytes"] == ends * boundaries * 4 * 16 * 32 * 4
    assert result["loss_through_codecs"] is None


def mean_square(model: nn.Module):
    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return (model(inputs) - targets).square().mean()

    return loss


def test_everything_that_is_rounded_is_rounded():
    """Each micro-batch, what a rank sends, and the sum that comes back."""
    torch.manual_seed(0)
    codec = BlockFloat8(block=32)
    model, x, y = nn.Linear(8, 4, bias=False), torch.randn(4, 8), torch.randn(4, 4)
    loss = mean_square(model)
    total = torch.zeros(4, 8)
    for rank in range(2):
        one, other = (
            torch.autograd.grad(loss(x[i : i + 1], y[i : i + 1]), model.weight)[0] for i in (2 * rank, 2 * rank + 1)
        )
        total += codec.round_trip(codec.round_trip(one) + other)
    replicas = Replicas(model, codec)
    with pytest.raises(ValueError, match="batch is 3; allowed: multiples of 2"):
        replicas.backward(loss, x[:3], y[:3])
    replicas.backward(loss, x, y)
    assert torch.equal(replicas.storage.gradient(model.weight), codec.round_trip(total) / 4)
    before = model.weight.detach().clone()
    gradient = codec.round_trip(total) / 4
    replicas.step(torch.optim.SGD(model.parameters(), lr=1.0), clip=0)
    assert torch.equal(model.weight, before - gradient)
    assert replicas.storage.gradient(model.weight) is None
    replicas.backward(loss, x, y)
    before = model.weight.detach().clone()
    replicas.step(torch.optim.SGD(model.parameters(), lr=1.0), clip=1e-3)
    assert (before - model.weight.detach()).norm() == pytest.approx(1e-3, rel=1e-2)


def test_evaluation_is_the_mean_over_windows_spread_over_the_text(recipe: TrainingRecipe):
    model = build_model(recipe.model, vocab=256, sequence=16, seed=0)
    held_out = load_data(recipe.data).held_out
    assert len(held_out) >= 12
    step = len(held_out) / 6
    expected = []
    with torch.no_grad():
        for i in range(6):
            inputs, targets = held_out.batch(torch.tensor([int(i * step)]))
            logits = model(input_ids=inputs).logits
            expected.append(torch.nn.functional.cross_entropy(logits[0], targets[0]).item())
    assert evaluate(model, held_out, recipe) == pytest.approx(sum(expected) / 6, rel=1e-5)
