"""Sums as one operator: graphs without breaks, the engine's bytes below the thresholds, NaN, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lowbit.collectives.exchange import CollectiveExchange
from lowbit.tensor_parallel import Drift, SumSettings, calibrate, low_bit_, low_bit_styles, tensor_parallel_
from lowbit.tensor_parallel.reduce import sum_in_process, sum_on_stream
from lowbit.tensor_parallel.rowwise import LayerSum
from tests.processes import Ranks, on_ranks
from tests.tensor_parallel.models import INT8, LAYERS, ONE, WIDTH, Toy, calibrated, ids, llama, logits, sequences
from tests.tensor_parallel.test_ranks import Pair, hf_parallel

CODED = SumSettings(small=0)


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager", **options)


def without_breaks(path: str) -> dict[str, Any]:
    """Every way to install low-bit sums, compiled as one graph, and the same uncompiled."""
    results: dict[str, Any] = {}

    def compare(name: str, model: Any) -> None:
        with torch.no_grad():
            graphs = torch._dynamo.explain(model)(ids())
            results[f"{name} breaks"] = graphs.graph_break_count, graphs.graph_count
            expected, together = model(ids()), compiled(model)(ids())
        pick = (lambda y: y) if isinstance(expected, Tensor) else (lambda y: y.logits)
        results[name] = torch.equal(pick(expected), pick(together))

    toy = tensor_parallel_(Toy())
    compare("plain", toy)
    drift, watched = Drift(every=1), []
    installed = low_bit_(toy, path, settings=CODED, drift=drift)
    installed.sums[0].watch = lambda name, partials, total: watched.append(name)
    compare("toy", toy)
    results["traffic"] = dataclasses.replace(installed.traffic)
    results["drift"] = drift.report().rows[0].samples
    results["watched"] = list(watched)
    together = compiled(toy)
    coded = logits(together, ids())
    installed.remove()
    results["removed"] = torch.equal(logits(together, ids()), logits(toy, ids()))
    results["was coded"] = not torch.equal(logits(toy, ids()), coded)
    with pytest.raises(RuntimeError, match=r"for inference only, and gradients are on; allowed: .*no_grad"):
        compiled(toy)(ids())
    with low_bit_(toy, calibrate(toy, sequences(), inputs=INT8), settings=ONE):
        compare("inputs", toy)
        with pytest.raises(RuntimeError, match="for inference only"):
            toy(ids())
        results["sends inputs"] = not torch.equal(logits(toy, ids()), coded)
    hugging_face = hf_parallel(llama())
    low_bit_(hugging_face, calibrate(hugging_face, sequences()), settings=CODED)
    compare("llama", hugging_face)
    mesh = init_device_mesh("cpu", (2,))
    with torch.no_grad():
        plan = {"up": "colwise", "down": "rowwise"}
        styles = low_bit_styles(calibrate(Pair(), sequences(), ranks=2, plan=plan), mesh, settings=CODED)
    pair = parallelize_module(Pair(), mesh, {"up": ColwiseParallel(), **styles})
    with torch.no_grad():
        results["styles"] = torch.equal(compiled(pair)(ids()), pair(ids()))
    return results


@pytest.mark.slow
def test_one_graph_however_installed(ranks: Ranks, tmp_path: Path):
    path = tmp_path / "calibration.safetensors"
    calibrated().save(path)
    for results in ranks.run(without_breaks, str(path), timeout=300):
        values = 3 * ids().numel() * WIDTH  # explained, run, run compiled
        for name in ("plain", "toy", "inputs", "llama"):
            assert results[f"{name} breaks"] == (0, 1), name
            assert results[name], name
        assert all(results[name] for name in ("styles", "removed", "was coded", "sends inputs"))
        assert (results["traffic"].coded, results["traffic"].plain) == (values * len(LAYERS), 0)
        assert results["drift"] == 3
        assert results["watched"] == [LAYERS[0]] * 3


def generated() -> dict[str, Any]:
    from transformers import CompileConfig

    model = hf_parallel(llama())
    low_bit_(model, calibrate(model, sequences()), settings=CODED)
    config = CompileConfig(fullgraph=True, mode="default", backend="aot_eager")
    config._compile_all_devices = True  # without it Transformers compiles on GPUs only
    torch._dynamo.utils.counters.clear()
    prompt, options = ids(1, 4), {"max_new_tokens": 5, "do_sample": False}
    return {
        "tokens": model.generate(prompt, **options),
        "compiled": model.generate(prompt, cache_implementation="static", compile_config=config, **options),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
    }


@pytest.mark.slow
def test_generate_compiled_with_a_static_cache_equals_generate(ranks: Ranks):
    for results in ranks.run(generated, timeout=300):
        assert torch.equal(results["tokens"], results["compiled"])
        assert (results["graphs"], results["breaks"]) == (1, 0)


def operator_on_tensors() -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    layer_sum = LayerSum(
        name="layer", width=WIDTH, device=torch.device("cpu"), codec=INT8, settings=CODED, ranks=2, group=group
    )
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    before = x.clone()
    with pytest.raises(RuntimeError, match="layer is cut over ranks for inference only"):
        layer_sum([x.clone().requires_grad_()])
    torch.ops.lowbit.tp_all_reduce_(x, layer_sum.number, group.group_name)
    on_stream = before.clone()
    sum_on_stream(on_stream.view(-1), INT8, group, "two_shot", CODED)
    return {"x": before, "total": x, "on stream": on_stream}


def test_the_operator_as_such(ranks: Ranks):
    results = ranks.run(operator_on_tensors)
    parts = [r["x"] for r in results]
    for r in results:
        assert torch.equal(r["total"], sum_in_process(parts, INT8, "one_shot"))
        assert torch.equal(r["on stream"], sum_in_process(parts, INT8, "two_shot"))


@on_ranks
def test_damage_without_a_host_that_waits_is_nan() -> None:
    """A byte of what rank 1 sends changes after its checksum."""
    group = dist.group.WORLD
    assert group is not None
    send = CollectiveExchange.send

    def damaging(self: CollectiveExchange, lane: int, to: int = 0) -> None:
        checksums = self._checksums
        seal = checksums.seal_there

        def sealed(message: Tensor, *place: int) -> None:
            seal(message, *place)
            if self.rank == 1:
                message[0] ^= 1

        checksums.seal_there = sealed
        send(self, lane, to)

    x = torch.ones(2 * WIDTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CollectiveExchange, "send", damaging)
        sum_on_stream(x, INT8, group, "one_shot", CODED)
    assert x.isnan().all()


def nan_on_one_rank(path: str) -> Tensor:
    model = tensor_parallel_(Toy())
    low_bit_(model, path, settings=ONE)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.layers[0].mlp.down.weight.to_local().fill_(torch.nan)
    return logits(model, ids())


def test_nan_on_one_rank_is_nan_on_all(ranks: Ranks, tmp_path: Path):
    calibrated().save(tmp_path / "calibration")
    assert all(y.isnan().all() for y in ranks.run(nan_on_one_rank, str(tmp_path / "calibration")))
