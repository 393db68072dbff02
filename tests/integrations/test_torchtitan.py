"""`lowbit.integrations.torchtitan` under TorchTitan's own `Trainer`, schedules and parallelize function."""

import importlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

pytest.importorskip("torchtitan")

from lowbit.activations import LayerAware
from lowbit.codecs import AQSGD, BlockFloat8, Cast, TransformQuant
from lowbit.integrations import EngineError
from lowbit.integrations import torchtitan as titan
from lowbit.integrations.torchtitan import LowBitConfig, low_bit, pipelining_fn
from lowbit.pipeline import LowBitStage
from tests.integrations.titan import titan_module, trained
from tests.processes import Ranks

EXACT = Cast(dtype=torch.float32)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes of this module alone: TorchTitan changes parts of PyTorch when it is imported."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def piped(schedule: str, config: LowBitConfig | None, checkpointed: bool = True) -> Any:
    def change(settings: Any) -> None:
        settings.parallelism.pipeline_parallel_degree = 2
        settings.parallelism.pipeline_parallel_schedule = schedule
        low_activations = config is not None and config.activations is not None
        kinds = titan_module("distributed.activation_checkpoint")
        kind = kinds.FullAC if low_activations else kinds.SelectiveAC
        # PyTorch's zero-bubble schedules go through a graph twice, which selective checkpointing refuses.
        settings.activation_checkpoint = kind.Config() if checkpointed and "Zero" not in schedule else None
        if config is not None:
            settings.model_spec = low_bit(settings.model_spec, config)

    return trained(change)


def exact_and_own(schedule: str) -> tuple[bool, bool, int]:
    own, ours = piped(schedule, None), piped(schedule, LowBitConfig(forward=EXACT))
    stages = stages_of(ours)
    assert all(isinstance(stage, LowBitStage) for stage in stages)
    assert not any(isinstance(stage, LowBitStage) for stage in stages_of(own))
    return ours.losses == own.losses, ours.weights == own.weights, len(stages)


def stages_of(run: SimpleNamespace) -> list[Any]:
    schedule = run.trainer.pp_schedule
    return getattr(schedule, "_stages", None) or [schedule._stage]


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_exact_formats_train_bit_for_bit_as_torchtitan_does(ranks: Ranks, schedule: str, stages: int):
    assert ranks.run(exact_and_own, schedule) == [(True, True, stages)] * 2


def few_bits() -> tuple[list[float], list[float], float, float]:
    own = piped("1F1B", None)
    ours = piped("1F1B", LowBitConfig(warmup_steps=1))
    (stage,) = stages_of(ours)
    return own.losses, ours.losses, stage.traffic.forward_bits, stage.traffic.backward_bits


def test_the_default_formats_train_nearly_as_torchtitan_does(ranks: Ranks):
    first, last = ranks.run(few_bits)
    own, ours = last[:2]
    assert own[0] == ours[0]
    assert own[1:] != ours[1:]
    assert ours == pytest.approx(own, abs=0.03)
    # One of three steps is at full precision.
    assert 32 / 3 < first[2] < 32 / 3 + 4
    assert 32 / 3 < last[3] < 32 / 3 + 4


def saved(checkpointed: bool) -> tuple[list[float], list[float]]:
    config = LowBitConfig(forward=EXACT, activations=LayerAware())
    return piped("1F1B", LowBitConfig(forward=EXACT), False).losses, piped("1F1B", config, checkpointed).losses


@pytest.mark.parametrize("checkpointed", [False, True])
def test_saved_activations_change_gradients_alone(ranks: Ranks, checkpointed: bool):
    own, ours = ranks.run(saved, checkpointed)[1]
    assert ours[0] == pytest.approx(own[0], abs=1e-5)
    assert ours != own
    assert ours == pytest.approx(own, abs=0.01)


def data_parallel(replicas: int, config: LowBitConfig | None) -> list[Any]:
    def change(settings: Any) -> None:
        settings.parallelism.data_parallel_replicate_degree = replicas
        settings.training.local_batch_size = 1
        if config is not None:
            settings.model_spec = low_bit(settings.model_spec, config)
        elif replicas == 1:
            settings.model_spec.parallelize_fn = in_sums(settings.model_spec.parallelize_fn)

    run = trained(change)
    return [run.losses, run.weights]


def in_sums(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have FSDP add shards up, because Gloo lacks the operation that TorchTitan's settings ask for otherwise."""

    def parallelize(model: Any, **kwargs: Any) -> Any:
        function(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def own_exact_and_ours(replicas: int) -> list[list[Any]]:
    configs = (None, LowBitConfig(gradients=EXACT), LowBitConfig(gradients=BlockFloat8()))
    return [data_parallel(replicas, config) for config in configs]


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_are_summed_in_few_bits(ranks: Ranks, replicas: int):
    """Over FSDP's shards, and over replicas, which TorchTitan makes by FSDP as well."""
    outcomes = ranks.run(own_exact_and_ours, replicas)
    for own, exact, ours in outcomes:
        assert exact == own
        assert ours[1] != own[1]
        assert ours[0] == pytest.approx(own[0], abs=0.01)
    (_, _, first), (_, _, second) = outcomes
    assert first[0] != second[0]  # other data
    assert (first[1] == second[1]) == (replicas == 2)


def refused() -> list[str]:
    texts = []
    for checkpointing, degree in (("SelectiveAC", 1), ("", 2)):

        def change(settings: Any, checkpointing: str = checkpointing, degree: int = degree) -> None:
            settings.parallelism.tensor_parallel_degree = degree
            settings.parallelism.pipeline_parallel_degree = 2 // degree
            if checkpointing:
                settings.activation_checkpoint = getattr(
                    titan_module("distributed.activation_checkpoint"), checkpointing
                ).Config()
            settings.model_spec = low_bit(settings.model_spec, LowBitConfig(activations=LayerAware()))

        with pytest.raises(ValueError, match="allowed") as caught:
            trained(change)
        texts.append(str(caught.value))
    return texts


def test_what_saved_activations_do_not_go_with(ranks: Ranks):
    for selective, tensor_parallel in ranks.run(refused):
        assert "activation_checkpoint is SelectiveAC.Config" in selective
        assert selective.endswith("allowed: FullAC.Config() or None")
        assert tensor_parallel == "tensor_parallel_degree is 2; allowed with low-bit activations: 1"


def build(*, fail: bool = False) -> tuple[Any, ...]:
    """A pipelining function outside of TorchTitan, with the name of the stages in its own module."""
    module, elsewhere = torch.nn.Linear(2, 2), []
    thread = threading.Thread(target=lambda: elsewhere.append(PipelineStage(module, 0, 1, torch.device("cpu"))))
    thread.start()
    thread.join()
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    if fail:
        raise RuntimeError("no memory")
    return SimpleNamespace(_stage=stage), [module], elsewhere


def build_none() -> tuple[Any, ...]:
    return SimpleNamespace(_stages=[object()]), []


@pytest.mark.usefixtures("alone")
def test_the_name_stands_for_our_stage_in_this_call_and_thread_alone():
    schedule, _, elsewhere = pipelining_fn(build)()
    assert isinstance(schedule._stage, LowBitStage)
    assert type(elsewhere[0]) is PipelineStage
    assert type(build()[0]._stage) is PipelineStage
    with pytest.raises(RuntimeError, match="no memory"):
        pipelining_fn(build)(fail=True)
    assert type(build()[0]._stage) is PipelineStage


def test_a_function_without_stages_is_one_error():
    with pytest.raises(ValueError, match=r"^build_none made stages of object; allowed: .* the name PipelineStage"):
        pipelining_fn(build_none)()


def test_twice_is_an_error():
    spec = titan_module("models.llama3").model_registry("debugmodel")
    config = LowBitConfig(gradients=BlockFloat8())
    once = low_bit(spec, config)
    assert once.model is spec.model
    with pytest.raises(ValueError, match="parallelize_llama is low-bit already"):
        low_bit(once, config)
    with pytest.raises(ValueError, match="pipeline_llm is low-bit already"):
        low_bit(low_bit(spec))
    with pytest.raises(TypeError, match="spec is Config; allowed: torchtitan.protocols"):
        low_bit(spec.model)
    plain = low_bit(spec, LowBitConfig(forward=None))
    assert (plain.pipelining_fn, plain.parallelize_fn) == (spec.pipelining_fn, spec.parallelize_fn)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"forward": "int4"}, TypeError, "forward is 'int4'; allowed: a codec"),
        ({"backward": {0: 4}}, TypeError, "backward is 4; allowed: a codec"),
        ({"forward": None, "backward": EXACT}, ValueError, "allowed where forward is None: None"),
        ({"forward": AQSGD()}, ValueError, "forward is AQSGD.* needs the ids of samples"),
        ({"forward": TransformQuant(bits="auto")}, ValueError, "warmup_steps is 0"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps is -1"),
        ({"gradients": TransformQuant()}, TypeError, "it cannot be summed"),
        ({"activations": 4}, TypeError, "activations is 4; allowed: a LayerAware"),
        ({"timeout": 0}, ValueError, "timeout is 0"),
        ({"checksums": 1}, TypeError, "checksums is 1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        LowBitConfig(**wrong)


def test_another_torchtitan_is_one_error(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.delattr(titan_module("distributed.pipeline_parallel"), "PipelineStage")
        with pytest.raises(EngineError, match=r"has no torchtitan.distributed.pipeline_parallel.PipelineStage; lowbit"):
            importlib.reload(titan)
    importlib.reload(titan)
