"""Layers of experts on real ranks: every sum is coded and counted, as in one process, and near the engine's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.tensor_parallel import calibrate, emulate_tensor_parallel_, low_bit_, model_sums, tensor_parallel_
from tests.lowbit.tensor_parallel.models import INT8, ONE, WIDTH, ids, logits, on_a_rank, sequences
from tests.lowbit.tensor_parallel.moe import cut, moe, plan_of_case
from tests.processes import Ranks, on_ranks
from tests.refused import refused

CASES = [(kind, "own", 2) for kind in ("mixtral", "deepseek_v3", "llama4_text")]
CASES += [("gpt_oss", "gpt_oss", 2), ("gpt_oss", "experts", 4)]
SUMS = {
    "mixtral": ["self_attn.o_proj", "mlp.experts"],
    "llama4_text": ["self_attn.o_proj", "feed_forward.experts", "feed_forward.shared_expert.down_proj"],
}
"""Of each layer of a family by its own plan."""


def on_real_ranks(kind: str, case: str, path: str) -> dict[str, Any]:
    model = cut(moe(kind), case)
    calibration = calibrate(model, sequences())
    batched = calibrate(model, [torch.stack(sequences())])
    # One pass over all sequences sees the same extremes as one for each.
    torch.testing.assert_close(batched.averages["low"], calibration.averages["low"], rtol=1e-4, atol=1e-5)
    return on_a_rank(model, path) | {"fingerprint": calibration.fingerprint()}


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
        assert real["traffic"] == emulation.traffic
        assert real["traffic"].plain in (0, ids().numel() * WIDTH)  # of the embedding
        assert real["errors"].keys() == calibration.features.keys()
        if case != "gpt_oss":  # whose last bias the engine adds once a rank
            assert max(real["errors"].values()) <= 1, real["errors"]
            torch.testing.assert_close(real["engine"], whole, rtol=1e-4, atol=1e-4)


def test_a_plan_that_does_not_fit_is_refused_by_name():
    model = moe("mixtral")
    experts = "model.layers.*.mlp.experts"
    plan = {f"{experts}.gate_up_proj": "packed_colwise", f"{experts}.down_proj": "rowwise"}
    normed = moe("mixtral")
    normed.model.layers[0].mlp.experts.has_post_expert_norm = True
    indivisible = {**plan, experts: "moe_tp_experts"}
    refused(
        (lambda: model_sums(model, plan), ValueError, "gate_up_proj has the style 'packed_colwise', but .*has none"),
        (lambda: emulate_tensor_parallel_(model, 5, plan=indivisible), ValueError, "size 192 and is cut over 5 ranks"),
        (lambda: model_sums(normed), ValueError, "normalizes each expert's output"),
    )


@pytest.mark.parametrize(("kind", "case"), [("qwen3_moe", "own"), ("gpt_oss", "gpt_oss")])
@on_ranks
def test_a_model_in_memory_is_cut_the_same_way(kind: str, case: str) -> None:
    model = moe(kind)
    plan = plan_of_case(model, case)
    with emulate_tensor_parallel_(model, 2, INT8, settings=ONE, plan=plan):
        emulated = logits(model, ids())
    low_bit_(tensor_parallel_(model, plan=plan), INT8, settings=ONE)
    assert torch.equal(logits(model, ids()), emulated)
