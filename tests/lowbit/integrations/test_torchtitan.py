"""`lowbit.integrations.torchtitan` under TorchTitan's own `Trainer`, schedules and parallelize function, without CUDA.

What of it assumes CUDA is replaced: the module of the device, and `torch.distributed.set_timeout`, which PyTorch 2.13
lacks. There `schedule.step` does not take micro-batches either, so `pp_forward_backward_step` hands over whole batches.
"""

import hashlib
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor

pytest.importorskip("torchtitan")

from lowbit.activations import LayerAware
from lowbit.codecs import AQSGD, BlockFloat8, Cast, TransformQuant
from lowbit.integrations import EngineError
from lowbit.integrations import torchtitan as titan
from lowbit.integrations.torchtitan import LowBitConfig, low_bit, pipelining_fn
from lowbit.pipeline import LowBitStage
from tests.processes import Ranks, on_ranks
from tests.refused import refused

EXACT = Cast(dtype=torch.float32)
VOCABULARY, BATCH, SEQUENCE = 2048, 4, 32


def titan_module(name: str) -> Any:
    """A module of TorchTitan."""
    return importlib.import_module(f"torchtitan.{name}")


def without_cuda() -> None:
    """Let TorchTitan find a CPU, also in those of its modules that are imported already."""
    titan_module("trainer")
    device = mock.Mock(
        **{"device_count.return_value": 1, "current_device.return_value": 0, "memory_stats.return_value": {}},
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 34),
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            vars(module).update(device_type="cpu", device_module=device)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group: None
    os.environ["LOCAL_RANK"] = str(dist.get_rank())


def debug_config(change: Callable[[Any], None]) -> Any:
    """The `Trainer.Config` of TorchTitan's Llama debug model, small; `change` gets it last.

    Its attention is `scaled_dot_product_attention`: FlexAttention has no backward on a CPU.
    """
    BaseDataLoader: Any = titan_module("components.dataloader").BaseDataLoader
    BaseTokenizer: Any = titan_module("components.tokenizer").BaseTokenizer
    attention = titan_module("models.common.attention").ScaledDotProductAttention

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *args: Any) -> list[int]:
            return []

        def decode(self, *args: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class RandomTokens(BaseDataLoader):
        """Other tokens on each data-parallel rank."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.generator = torch.Generator().manual_seed(dp_rank)
            self.batch, self.sequence = local_batch_size, seq_len

        def __iter__(self) -> Iterator[Any]:
            positions = torch.arange(self.sequence).expand(self.batch, -1)
            while True:
                x = torch.randint(VOCABULARY, (self.batch, self.sequence + 1), generator=self.generator)
                yield {"input": x[:, :-1], "positions": positions}, x[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    config = titan_module("models.llama3.config_registry").llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = attention.Config()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), RandomTokens.Config()
    config.training.local_batch_size, config.training.seq_len = BATCH, SEQUENCE
    config.training.steps, config.training.disable_cuda_graphs = 3, True
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a PyTorch later than 2.13
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint = None
    config.debug.seed = 1
    change(config)
    return config


def trained(change: Callable[[Any], None]) -> SimpleNamespace:
    """Train by TorchTitan's `Trainer`: losses of this rank by step, hashes of its parameters, and its trainer."""
    without_cuda()
    Trainer: Any = titan_module("trainer").Trainer
    losses: list[float] = []

    class Recorded(Trainer):
        def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
            loss = super().forward_backward_step(**kwargs)
            losses.append(float(loss))
            return loss

        def pp_forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
            if "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters:
                return super().pp_forward_backward_step(**kwargs)
            return self.whole_batch(**kwargs)

        def whole_batch(
            self, *, input_dict_mbs: list[dict[str, Any]], label_mbs: list[Any], global_valid_tokens: Any
        ) -> torch.Tensor:
            whole = {name: torch.cat([each[name] for each in input_dict_mbs]) for name in input_dict_mbs[0]}
            inputs = [whole.pop("input")] if self.pp_has_first_stage else []
            whole.pop("input", None)
            last = [] if self.pp_has_last_stage else None
            with self.train_context():
                self.pp_schedule.step(
                    *inputs, **whole, target=torch.cat(label_mbs) if self.pp_has_last_stage else None, losses=last,
                    loss_kwargs={"global_valid_tokens": global_valid_tokens}, return_outputs=False,
                )  # fmt: skip
            return torch.tensor(-1.0) if last is None else torch.stack(last).sum()

    trainer = Recorded(debug_config(change))
    trainer.train()
    trainer.close()
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    plain = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    weights = [hashlib.sha256(p.detach().contiguous().numpy().tobytes()).hexdigest() for p in plain]
    return SimpleNamespace(losses=losses, weights=weights, trainer=trainer)


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


def stages_of(run: SimpleNamespace) -> list[Any]:
    schedule = run.trainer.pp_schedule
    return getattr(schedule, "_stages", None) or [schedule._stage]


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
@on_ranks
def test_exact_formats_train_bit_for_bit_as_torchtitan_does(schedule: str, stages: int):
    own, ours = piped(schedule, None), piped(schedule, LowBitConfig(forward=EXACT))
    assert [isinstance(stage, LowBitStage) for stage in stages_of(ours)] == [True] * stages
    assert not any(isinstance(stage, LowBitStage) for stage in stages_of(own))
    assert ours.losses == own.losses
    assert ours.weights == own.weights


@on_ranks
def test_the_default_formats_train_nearly_as_torchtitan_does():
    own, run = piped("1F1B", None).losses, piped("1F1B", LowBitConfig(warmup_steps=1))
    (stage,) = stages_of(run)
    # One of three steps is at full precision.
    if dist.get_rank() == 0:
        assert 32 / 3 < stage.traffic.forward_bits < 32 / 3 + 4
        return
    assert 32 / 3 < stage.traffic.backward_bits < 32 / 3 + 4
    assert own[0] == run.losses[0]
    assert own[1:] != run.losses[1:]
    assert run.losses == pytest.approx(own, abs=0.03)


@on_ranks
def test_saved_activations_change_gradients_alone():
    own = piped("1F1B", LowBitConfig(forward=EXACT), False).losses
    for checkpointed in (False, True):
        ours = piped("1F1B", LowBitConfig(forward=EXACT, activations=LayerAware()), checkpointed).losses
        if dist.get_rank():
            assert ours[0] == pytest.approx(own[0], abs=1e-5)
            assert ours != own
            assert ours == pytest.approx(own, abs=0.01)


def data_parallel(replicas: int, config: LowBitConfig | None) -> tuple[list[float], list[str]]:
    def change(settings: Any) -> None:
        settings.parallelism.data_parallel_replicate_degree = replicas
        settings.training.local_batch_size = 1
        if config is not None:
            settings.model_spec = low_bit(settings.model_spec, config)
        elif replicas == 1:
            settings.model_spec.parallelize_fn = in_sums(settings.model_spec.parallelize_fn)

    run = trained(change)
    return run.losses, run.weights


def in_sums(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have FSDP add shards up, because Gloo lacks the operation that TorchTitan's settings ask for otherwise."""

    def parallelize(model: Any, **kwargs: Any) -> Any:
        function(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def own_exact_and_ours(replicas: int) -> list[Any]:
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


@on_ranks
def test_what_saved_activations_do_not_go_with():
    def training(degree: int, checkpointing: str = "") -> Any:
        def change(settings: Any) -> None:
            settings.parallelism.tensor_parallel_degree = degree
            settings.parallelism.pipeline_parallel_degree = 2 // degree
            if checkpointing:
                kinds = titan_module("distributed.activation_checkpoint")
                settings.activation_checkpoint = getattr(kinds, checkpointing).Config()
            settings.model_spec = low_bit(settings.model_spec, LowBitConfig(activations=LayerAware()))

        return lambda: trained(change)

    selective = r"activation_checkpoint is SelectiveAC.Config.*; allowed: FullAC.Config\(\) or None$"
    refused(
        (training(1, "SelectiveAC"), ValueError, selective),
        (training(2), ValueError, "^tensor_parallel_degree is 2; allowed with low-bit activations: 1$"),
    )


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


def test_wrong_settings_specs_and_functions_are_refused():
    spec = titan_module("models.llama3").model_registry("debugmodel")
    gradients = LowBitConfig(gradients=BlockFloat8())
    once = low_bit(spec, gradients)
    assert once.model is spec.model
    plain = low_bit(spec, LowBitConfig(forward=None))
    assert (plain.pipelining_fn, plain.parallelize_fn) == (spec.pipelining_fn, spec.parallelize_fn)

    def config(**wrong: Any) -> Any:
        return lambda: LowBitConfig(**wrong)

    no_stages = r"^build_none made stages of object; allowed: .* the name PipelineStage"
    refused(
        (config(forward="int4"), TypeError, "forward is 'int4'; allowed: a codec"),
        (config(backward={0: 4}), TypeError, "backward is 4; allowed: a codec"),
        (config(forward=None, backward=EXACT), ValueError, "allowed where forward is None: None"),
        (config(forward=AQSGD()), ValueError, "forward is AQSGD.* needs the ids of samples"),
        (config(warmup_steps=-1), ValueError, "warmup_steps is -1"),
        (config(gradients=TransformQuant()), TypeError, "it cannot be summed"),
        (config(activations=4), TypeError, "activations is 4; allowed: a LayerAware"),
        (config(timeout=0), ValueError, "timeout is 0"),
        (config(checksums=1), TypeError, "checksums is 1"),
        (lambda: low_bit(once, gradients), ValueError, "parallelize_llama is low-bit already"),
        (lambda: low_bit(low_bit(spec)), ValueError, "pipeline_llm is low-bit already"),
        (lambda: low_bit(spec.model), TypeError, "spec is Config; allowed: torchtitan.protocols"),
        (pipelining_fn(build_none), ValueError, no_stages),
    )


def test_another_torchtitan_is_one_error(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.delattr(titan_module("distributed.pipeline_parallel"), "PipelineStage")
        with pytest.raises(EngineError, match=r"has no torchtitan.distributed.pipeline_parallel.PipelineStage; lowbit"):
            importlib.reload(titan)
    importlib.reload(titan)
