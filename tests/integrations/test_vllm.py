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
from lowbit.integrations.vllm import VllmError, VllmSettings, has_prefill, settings_of
from lowbit.tensor_parallel import CalibrationError, SumSettings, calibrate, low_bit_, tensor_parallel_
from lowbit.tensor_parallel.sums import real_sums
from tests.integrations.stand_in_vllm import CompilationConfig, Metadata, VllmConfig, stand_in
from tests.processes import Ranks
from tests.refused import refused
from tests.tensor_parallel.models import Toy, ids, llama, logits, sequences

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
        yield SimpleNamespace(model=model, run=run, group=vllm.parallel_state.get_tp_group(), sums=plugin.row_sums())


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


def two_ways(path: str) -> dict[str, Any]:
    """Logits of the plug-in, and of `low_bit_` with the same calibration, for prefills and for decoding."""
    calibration, settings = calibrate(even(), sequences(), ranks=dist.get_world_size()), SumSettings(small=0)
    if dist.get_rank() == 0:
        calibration.save(path)
    dist.barrier()
    model = tensor_parallel_(even())
    plain = logits(model, ids())
    with low_bit_(model, path, settings=settings):
        coded = logits(model, ids())
    with served(even, calibration=path) as engine:
        before = engine.group.sums
        prefill = engine.run(ids(), PREFILL)
        own = engine.group.sums - before
        decode, known = engine.run(ids(), DECODE), engine.sums.traffic
    return {"coded": coded, "plain": plain, "prefill": prefill, "decode": decode, "own": own, "traffic": known}


@pytest.mark.parametrize("count", [2, 4])
def test_prefills_have_the_sums_of_low_bit_and_decoding_those_of_vllm(ranks: Ranks, count: int, tmp_path: Path):
    results = ranks.run(two_ways, str(tmp_path / "calibration"), ranks=count)
    for rank, each in enumerate(results):
        assert torch.equal(each["prefill"], results[0]["prefill"]), rank
        torch.testing.assert_close(each["prefill"], each["coded"])  # the bias is added in another place
        torch.testing.assert_close(each["decode"], each["plain"])
        assert not torch.allclose(each["prefill"], each["plain"], atol=1e-4)
        assert each["own"] == 0, "vLLM made no sum of the prefill"
        assert each["traffic"].coded == 4 * ids().numel() * 64


def of_a_model(settings: dict[str, Any], metadata: Any, environment: bool) -> dict[str, Any]:
    given = {"prefills": 0, "small": 0} | settings
    with served(llama, environment=given) if environment else served(llama, **given) as engine:
        trial = engine.group.sums
        tokens = engine.run(ids(), metadata).argmax(-1)
        return {"sums": engine.group.sums - trial, "tokens": tokens, "errors": engine.sums.errors}


@pytest.mark.parametrize(
    ("settings", "metadata", "own"),
    [
        ({"format": INT8}, PREFILL, 0),
        ({"format": INT8}, [PREFILL, DECODE], 0),
        ({"format": INT8}, {"layer": SimpleNamespace(num_prefills=1)}, 0),
        ({"format": INT8}, {"layer": SimpleNamespace(num_prefills=0, max_query_len=3)}, 4),
        ({"format": INT8}, DECODE, 4),
        ({"format": INT8}, None, 4),
        ({"format": INT8, "small": 1 << 20}, PREFILL, 4),
        ({"format": INT8, "prefills": 1}, PREFILL, 4),
    ],
)
def test_what_vllm_sums_itself(ranks: Ranks, settings: dict[str, Any], metadata: Any, own: int):
    for rank, each in enumerate(ranks.run(of_a_model, settings, metadata, bool(own))):
        assert each["sums"] == own, rank


def checked(settings: dict[str, Any]) -> dict[str, Any]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("lowbit.vllm")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with served(llama, **settings) as engine:
            first = engine.run(ids(), PREFILL)
            before = engine.group.sums
            second = engine.run(ids(), PREFILL)
            plain = engine.run(ids(), DECODE)
            return {
                "exact": torch.equal(first, plain), "messages": messages, "own": engine.group.sums - before - 4,
                "coded": not torch.equal(second, plain), "errors": engine.sums.errors,
            }  # fmt: skip
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


def test_the_first_prefill_is_checked_and_exact(ranks: Ranks):
    for each in ranks.run(checked, {"format": INT8, "prefills": 1}):
        assert each["exact"]
        assert each["coded"]
        assert each["own"] == 0
        assert all(0 < error < 0.02 for error in each["errors"].values())
        assert any("4 layers checked" in message for message in each["messages"])


def test_layers_over_the_limit_stay_with_vllm(ranks: Ranks):
    for each in ranks.run(checked, {"format": "GroupInt(bits=2, group=64)", "prefills": 1, "check": 0.05}):
        assert each["own"] == 4
        assert not each["coded"]
        assert sum("more than 5 % (check): vLLM sums this layer itself" in text for text in each["messages"]) == 4


def not_a_number(broken: bool) -> list[float]:
    def build() -> Any:
        model = llama()
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight[0] = float("nan") if broken else 0.0
            model.model.layers[0].self_attn.o_proj.weight[1:] = 0.0
        return model

    with served(build, format=INT8, prefills=1) as engine:
        engine.run(ids(), PREFILL)
        return list(engine.sums.errors.values())


@pytest.mark.parametrize("broken", [True, False])
def test_a_batch_of_nan_or_zeros_is_no_check(ranks: Ranks, broken: bool):
    for errors in ranks.run(not_a_number, broken):
        assert errors[0] != errors[0]
        assert sum(error == error for error in errors) == (0 if broken else 3)


def over_the_limit() -> None:
    with served(llama, format="GroupInt(bits=2, group=64)", prefills=1, check=0.05, over="refuse") as engine:
        engine.run(ids(), PREFILL)


def set_twice() -> None:
    config = VllmConfig(additional_config={"lowbit": {"format": "GroupInt(bits=4, group=64)"}})
    with mock.patch.dict(os.environ, {"LOWBIT_VLLM": json.dumps({"format": INT8})}):
        settings_of(config)


def another_plug_in() -> None:
    with mock.patch.dict(os.environ, {"LOWBIT_VLLM": json.dumps({"format": INT8})}), stand_in(VllmConfig()) as vllm:
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
            with served(build, config, **settings):
                pass

        return act

    experts = VllmConfig(compilation_config=CompilationConfig(static_all_moe_layers=["model.layers.0.mlp.experts"]))
    lora = VllmConfig(lora_config=SimpleNamespace())
    return refused(
        (serving(even, calibration=f"{path}4"), CalibrationError, "is for 4 ranks, and vLLM has 2 tensor-parallel"),
        (serving(calibration=f"{path}2"), CalibrationError, "layers.1.attn.o and 1 more, which vLLM does"),
        (serving(calibration=path), CalibrationError, "No such file"),
        (serving(config=experts, format=INT8), VllmError, "sums the expert layers model.layers.0.mlp.experts itself"),
        (serving(config=lora, format=INT8), VllmError, "LoRA layers sum in the model's dtype by themselves"),
        (serving(format=INT8, timeout=30.0 + rank), AgreementError, "settings"),
        (set_twice, VllmError, r"LOWBIT_VLLM and additional_config\['lowbit'\] differ"),
        (over_the_limit, VllmError, r"more than 5 % \(check\); allowed: a calibration on text like this"),
        (another_plug_in, VllmError, "Another has replaced RowParallelLinear of vLLM already"),
    )  # fmt: skip


def test_what_does_not_go_together_is_one_error_on_all_ranks(ranks: Ranks, tmp_path: Path):
    first, second = ranks.run(refusals, str(tmp_path / "calibration"))
    assert first == second


def beside_experts() -> int:
    config = VllmConfig(compilation_config=CompilationConfig(static_all_moe_layers=["experts"]))
    with served(llama, config, format=INT8, experts="engine") as engine:
        before = engine.group.sums
        engine.run(ids(), PREFILL)
        return engine.group.sums - before


def test_other_sums_are_coded_beside_expert_layers(ranks: Ranks):
    assert ranks.run(beside_experts) == [0, 0]


def compiled() -> dict[str, Any]:
    with served(llama, format=INT8) as engine:
        layer = engine.model.model.layers[0].self_attn.o_proj
        explained = torch._dynamo.explain(layer.forward)(torch.randn(7, 64 // dist.get_world_size()))
        fast = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        context = __import__("vllm.forward_context", fromlist=["set_forward_context"]).set_forward_context
        equal = True
        for rows in (7, 9):
            x = torch.randn(rows, 64 // dist.get_world_size())
            with torch.no_grad(), context(PREFILL, None):
                equal &= torch.equal(fast(x), layer(x))
        return {"breaks": explained.graph_break_count, "equal": equal}


def test_a_layer_is_one_graph_for_the_compiler(ranks: Ranks):
    for each in ranks.run(compiled):
        assert each == {"breaks": 0, "equal": True}


def test_settings_are_part_of_vllms_key_of_compiled_graphs():
    config = VllmConfig()
    with mock.patch.dict(os.environ, {"LOWBIT_VLLM": json.dumps({"format": INT8})}):
        settings_of(config)
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
        (register(json.dumps({"format": INT8})), VllmError, f"{no_vllm} for vLLM 0.33.0"),
        (settings(format="int5x"), ValueError, f"{wrong}codec is 'int5x'; did you mean int5"),
        (settings(small="never"), ValueError, f"{wrong}small is 'never'; allowed"),
        (settings(algorithm="ring"), ValueError, f"{wrong}algorithm is 'ring'; allowed"),
        (settings(timeout=0), ValueError, f"{wrong}timeout is 0; allowed"),
    )


def test_vllm_finds_the_plug_in_which_does_nothing_unless_asked_to():
    assert "LOWBIT_VLLM" not in os.environ
    plugin.register()  # there is no vLLM to import
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    assert EntryPoint("lowbit", value, "vllm.general_plugins").load() is plugin.register


def test_metadata_tells_prefills_from_decoding():
    assert not has_prefill(None, 1)
    assert not has_prefill({}, 1)
    assert not has_prefill(DECODE, 1)
    assert has_prefill(PREFILL, 1)
    assert not has_prefill({"layer": Metadata(4)}, 4)  # with 3 speculative tokens
    assert not has_prefill({"layer": SimpleNamespace()}, 1)
    assert VllmSettings(format=INT8).sums() == SumSettings()


def measuring() -> str:
    with served(llama, format=INT8, small="auto") as engine:
        return str(engine.sums.layers["model.layers.0.mlp.down_proj"].sum.settings.small)


def test_thresholds_are_measured_in_the_trial_run_and_agreed(ranks: Ranks):
    first, second = ranks.run(measuring)
    assert first == second
    assert first.startswith("64 features, float32, 8 bits: ")
