"""Layers of experts on real ranks: every sum is coded and counted, as in one process, and near the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.codecs import GroupInt
from lowbit.tensor_parallel import (
    SumSettings,
    calibrate,
    emulate_tensor_parallel_,
    low_bit_,
    model_sums,
    tensor_parallel_,
)
from tests.processes import Failure, Ranks
from tests.tensor_parallel.models import WIDTH, ids, logits, sequences
from tests.tensor_parallel.moe import cut, moe, plan_of_case

ONE = SumSettings(small=0, algorithm="one_shot")
INT8 = GroupInt(bits=8, group=64, symmetric=True)
CASES = [
    ("mixtral", "own", 2), ("mixtral", "experts", 2), ("mixtral", "own", 4), ("qwen3_moe", "own", 2),
    ("deepseek_v2", "own", 2), ("deepseek_v3", "own", 4), ("gpt_oss", "gpt_oss", 2), ("gpt_oss", "experts", 4),
    ("llama4_text", "own", 2), ("olmoe", "own", 2),
]  # fmt: skip
SUMS = {
    "mixtral": ["self_attn.o_proj", "mlp.experts"],
    "qwen3_moe": ["self_attn.o_proj", "mlp.experts"],
    "olmoe": ["self_attn.o_proj", "mlp.experts"],
    "llama4_text": ["self_attn.o_proj", "feed_forward.experts", "feed_forward.shared_expert.down_proj"],
}
"""Of each layer of a family by its own plan."""


@pytest.fixture(autouse=True)
def one_thread():
    """As the ranks have it: matrix products may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_real_ranks(kind: str, case: str, path: str) -> dict[str, Any]:
    """What one of them computes, and how far coded sums are from the engine's, over the largest error possible."""
    model = cut(moe(kind), case)
    sums, calls = model_sums(model), {}
    hooks = [
        summed.module.register_forward_hook(lambda _, args, y, name=name: calls.update({name: (args, y.clone())}))
        for name, summed in sums.items()
    ]
    engine = logits(model, ids())
    for hook in hooks:
        hook.remove()
    with low_bit_(model, INT8, settings=ONE):
        errors = {name: _error(sums[name], *call) for name, call in calls.items()}
    calibration = calibrate(model, sequences())
    batched = calibrate(model, [torch.stack(sequences())])
    for name in calibration.features:  # one pass over all sequences sees the same extremes as one for each
        torch.testing.assert_close(
            batched.averages["low"][name], calibration.averages["low"][name], rtol=1e-4, atol=1e-5
        )
    with low_bit_(model, path, settings=ONE) as installed:
        coded = logits(model, ids())
    return {
        "engine": engine, "errors": errors, "fingerprint": calibration.fingerprint(), "coded": coded,
        "traffic": installed.traffic, "again": logits(model, ids()),
    }  # fmt: skip


def _error(summed: Any, args: tuple[Tensor, ...], engine: Tensor) -> float:
    """Of a sum in 8 bits: each rank's values are off by half a step at most, which is a 127th of the largest one."""
    if summed.partial is None:
        weight, (x,) = summed.module.weight.to_local(), args
        mine = x if x.shape[-1] == weight.shape[1] else x.chunk(dist.get_world_size(), -1)[dist.get_rank()]
        largest = (mine @ weight.mT).abs().max()
    else:
        largest = summed.partial(*args).abs().max()
    dist.all_reduce(largest)
    with torch.no_grad():
        coded = summed.module(*args)
    rounding = 1e-5 * engine.abs().max()
    return float((coded - engine).abs().max() / (largest / 127 / 2 + rounding))


@pytest.mark.parametrize(("kind", "case", "count"), CASES)
def test_every_sum_is_coded_as_in_one_process_and_near_the_engine(
    ranks: Ranks, kind: str, case: str, count: int, tmp_path: Path
):
    model = moe(kind)
    plan = plan_of_case(model, case)
    whole = logits(model, ids())
    calibration, path = calibrate(model, sequences(), ranks=count, plan=plan), tmp_path / "calibration.safetensors"
    calibration.save(path)
    with emulate_tensor_parallel_(model, count, plan=plan):
        torch.testing.assert_close(logits(model, ids()), whole, rtol=1e-4, atol=1e-4)
    with emulate_tensor_parallel_(model, count, calibration, settings=ONE, plan=plan) as emulation:
        emulated = logits(model, ids())
    assert torch.equal(logits(model, ids()), whole)  # removed without a trace
    if kind in SUMS and case == "own":
        assert list(calibration.features) == [f"model.layers.{i}.{name}" for i in range(2) for name in SUMS[kind]]
    for real in ranks.run(on_real_ranks, kind, case, str(path), ranks=count):
        if count == 2:  # among more, PyTorch's all-reduce adds up in another order than one process does
            assert real["fingerprint"] == calibration.fingerprint()
        assert torch.equal(real["coded"], emulated)
        assert not torch.equal(real["coded"], real["engine"])
        assert torch.equal(real["again"], real["engine"])
        assert real["traffic"] == emulation.traffic
        assert real["traffic"].plain in (0, ids().numel() * WIDTH)  # of the embedding
        assert real["errors"].keys() == calibration.features.keys()
        if case != "gpt_oss":  # whose last bias the engine adds once a rank
            assert max(real["errors"].values()) <= 1, real["errors"]
            torch.testing.assert_close(real["engine"], whole, rtol=1e-4, atol=1e-4)


def dispatched() -> None:
    low_bit_(cut(moe("mixtral"), "experts", "all_to_all"), INT8)


def unknown() -> None:
    """A style that is not of Transformers."""
    from transformers.distributed import tensor_parallel

    class Scattered(tensor_parallel.MoeExpertsParallel):
        """Returns something else."""

    model = cut(moe("mixtral"), "own")
    experts = model.model.layers[1].mlp.experts
    del experts.forward
    mesh = experts.down_proj.device_mesh
    Scattered().install_forward(experts, mesh)
    low_bit_(model, INT8)


def bare() -> None:
    model = cut(moe("mixtral"), "own")
    del model.model.layers[0].mlp.experts.forward
    low_bit_(model, INT8)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            dispatched,
            "0.mlp.experts (MixtralExperts) sends tokens to the ranks of their experts (AllToAllEP)",
        ),
        (unknown, "1.mlp.experts (MixtralExperts) has the tensor-parallel style Scattered"),
        (
            bare,
            "0.mlp.experts (MixtralExperts) has the parameter gate_up_proj cut over ranks, and no style",
        ),
    ],
)
def test_an_unknown_layout_is_refused_by_name(ranks: Ranks, function: Any, text: str):
    for outcome in ranks.outcomes(function):
        assert isinstance(outcome, Failure)
        assert (outcome.kind, outcome.text.startswith(f"model.layers.{text}")) == ("ValueError", True), outcome.text


def test_a_plan_that_does_not_fit_is_refused_by_name():
    model = moe("mixtral")
    experts = "model.layers.*.mlp.experts"
    plan = {f"{experts}.gate_up_proj": "packed_colwise", f"{experts}.down_proj": "rowwise"}
    with pytest.raises(ValueError, match=r"experts.gate_up_proj has the style 'packed_colwise', and .*none that says"):
        model_sums(model, plan)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj has size 192 and is cut over 5 ranks"):
        emulate_tensor_parallel_(model, 5, plan={**plan, experts: "moe_tp_experts"})
    model.model.layers[0].mlp.experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match=r"normalizes each expert's output"):
        model_sums(model)


def in_memory(kind: str, case: str) -> Tensor:
    """What `tensor_parallel_` cuts, with all sums coded."""
    model = moe(kind)
    tensor_parallel_(model, plan=plan_of_case(model, case))
    with low_bit_(model, INT8, settings=ONE):
        return logits(model, ids())


@pytest.mark.parametrize(("kind", "case"), [("qwen3_moe", "own"), ("gpt_oss", "gpt_oss"), ("gpt_oss", "experts")])
def test_a_model_in_memory_is_cut_the_same_way(ranks: Ranks, kind: str, case: str):
    model = moe(kind)
    with emulate_tensor_parallel_(model, 2, INT8, settings=ONE, plan=plan_of_case(model, case)):
        emulated = logits(model, ids())
    for real in ranks.run(in_memory, kind, case):
        assert torch.equal(real, emulated)
