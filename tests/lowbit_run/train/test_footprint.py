"""Predicted memory of stages: counted before loading, and compared with what is loaded."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.activations import LayerAware, LayerChoice, LayerPlan, compress_saved_
from lowbit_run.config import ConfigError
from lowbit_run.plan.cluster import Cluster, ClusterLink, Machine
from lowbit_run.plan.predict import PipelineChoice, Predictor
from lowbit_run.plan.sizes import measure_sizes
from lowbit_run.simulate.held import in_flight
from lowbit_run.train import fits
from lowbit_run.train.config import TrainConfig, from_mapping
from lowbit_run.train.cut import CUT, Share, attention_of, whole_class
from lowbit_run.train.fits import check_memory
from lowbit_run.train.footprint import BatchBytes, LayerSaves, Line, batch_meter, held_batches, model_bytes, rank_bytes
from lowbit_run.train.layout import make_layout
from lowbit_run.train.model import StageModule, next_token_loss
from lowbit_run.train.optim import make_optimizer
from lowbit_run.train.saved import rank_peaks
from lowbit_run.train.weights import build_share
from tests.lowbit_run.train.test_families import _config
from tests.refused import refused

CPU = torch.device("cpu")
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def saved(kind: str, folder: Path, **sizes: Any) -> str:
    """Save a model of this type with random weights."""
    exact = _config(kind, **{key: value for key, value in sizes.items() if key in _config(kind).to_dict()})
    whole_class(exact)._from_config(exact, attn_implementation=attention_of(exact)).save_pretrained(folder)
    return str(folder)


def settings(folder: str, **sections: dict[str, Any]) -> TrainConfig:
    model = sections.pop("model", {}) | {"pretrained": folder}
    data = {"sequence": 12, "batch": 4}
    return from_mapping({"model": model, "data": data, "pipeline": {"microbatches": 2}, **sections})


def bytes_of(model: nn.Module) -> tuple[int, int]:
    """Bytes of what is frozen, with the scales of quantized weights, and of what is trained."""
    total = [0, 0]
    for parameter in model.parameters():
        total[parameter.requires_grad] += parameter.nbytes
        if (state := getattr(parameter, "quant_state", None)) is not None:
            tables = [
                state.absmax,
                state.code,
                *([state.offset, state.state2.absmax, state.state2.code] if state.nested else []),
            ]
            total[0] += sum(table.nbytes for table in tables)
        total[0] += getattr(getattr(parameter, "SCB", None), "nbytes", 0)
    return total[0], total[1]


FORMATS = {
    "bf16": {"weights": "bf16"}, "fp32": {"weights": "fp32"}, "nf4": {"weights": "nf4"}, "int8": {"weights": "int8"},
    "double": {"weights": "nf4", "double_quantization": True}, "default": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "gpt2", "qwen3_moe"])
def test_predicted_weights_are_those_that_are_loaded(kind: str, tmp_path: Path):
    folder = saved(kind, tmp_path, **WIDE)
    for name, model in FORMATS.items():
        config = settings(folder, model=model, lora={"rank": 4})
        kept = model_bytes(config, vocab=0, autocast=torch.bfloat16)
        for ends in ({"first": True, "last": False}, {"first": False, "last": True}):
            layers = range(2) if ends["first"] else range(2, 4)
            share = Share(layers=frozenset(layers), **ends)
            own = bytes_of(build_share(config, share, vocab=0, device=CPU, autocast=torch.bfloat16))
            told = kept.stage(layers, **ends)
            spare = 2 * 2 * 32 * (told.weights > 0 and kind == "gpt2" and ends["first"])  # it loads the final norm, too
            assert own[0] - told.weights in (0, spare, 2 * spare), (name, ends)
            assert told.adapters == own[1]
            assert (told.gradients, told.optimizer) == (own[1], 2 * own[1])


def test_layers_that_differ_are_counted_one_by_one(tmp_path: Path):
    config = settings(saved("deepseek_v3", tmp_path))
    kept = model_bytes(config, vocab=0, autocast=None)
    assert kept.layers[0] != kept.layers[-1]
    for layer in range(4):
        share = Share(layers=frozenset({layer}), first=False, last=False)
        loaded = build_share(config, share, vocab=0, device=CPU, autocast=None)
        assert kept.layers[layer].weights == bytes_of(loaded)[1]


def test_8_bit_states_and_gradients_are_counted(tmp_path: Path):
    pytest.importorskip("torchao")
    config = settings(
        saved("llama", tmp_path, **WIDE), optimizer={"states": "8bit"}, gradients={"storage": "fp8"}, run={"steps": 1}
    )
    kept = model_bytes(config, vocab=0, autocast=None).stage(range(4), first=True, last=True)
    model = build_share(
        config, Share(layers=frozenset(range(4)), first=True, last=True), vocab=0, device=CPU, autocast=None
    )
    optimizer = make_optimizer(model.parameters(), config.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    held = sum(s.codes.nbytes + s.scale.nbytes if hasattr(s, "codes") else s.nbytes for s in states)
    assert kept.optimizer == held
    assert kept.gradients < kept.weights / 3


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_states_are_float32_whatever_the_weights_are(weights: str, tmp_path: Path):
    config = settings(saved("llama", tmp_path), model={"weights": weights})
    share = Share(layers=frozenset(range(4)), first=True, last=True)
    parameters = list(build_share(config, share, vocab=0, device=CPU, autocast=None).named_parameters())
    optimizer = make_optimizer(parameters, config.optimizer)
    for _, parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    assert model_bytes(config, vocab=0, autocast=None).stage(range(4), first=True, last=True).optimizer == held


def test_a_tied_embedding_is_on_both_ends_with_one_optimizer(tmp_path: Path):
    config = settings(saved("llama", tmp_path, tie_word_embeddings=True))
    kept, layout = model_bytes(config, vocab=0, autocast=None), make_layout(config.pipeline, ranks=2, layers=4)
    first, last = (kept.rank(layout, rank) for rank in range(2))
    embedding = 4 * 64 * 32
    assert kept.tied.weights == embedding
    assert first.optimizer == 2 * (first.weights - embedding)
    assert last.weights == first.weights + 4 * 32 + embedding  # the norm, and the rows as the first rank has them


def plan_of(**choice: Any) -> LayerPlan:
    return LayerPlan(stages=((LayerChoice(**choice),),))


def held_by(batch: BatchBytes, layers: Iterable[int], *, first: bool, last: bool) -> Line:
    return sum((batch.layers[layer] for layer in layers), batch.ends(first=first, last=last))


@pytest.mark.parametrize(
    ("lora", "recompute", "saves"),
    [
        (4, False, None), (4, True, None), (0, False, LayerAware()),
        (0, False, plan_of(norm=8, mlp=4, linear=4)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (0, False, None), (0, True, None), (0, False, LayerAware.published()), (4, False, LayerAware(bits=8)),
                (0, False, plan_of(checkpoint=True, input="GroupInt(bits=8, group=64)")),
            ]
        ),
    ],
)  # fmt: skip
def test_what_a_micro_batch_takes_is_what_autograd_keeps(lora: int, recompute: bool, saves: LayerSaves, tmp_path: Path):
    """With a real pass of the same stage; memory of other libraries is not seen."""
    from lowbit_run.train.footprint import _Live

    folder = saved("llama", tmp_path, num_key_value_heads=1)
    config = settings(folder, lora={"rank": lora}, activations={"checkpoint": recompute})
    batch = batch_meter(config, vocab=0, autocast=torch.bfloat16)(saves)
    for ends in ({"first": True, "last": False}, {"first": False, "last": False}, {"first": False, "last": True}):
        share = Share(layers=frozenset({1, 2, 3}), **ends)
        model = build_share(config, share, vocab=0, device=CPU, autocast=torch.bfloat16)
        stage = StageModule(model, layers=range(1, 4), **ends, autocast=torch.bfloat16)
        if saves is not None:
            plan = saves if isinstance(saves, LayerAware) else replace(saves, stages=(saves.stages[0] * 3,))
            compress_saved_(stage, plan)
        ids = torch.zeros(3, 12, dtype=torch.int64)
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with _Live(stage) as live:
            x = ids if ends["first"] else torch.randn(3, 12, 32, requires_grad=True)
            output = stage(x)  # a pipeline holds the logits, too
            result = next_token_loss(output, ids) if ends["last"] else output
            held = live.now
            result.backward(torch.ones_like(result))
        # In the middle nothing differs: grouped keys and values are not repeated, as for a mask.
        exact = not (lora or recompute or any(ends.values())) and not isinstance(saves, LayerPlan)
        assert held_by(batch, range(1, 4), **ends).of(3) == pytest.approx(held, rel=0.02 if exact else 0.12)
        if recompute:
            peak = held_by(batch, range(1, 4), **ends).of(3) + (batch.extra_last if ends["last"] else batch.extra).of(3)
            assert peak == pytest.approx(live.peak, rel=0.15)


@pytest.mark.slow
def test_experts_in_few_bits_are_counted(tmp_path: Path):
    meter = batch_meter(settings(saved("qwen3_moe", tmp_path)), vocab=0, autocast=torch.bfloat16)
    whole, coded = (meter(saves).layers[1].window for saves in (None, LayerAware()))
    assert 0 < coded < 0.5 * whole


def test_micro_batches_are_held_as_the_schedule_says():
    for schedule, expected in {"GPipe": {0: 4, 1: 4}, "1F1B": {0: 2, 1: 1}}.items():
        config = from_mapping({"pipeline": {"schedule": schedule, "microbatches": 4}})
        held = held_batches(config, make_layout(config.pipeline, ranks=2, layers=4))
        assert {stage: held.peak(stage) for stage in held.stages} == expected


WORST_APART = ["0F0", "0F1", "0F2", "0B0", "0B1", "2F0", "2F1", "2F2", "2B0", "2B1", "2B2", "0B2"]


def test_a_rank_needs_what_its_worst_moment_takes_as_a_plan_says(tmp_path: Path):
    """Its stages do not hold the most at the same time."""
    pipeline = {"schedule": "Interleaved1F1B", "stages_per_rank": 2, "microbatches": 4}
    config = settings(saved("llama", tmp_path), pipeline=pipeline)
    layout, held = make_layout(config.pipeline, ranks=2, layers=4), in_flight({0: WORST_APART})
    counts: Any = {"vocab": 0, "autocast": None}
    batch, kept = batch_meter(config, **counts), model_bytes(config, **counts).rank(layout, 0).total
    first, later = (held_by(batch(), layout.layers_of(stage), first=stage == 0, last=False).of(2) for stage in (0, 2))
    need = rank_bytes(model_bytes(config, **counts), batch, layout, 0, rows=2, held=held, saved=[[None]] * 4)
    assert need == kept + max(3 * first, first + 3 * later) + batch().extra.of(2)
    choice = PipelineChoice(schedule="Interleaved1F1B", stages_per_rank=2, microbatches=4)
    machines = tuple(Machine(name=name, tflops=1.0) for name in "ab")
    cluster, sizes = Cluster(machines, (ClusterLink(mbit=1.0),)), measure_sizes(config, **counts)
    assert Predictor(cluster, sizes, config).predict(choice).memory == tuple(rank_peaks(config, layout, **counts))


@pytest.mark.parametrize(
    ("free", "whole", "outcome"), [(1 << 40, 1 << 40, ""), (1000, 1 << 40, "warns"), (9, 1000, "refuses")]
)
def test_a_run_says_before_it_loads_whether_it_fits(
    free: int,
    whole: int,
    outcome: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(fits, "memory_of", lambda device: (free, whole))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    config = settings(saved("llama", tmp_path), lora={"rank": 4})
    layout = make_layout(config.pipeline, ranks=2, layers=4)

    def check() -> None:
        check_memory(config, layout, (None,) * layout.stages, ranks=2, vocab=64, device=CPU, autocast=torch.bfloat16)

    if outcome == "refuses":
        refused(
            (check, ConfigError, r"weights of rank 1 take 0.0 GB, this machine has 0.0 GB .* model.weights \"nf4\"")
        )
        return
    with caplog.at_level(logging.WARNING):
        check()
    assert [record.getMessage()[:40] for record in caplog.records] == (
        ["rank 1 will likely need 0.5 GB, and this"] if outcome else []
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(CUT))
def test_every_type_is_counted(kind: str, tmp_path: Path):
    config = settings(saved(kind, tmp_path))
    layout = make_layout(config.pipeline, ranks=2, layers=len(model_bytes(config, vocab=0, autocast=None).layers))
    for autocast in (None, torch.bfloat16):
        peaks = rank_peaks(config, layout, vocab=0, autocast=autocast)
        kept = model_bytes(config, vocab=0, autocast=autocast)
        assert kind == "longcat_flash" or all(peak > kept.rank(layout, rank).total for rank, peak in enumerate(peaks))
