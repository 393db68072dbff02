"""Real ranks over real sockets: the same logits on all of them, and the same as in one process, bit by bit."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lowbit.codecs import FeatureInt, GroupInt
from lowbit.collectives import AgreementError
from lowbit.tensor_parallel import (
    Calibration,
    CalibrationError,
    Drift,
    LowBitRowwiseParallel,
    SumSettings,
    Thresholds,
    calibrate,
    emulate_tensor_parallel_,
    low_bit_,
    low_bit_styles,
    tensor_parallel_,
)
from tests.lowbit.tensor_parallel.models import INT8, ONE, VOCAB, WIDTH, Toy, ids, llama, logits, sequences
from tests.lowbit.tensor_parallel.moe import cut, moe
from tests.processes import Ranks, on_ranks
from tests.refused import refused

TWO = SumSettings(small=0, algorithm="two_shot")
SMALL = SumSettings(small=1 << 20)
BUDGET = 5.0
PLAN = {"up": "colwise", "down": "rowwise"}


def on_real_ranks(folder: str, dtype: torch.dtype) -> dict[str, Any]:
    """What one of them computes."""
    model = tensor_parallel_(Toy().to(dtype))
    fingerprint, whole = calibrate(model, sequences(), bits=BUDGET).fingerprint(), logits(model, ids())
    loaded = [Calibration.load(Path(folder) / name) for name in ("calibration", "with_inputs")]
    coded = computed(model, partial(low_bit_, model), *loaded, dist.group.WORLD)
    assert torch.equal(logits(model, ids()), whole)  # removed without a trace
    return {"fingerprint": fingerprint, "whole": whole} | coded


def in_one_process(ranks: int, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    model = Toy().to(dtype)
    calibration = calibrate(model, sequences(), ranks=ranks, bits=None)
    calibration.save(folder / "calibration")
    with_inputs = calibrate(model, sequences(), ranks=ranks, bits=BUDGET)
    assert with_inputs.inputs
    with_inputs.save(folder / "with_inputs")
    with emulate_tensor_parallel_(model, ranks):
        whole = logits(model, ids())
    coded = computed(model, partial(emulate_tensor_parallel_, model, ranks), calibration, with_inputs)
    return {"fingerprint": with_inputs.fingerprint(), "whole": whole} | coded


def computed(
    model: nn.Module, install: Any, calibration: Any, with_inputs: Any, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Logits and traffic with several formats and settings, and what a monitor of one of them reports."""
    drift, results = Drift(every=1), dict[str, Any]()
    for name, source, settings, watching in (
        ("one", calibration, ONE, None), ("two", calibration, TWO, drift), ("small", calibration, SMALL, None),
        ("int8", INT8, TWO, None), ("inputs", with_inputs, ONE, None),
    ):  # fmt: skip
        with install(source, settings=settings, drift=watching) as installed:
            results[name] = logits(model, ids())
        traffic = installed.traffic  # of the embedding only emulated ranks count any: `tensor_parallel_` keeps it whole
        results[f"{name} traffic"] = traffic.coded, traffic.coded_bytes, traffic.algorithms
    return results | {"drift": drift.report(group).rows}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return repr(a) == repr(b)  # a NaN among the numbers is one on both sides


@pytest.mark.parametrize(("count", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_real_ranks_compute_what_one_process_emulates(ranks: Ranks, count: int, dtype: torch.dtype, tmp_path: Path):
    emulated = in_one_process(count, dtype, tmp_path)
    # PyTorch's all-reduce among more than two ranks adds up in another order than one process does.
    uncoded = () if count == 2 else ("fingerprint", "whole", "small")
    first, *others = ranks.run(on_real_ranks, str(tmp_path), dtype, ranks=count)
    different = [key for key, value in emulated.items() if key not in uncoded and not same(value, first[key])]
    assert not different
    for key in ("whole", "small"):
        torch.testing.assert_close(first[key], emulated[key])
    for rank, other in enumerate(others, 1):
        different = [key for key, value in first.items() if not same(value, other[key]) and key != "drift"]
        assert not different, f"rank {rank} of {count}"
    assert torch.equal(emulated["whole"], emulated["small"])
    assert not torch.equal(emulated["whole"], emulated["one"])
    assert not torch.equal(emulated["one"], emulated["two"])


def unknown_style() -> None:
    from transformers.distributed import tensor_parallel

    class Scattered(tensor_parallel.MoeExpertsParallel):
        """Returns something else."""

    model = cut(moe("mixtral"))
    experts = model.model.layers[1].mlp.experts
    del experts.forward
    Scattered().install_forward(experts, experts.down_proj.device_mesh)
    low_bit_(model, INT8)


def no_style() -> None:
    model = cut(moe("mixtral"))
    del model.model.layers[0].mlp.experts.forward
    low_bit_(model, INT8)


class Linear8bitLt(nn.Linear):
    __module__ = "bitsandbytes.nn.modules"


def of_bitsandbytes() -> None:
    model = llama()
    model.model.layers[0].mlp.down_proj.__class__ = Linear8bitLt
    low_bit_(cut(model), INT8)


def refusals(path: str) -> list[str]:
    rank, nothing, own = dist.get_rank(), cast(Any, None), f"{WIDTH} features, float32"

    def coded(source: Any, model: nn.Module | None = None, **settings: Any) -> nn.Module:
        model = tensor_parallel_(model or Toy())
        low_bit_(model, source, settings=SumSettings(**settings))
        return model

    def install(*args: Any, **settings: Any) -> Callable[[], object]:
        return partial(coded, *args, **settings)

    def thresholds(ranks: int, bits: int) -> Thresholds:
        return Thresholds(ranks=ranks, steps={f"{own}, {bits} bits": ()}, milliseconds={}, mbit=1.0, date="")

    def calibrated(seed: int = 7, momentum: float = 0.9) -> Callable[[], object]:
        return lambda: calibrate(tensor_parallel_(Toy()), sequences(1, seed=seed), momentum=momentum)

    another = r"for the model Toy \[.*this is Toy \["
    return refused(
        (install(path + ".not-there" if rank else path), AgreementError, r"Calibration \[.*none \(.*not-there.*rank 1"),
        (install(nothing if rank else path), AgreementError, r"Calibration \[.*none \(codec is None"),
        (calibrated(seed=rank), AgreementError, "sequences: .*on rank 0.*on rank 1"),
        (calibrated(momentum=0.9 + 0.2 * rank), AgreementError, r"momentum: .*no \(momentum is 1.1"),
        (install(path, small=rank), AgreementError, "small=0.*small=1"),
        (install(path, Toy(seed=1)), CalibrationError, another),
        (install(path, Toy().half()), CalibrationError, another),
        (lambda: coded(path, small=0)(ids()), RuntimeError, "layers.0.attn.*no_grad"),
        (lambda: tensor_parallel_(tensor_parallel_(Toy())), ValueError, "already"),
        (lambda: tensor_parallel_(llama(key_value_heads=1)), ValueError, "num_key_value_heads 1; allowed: a divisor"),
        (
            lambda: low_bit_(coded(path, small=0), path), ValueError,
            r"layers.0.attn.o adds up .* in few bits already.*remove\(\)",
        ),
        (install(INT8, small=thresholds(2, 4)), ValueError, f"{own}, 4 bits; allowed: for 2 ranks and {own}, 8 bits"),
        (install(INT8, small=thresholds(4, 8)), ValueError, f"for 4 ranks and {own}, 8 bits; allowed: for 2 ranks and"),
        (
            lambda: low_bit_(cut(moe("mixtral"), "experts", "all_to_all"), INT8), ValueError,
            r"0.mlp.experts \(MixtralExperts\) sends tokens to the ranks of their experts \(AllToAllEP\)",
        ),
        (unknown_style, ValueError, r"1.mlp.experts \(MixtralExperts\) has the tensor-parallel style Scattered"),
        (no_style, ValueError, r"0.mlp.experts \(MixtralExperts\) has the parameter gate_up_proj cut over ranks, but"),
        (of_bitsandbytes, ValueError, "model.layers.0.mlp.down_proj is Linear8bitLt of bitsandbytes"),
    )  # fmt: skip


def test_all_ranks_raise_the_same_before_the_first_token(ranks: Ranks, tmp_path: Path):
    path = tmp_path / "calibration.safetensors"
    calibrate(Toy(), sequences(2), ranks=2).save(path)
    first, second = ranks.run(refusals, str(path))
    assert first == second


def pair() -> tuple[Any, Any]:
    """A model, and a calibration of its only sum."""
    torch.manual_seed(2)
    layers = {"embed": nn.Embedding(VOCAB, WIDTH), "up": nn.Linear(WIDTH, 96), "act": nn.ReLU()}
    model = nn.Sequential(OrderedDict(**layers, down=nn.Linear(96, WIDTH), norm=nn.LayerNorm(WIDTH)))
    return model, calibrate(model, sequences(), ranks=2, plan=PLAN)


@on_ranks
def test_pytorch_styles() -> None:
    mesh, drift = init_device_mesh("cpu", (2,)), Drift(every=1)
    model, calibration = pair()
    codec = calibration.codec("down")
    assert isinstance(codec, FeatureInt)
    with torch.no_grad():
        full = model(ids())
        with emulate_tensor_parallel_(model, 2, calibration, plan=PLAN, settings=ONE):
            emulated = model(ids())
        assert not torch.equal(emulated, full)
        by_name = {"up": ColwiseParallel(), **low_bit_styles(calibration, mesh, settings=ONE, drift=drift)}
        assert torch.equal(parallelize_module(model, mesh, by_name)(ids()), emulated)
        assert [(row.layer, row.samples) for row in drift.report().rows] == [("down", 1)]
        whole_input = {
            "embed": LowBitRowwiseParallel(codec, input_layouts=Replicate()),
            "down": LowBitRowwiseParallel(codec, settings=ONE, input_layouts=Replicate(), use_local_output=False),
        }
        module: Any = parallelize_module(pair()[0], mesh, whole_input)
        output = module.down(module.up(module.embed(ids())).relu())
        assert isinstance(output, DTensor)
        assert torch.equal(module.norm(output.to_local()), emulated)
    for style, module, error in (
        (LowBitRowwiseParallel(codec), nn.LayerNorm(4), "is LayerNorm"),
        (LowBitRowwiseParallel(codec), nn.Linear(8, 4), "has 2 ranks and 4 features"),
        (LowBitRowwiseParallel(GroupInt(bits=4 + 4 * dist.get_rank())), nn.Linear(8, 4), "do not agree"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=error):
            parallelize_module(module, mesh, style)
    with pytest.raises(ValueError, match="output_layouts"):
        LowBitRowwiseParallel(codec, output_layouts=Shard(1))


@on_ranks
def test_weights_that_change_after_they_were_gathered_are_noticed():
    """Layers that send inputs compute with whole weights, of which each rank has a copy."""
    model = tensor_parallel_(Toy())
    calibration = calibrate(model, sequences(), bits=BUDGET)
    name = next(iter(calibration.inputs))
    with low_bit_(model, calibration, settings=ONE), torch.no_grad():
        logits(model, ids())
        cast(nn.Linear, model.get_submodule(name)).weight.mul_(2)
        with pytest.raises(RuntimeError, match=f"the weight of {name} was changed after all ranks had gathered it"):
            logits(model, ids())
    with low_bit_(model, calibration, settings=ONE):
        logits(model, ids())
