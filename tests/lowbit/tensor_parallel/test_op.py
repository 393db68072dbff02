"""Sums as one operator: graphs without breaks, the engine's bytes below the thresholds, NaN, and what is refused."""

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
from lowbit.wire.pytorch import default_group
from tests.lowbit.tensor_parallel.models import INT8, LAYERS, ONE, WIDTH, Toy, calibrated, ids, llama, logits, sequences
from tests.lowbit.tensor_parallel.moe import cut
from tests.lowbit.tensor_parallel.test_ranks import pair
from tests.processes import on_ranks

CODED = SumSettings(small=0)


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.slow
@on_ranks
def test_one_graph_however_installed() -> None:
    def compare(model: Any) -> None:
        with torch.no_grad():
            graphs = torch._dynamo.explain(model)(ids())
        assert (graphs.graph_break_count, graphs.graph_count) == (0, 1)
        assert torch.equal(logits(model, ids()), logits(compiled(model), ids()))

    toy = tensor_parallel_(Toy())
    compare(toy)
    drift, watched = Drift(every=1), []
    installed = low_bit_(toy, calibrated(), settings=CODED, drift=drift)
    assert [line.split()[0] for line in str(installed).splitlines()] == ["layer", *LAYERS]
    assert "  FeatureInt" in str(installed)
    installed.sums[0].watch = lambda name, partials, total: watched.append(name)
    compare(toy)
    values = 3 * ids().numel() * WIDTH  # explained, run, run compiled
    assert (installed.traffic.coded, installed.traffic.plain) == (values * len(LAYERS), 0)
    assert drift.report().rows[0].samples == 3
    assert watched == [LAYERS[0]] * 3
    together = compiled(toy)
    coded = logits(together, ids())
    installed.remove()
    assert torch.equal(logits(together, ids()), logits(toy, ids()))
    assert not torch.equal(logits(toy, ids()), coded)
    with pytest.raises(RuntimeError, match=r"for inference only, and gradients are on; allowed: .*no_grad"):
        compiled(toy)(ids())
    with low_bit_(toy, calibrate(toy, sequences(), inputs=INT8), settings=ONE) as installed:
        assert str(installed).count("  inputs, GroupInt") == 2
        compare(toy)
        with pytest.raises(RuntimeError, match="for inference only"):
            toy(ids())
        assert not torch.equal(logits(toy, ids()), coded)
    hugging_face = cut(llama())
    low_bit_(hugging_face, calibrate(hugging_face, sequences()), settings=CODED)
    compare(hugging_face)
    (model, calibration), mesh = pair(), init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), **low_bit_styles(calibration, mesh, settings=CODED)})
    assert torch.equal(logits(model, ids()), logits(compiled(model), ids()))


@pytest.mark.slow
@on_ranks
def test_generate_compiled_with_a_static_cache_equals_generate() -> None:
    from transformers import CompileConfig

    model, counters = cut(llama()), torch._dynamo.utils.counters
    low_bit_(model, calibrate(model, sequences()), settings=CODED)
    config = CompileConfig(fullgraph=True, mode="default", backend="aot_eager")
    config._compile_all_devices = True  # without it Transformers compiles on GPUs only
    counters.clear()
    prompt, options = ids(1, 4), {"max_new_tokens": 5, "do_sample": False}
    tokens = model.generate(prompt, **options)
    together = model.generate(prompt, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(tokens, together)
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)


@on_ranks
def test_the_operator_as_such() -> None:
    group = default_group()
    layer_sum = LayerSum(
        name="layer", width=WIDTH, device=torch.device("cpu"), codec=INT8, settings=CODED, ranks=2, group=group
    )
    parts = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    x, on_stream = parts[group.rank()].clone(), parts[group.rank()].clone()
    with pytest.raises(RuntimeError, match="layer is cut over ranks for inference only"):
        layer_sum([x.clone().requires_grad_()])
    torch.ops.lowbit.tp_all_reduce_(x, layer_sum.number, group.group_name)
    assert torch.equal(x, sum_in_process(parts, INT8, "one_shot"))
    sum_on_stream(on_stream.view(-1), INT8, group, "two_shot", CODED)
    assert torch.equal(on_stream, sum_in_process(parts, INT8, "two_shot"))
    for settings in (CODED, SumSettings(small=1 << 30)):
        layer_sum.settings = settings
        memory, expected = torch.zeros(3, 2 * WIDTH), parts[group.rank()].clone()
        memory[:, ::2] = expected
        with pytest.raises(ValueError, match="has elements that share memory"):
            torch.ops.lowbit.tp_all_reduce_(torch.zeros(WIDTH).expand(3, -1), layer_sum.number, group.group_name)
        for each in (memory[:, ::2], expected):
            torch.ops.lowbit.tp_all_reduce_(each, layer_sum.number, group.group_name)
        assert torch.equal(memory[:, ::2], expected)
        assert not memory[:, 1::2].any()


@on_ranks
def test_damage_without_a_host_that_waits_is_nan() -> None:
    """A byte of what rank 1 sends changes after its checksum."""
    send = CollectiveExchange.send

    def damaging(self: CollectiveExchange, lane: int, to: int = 0) -> None:
        checksums, seal = self._checksums, self._checksums.seal_there

        def sealed(message: Tensor, *place: int) -> None:
            seal(message, *place)
            if self.rank == 1:
                message[0] ^= 1

        checksums.seal_there = sealed
        send(self, lane, to)

    x = torch.ones(2 * WIDTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CollectiveExchange, "send", damaging)
        sum_on_stream(x, INT8, default_group(), "one_shot", CODED)
    assert x.isnan().all()


@on_ranks
def test_nan_on_one_rank_is_nan_on_all() -> None:
    model = tensor_parallel_(Toy().requires_grad_(False))
    low_bit_(model, calibrated(), settings=ONE)
    if dist.get_rank() == 1:
        model.layers[0].mlp.down.weight.to_local().fill_(torch.nan)
    assert logits(model, ids()).isnan().all()
