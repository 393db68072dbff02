"""`lowbit.integrations.vllm` in a stand-in for vLLM, on real ranks: what is coded, what vLLM sums, what is refused."""

import contextlib
import json
import logging
import os
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.collectives import AgreementError
from lowbit.integrations import vllm as plugin
from lowbit.integrations.vllm import VllmError, VllmSettings, settings_of
from lowbit.tensor_parallel import CalibrationError, SumSettings, calibrate, low_bit_, tensor_parallel_
from lowbit.tensor_parallel.sums import real_sums
from tests.lowbit.integrations.stand_in_vllm import CompilationConfig, Metadata, VllmConfig, stand_in
from tests.lowbit.tensor_parallel.models import Toy, ids, llama, logits, sequences
from tests.processes import Ranks, on_ranks
from tests.refused import refused

INT8 = "GroupInt(bits=8, group=64)"
PREFILL, DECODE = {"layer": Metadata(9)}, {"layer": Metadata(1)}


@contextlib.contextmanager
def served(
    build: Any, config: VllmConfig | None = None, environment: Any = None, **settings: Any
) -> Iterator[SimpleNamespace]:
    """A model whose row-wise layers vLLM built, with the plug-in; settings as `additional_config` has them."""
    config = config or VllmConfig()
    if environment is None:
        config.additional_config = {"lowbit": {"small": 0, "prefills": 0} | settings}
    with (
        mock.patch.dict(os.environ, {"LOWBIT_VLLM": "on" if environment is None else json.dumps(environment)}),
        stand_in(config) as vllm,
    ):
        plugin.register()
        plugin.register()  # vLLM may load it again
        model = built(tensor_parallel_(build()), vllm)

        def run(tokens: Tensor, metadata: Any) -> Tensor:
            with vllm.forward_context.set_forward_context(metadata, config):
                return logits(model, tokens)

        run(ids(), None)  # vLLM's trial run
        yield SimpleNamespace(
            model=model, run=run, group=vllm.parallel_state.get_tp_group(), sums=plugin.row_sums(),
            context=vllm.forward_context.set_forward_context,
        )  # fmt: skip


def built(model: nn.Module, vllm: Any) -> nn.Module:
    """Let vLLM build the row-wise layers of a model on real ranks."""
    for name, summed in real_sums(model).items():
        layer: Any = summed.module
        new = vllm.linear.RowParallelLinear(
            layer.in_features, layer.out_features, layer.bias is not None, params_dtype=layer.weight.dtype, prefix=name,
            return_bias=False,
        )  # fmt: skip
        with torch.no_grad():
            new.weight.copy_(layer.weight.to_local())
            if layer.bias is not None:
                new.bias.copy_(layer.bias)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    return model


def even() -> Any:
    return Toy(inner=128)  # vLLM's layers have inputs that the ranks divide evenly


def two_ways(path: str) -> Tensor:
    """Logits of a prefill. They are those of `low_bit_` with the same calibration, those of decoding without it.

    The calibration lets layers send their inputs, which vLLM's layers do not: they send sums.
    """
    calibration, settings = calibrate(even(), sequences(), ranks=dist.get_world_size()), SumSettings(small=0)
    if dist.get_rank() == 0:
        calibration.save(path)
    dist.barrier()
    model = tensor_parallel_(even())
    plain = logits(model, ids())
    assert calibration.inputs
    with low_bit_(model, calibration.summed(), settings=settings):
        coded = logits(model, ids())
    with served(even, calibration=path) as engine:
        before = engine.group.sums
        prefill = engine.run(ids(), PREFILL)
        assert engine.group.sums == before, "vLLM made no sum of the prefill"
        assert engine.sums.traffic.coded == 4 * ids().numel() * 64
        decode = engine.run(ids(), DECODE)
    torch.testing.assert_close(prefill, coded)  # the bias is added in another place
    torch.testing.assert_close(decode, plain)
    assert not torch.allclose(prefill, plain, atol=1e-4)
    return prefill


@pytest.mark.parametrize("count", [2, 4])
def test_prefills_have_the_sums_of_low_bit_and_decoding_those_of_vllm(ranks: Ranks, count: int, tmp_path: Path):
    first, *others = ranks.run(two_ways, str(tmp_path / "calibration"), ranks=count)
    assert all(torch.equal(each, first) for each in others)


METADATA = [
    (PREFILL, True),
    ([PREFILL, DECODE], True),
    (DECODE, False),
    (None, False),
    ({}, False),
    ({"layer": SimpleNamespace()}, False),
    ({"layer": SimpleNamespace(num_prefills=1)}, True),
    ({"layer": SimpleNamespace(num_prefills=0, max_query_len=3)}, False),
]


def own_sums(engine: Any, metadata: Any = PREFILL) -> int:
    """How many sums vLLM makes itself in a run."""
    before = engine.group.sums
    engine.run(ids(), metadata)
    return engine.group.sums - before


@on_ranks
def test_what_vllm_sums_itself():
    with served(llama, environment={"format": INT8, "small": 0, "prefills": 0}) as engine:
        for metadata, coded in METADATA:
            assert own_sums(engine, metadata) == (0 if coded else 4), metadata
    for large in ({"small": 1 << 20}, {"prefills": 1}):
        with served(llama, format=INT8, **large) as engine:
            assert own_sums(engine) == 4, large
    speculative = VllmConfig(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    with served(llama, speculative, format=INT8) as engine:
        assert [own_sums(engine, {"layer": Metadata(rows)}) for rows in (4, 5)] == [4, 0]
    experts = VllmConfig(compilation_config=CompilationConfig(static_all_moe_layers=["experts"]))
    with served(llama, experts, format=INT8, experts="engine") as engine:
        assert own_sums(engine) == 0, "other sums are coded beside expert layers"


@pytest.mark.parametrize(("bits", "lost"), [(8, False), (2, True)])
@on_ranks
def test_layers_are_checked_in_the_first_prefill(bits: int, lost: bool):
    """It is exact; layers over the limit stay with vLLM."""
    settings = {"format": f"GroupInt(bits={bits}, group=64)", "prefills": 1, "check": 0.05}
    with mock.patch.object(logging.getLogger("vllm.lowbit"), "handle") as handle, served(llama, **settings) as engine:
        logging.getLogger("vllm.lowbit").setLevel(logging.INFO)
        first, plain = engine.run(ids(), PREFILL), engine.run(ids(), DECODE)
        assert torch.equal(first, plain)
        assert torch.equal(engine.run(ids(), PREFILL), plain) == lost
        assert own_sums(engine) == (4 if lost else 0)
        messages = [call.args[0].getMessage() for call in handle.call_args_list]
        if lost:
            assert sum("more than 5 % (check): vLLM sums this layer itself" in text for text in messages) == 4
        else:
            assert all(0 < error < 0.02 for error in engine.sums.errors.values())
            assert any("4 layers checked" in text for text in messages) == (dist.get_rank() == 0), "once in a log"


@on_ranks
def test_two_models_of_a_process_keep_their_formats():
    """Such as a model and the one that drafts for it, whose layers have the same names."""
    with served(llama, format=INT8) as engine:
        before = engine.run(ids(), PREFILL)
        with served(llama, format="GroupInt(bits=2, group=64)") as other:
            assert not torch.equal(other.run(ids(), PREFILL), before)
            assert torch.equal(engine.run(ids(), PREFILL), before)


@on_ranks
def test_the_check_is_told_although_a_layer_never_sums_a_prefill():
    """As the encoder of images, which vLLM runs outside of its batches."""
    with (
        mock.patch.object(logging.getLogger("vllm.lowbit"), "handle") as handle,
        served(llama, format=INT8, prefills=1) as engine,
    ):
        logging.getLogger("vllm.lowbit").setLevel(logging.INFO)
        own, encoder = engine.sums.sum, next(iter(engine.sums.layers))
        engine.sums.sum = lambda x, name: engine.sums._whole(x) if name == encoder else own(x, name)
        for metadata in (PREFILL, DECODE, {"layer": Metadata(9)}):
            engine.run(ids(), metadata)
        told = [call.args[0].getMessage() for call in handle.call_args_list][1:]
        expected = [
            "lowbit: 3 layers checked: ",
            f"lowbit: vLLM has summed {encoder} itself so far: no prefill was there",
        ]
        assert len(told) == 2 * (dist.get_rank() == 0)
        assert all(text.startswith(start) for text, start in zip(told, expected, strict=False))


@on_ranks
def test_a_batch_of_nan_or_zeros_is_no_check():
    for first_row, checked in ((float("nan"), 0), (0.0, 3)):
        model = llama()
        with torch.no_grad():
            weight = model.model.layers[0].self_attn.o_proj.weight
            weight[0], weight[1:] = first_row, 0.0
        with served(lambda model=model: model, format=INT8, prefills=1) as engine:
            engine.run(ids(), PREFILL)
            first, *others = engine.sums.errors.values()
            assert first != first
            assert sum(error == error for error in others) == checked


@mock.patch.dict(os.environ, {"LOWBIT_VLLM": json.dumps({"format": INT8})})
def set_twice() -> None:
    settings_of(VllmConfig(additional_config={"lowbit": {"format": "GroupInt(bits=4, group=64)"}}))


@mock.patch.dict(os.environ, {"LOWBIT_VLLM": json.dumps({"format": INT8})})
def another_plug_in() -> None:
    with stand_in(VllmConfig()) as vllm:
        vllm.custom_op.PluggableLayer.register_oot(name="RowParallelLinear")(type("Another", (), {}))
        plugin.register()


def refusals(path: str) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for ranks in (world, 2 * world):
            calibrate(even(), sequences(), ranks=ranks).save(f"{path}{ranks}")
    dist.barrier()

    def serving(build: Any = llama, config: VllmConfig | None = None, **settings: Any) -> Any:
        def act() -> None:
            with served(build, config, **settings) as engine:
                engine.run(ids(), PREFILL)

        return act

    experts = VllmConfig(compilation_config=CompilationConfig(static_all_moe_layers=["model.layers.0.mlp.experts"]))
    lora = VllmConfig(lora_config=SimpleNamespace())
    over = r"more than 5 % \(check\); allowed: a calibration on text like this"
    return refused(
        (serving(even, calibration=f"{path}4"), CalibrationError, "is for 4 ranks, and vLLM has 2 tensor-parallel"),
        (serving(calibration=f"{path}2"), CalibrationError, "layers.1.attn.o and 1 more, which vLLM does"),
        (serving(calibration=path), CalibrationError, "No such file"),
        (serving(config=experts, format=INT8), VllmError, "sums the expert layers model.layers.0.mlp.experts itself"),
        (serving(config=lora, format=INT8), VllmError, "LoRA layers sum in the model's dtype by themselves"),
        (serving(format=INT8, timeout=30.0 + rank), AgreementError, "settings"),
        (set_twice, VllmError, r"LOWBIT_VLLM and additional_config\['lowbit'\] differ"),
        (serving(format="GroupInt(bits=2, group=64)", prefills=1, check=0.05, over="refuse"), VllmError, over),
        (another_plug_in, VllmError, "Another has replaced RowParallelLinear of vLLM already"),
    )  # fmt: skip


def test_what_does_not_go_together_is_one_error_on_all_ranks(ranks: Ranks, tmp_path: Path):
    first, second = ranks.run(refusals, str(tmp_path / "calibration"))
    assert first == second


@on_ranks
def test_a_layer_is_one_graph_for_the_compiler():
    with served(llama, format=INT8) as engine:
        layer = engine.model.model.layers[0].self_attn.o_proj
        rows = [torch.randn(rows, 64 // dist.get_world_size()) for rows in (7, 9)]
        assert torch._dynamo.explain(layer.forward)(rows[0]).graph_break_count == 0
        fast = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        for x in rows:
            with torch.no_grad(), engine.context(PREFILL, None):
                assert torch.equal(fast(x), layer(x))


@mock.patch.dict(os.environ, {"LOWBIT_VLLM": json.dumps({"format": INT8})})
def test_settings_are_part_of_vllms_key_of_compiled_graphs():
    config = VllmConfig()
    assert settings_of(config).sums() == SumSettings()
    assert config.additional_config["lowbit"]["format"] == INT8


def test_wrong_settings_are_refused_before_a_model_is_loaded():
    def register(given: str) -> Any:
        return mock.patch.dict(os.environ, {"LOWBIT_VLLM": given})(plugin.register)

    def settings(**given: Any) -> Any:
        return lambda: VllmSettings.of({"format": INT8} | given, "LOWBIT_VLLM")

    wrong, no_vllm = "LOWBIT_VLLM cannot be used: ", "has no vllm.model_executor.custom_op: .*; lowbit was written"
    refused(
        (register("nonsense"), ValueError, "LOWBIT_VLLM is 'nonsense'; allowed: a JSON object with calibration"),
        (register('{"bits": 4}'), ValueError, r"LOWBIT_VLLM is \{'bits': 4\}; allowed: a JSON object"),
        (register("{}"), ValueError, "calibration is '' and format is ''; allowed: one of them"),
        (register('{"format": "bf16", "check": 0}'), ValueError, "check is 0; allowed: a number above 0"),
        (register('{"format": "bf16", "over": "stop"}'), ValueError, "over is 'stop'"),
        (register(json.dumps({"format": INT8})), VllmError, f"{no_vllm} for vLLM 0.32 and 0.33"),
        (settings(format="int5x"), ValueError, f"{wrong}codec is 'int5x'; did you mean int5"),
        (settings(small="never"), ValueError, f"{wrong}small is 'never'; allowed"),
        (settings(algorithm="ring"), ValueError, f"{wrong}algorithm is 'ring'; allowed"),
        (settings(timeout=0), ValueError, f"{wrong}timeout is 0; allowed"),
    )


def test_vllm_finds_the_plug_in_which_does_nothing_unless_asked_to():
    assert "LOWBIT_VLLM" not in os.environ
    plugin.register()  # there is no vLLM to import
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    assert EntryPoint("lowbit", value, "vllm.general_plugins").load() is plugin.register


@on_ranks
def test_thresholds_are_measured_in_the_trial_run_and_agreed():
    with served(llama, format=INT8, small="auto") as engine:
        measured = str(engine.sums.layers["model.layers.0.mlp.down_proj"].sum.settings.small)
    assert measured.startswith("64 features, float32, 8 bits: ")
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, measured)
    assert everywhere == [measured, measured]
