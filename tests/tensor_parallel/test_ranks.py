"""Real ranks over real sockets: the same logits on all of them, and the same as in one process, bit by bit."""

from collections.abc import Callable
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
    Traffic,
    calibrate,
    emulate_tensor_parallel_,
    low_bit_,
    low_bit_styles,
    tensor_parallel_,
)
from tests.processes import Ranks
from tests.refused import refused
from tests.tensor_parallel.models import INT8, ONE, VOCAB, WIDTH, Toy, ids, llama, logits, sequences
from tests.tensor_parallel.moe import cut, moe

TWO = SumSettings(small=0, algorithm="two_shot")
SMALL = SumSettings(small=1 << 20)
BUDGET = 5.0


def on_real_ranks(folder: str, dtype: torch.dtype) -> dict[str, Any]:
    """What one of them computes."""
    model = tensor_parallel_(Toy().to(dtype))
    results: dict[str, Any] = {
        "fingerprint": calibrate(model, sequences()).fingerprint(), "whole": logits(model, ids()),
    }  # fmt: skip
    calibration, drift = Calibration.load(Path(folder) / "calibration"), Drift(every=1)
    with_inputs = Calibration.load(Path(folder) / "with_inputs")
    for name, source, settings, watching in cases(calibration, with_inputs, drift):
        with low_bit_(model, source, settings=settings, drift=watching) as installed:
            results[name] = logits(model, ids())
        results[f"{name} traffic"] = of_layers(installed.traffic)
    assert torch.equal(logits(model, ids()), results["whole"])  # removed without a trace
    return results | {"drift": drift.report(dist.group.WORLD).rows}


def of_layers(traffic: Traffic) -> tuple[object, ...]:
    """Of what is coded: `tensor_parallel_` keeps the embedding whole, and the emulation counts it as cut."""
    return traffic.coded, traffic.coded_bytes, traffic.algorithms


def in_one_process(ranks: int, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    model = Toy().to(dtype)
    calibration, drift = calibrate(model, sequences(), ranks=ranks), Drift(every=1)
    with_inputs = calibrate(model, sequences(), ranks=ranks, inputs=INT8, bits=BUDGET)
    calibration.save(folder / "calibration")
    with_inputs.save(folder / "with_inputs")
    results: dict[str, Any] = {"fingerprint": calibration.fingerprint()}
    with emulate_tensor_parallel_(model, ranks):
        results["whole"] = logits(model, ids())
    for name, source, settings, watching in cases(calibration, with_inputs, drift):
        with emulate_tensor_parallel_(model, ranks, source, settings=settings, drift=watching) as emulation:
            results[name] = logits(model, ids())
        results[f"{name} traffic"] = of_layers(emulation.traffic)
    return results | {"drift": drift.report().rows}


def cases(
    calibration: Calibration, with_inputs: Calibration, drift: Drift
) -> list[tuple[str, Any, SumSettings, Drift | None]]:
    """Name, format, settings, and who watches."""
    return [
        ("one", calibration, ONE, None), ("two", calibration, TWO, drift), ("small", calibration, SMALL, None),
        ("int8", INT8, TWO, None), ("inputs", with_inputs, ONE, None),
    ]  # fmt: skip


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


def hf_parallel(model: Any) -> Any:
    """What `from_pretrained(folder, tp_plan="auto")` does with its plan once the weights are there."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
    return model


def with_gradients(path: str) -> None:
    model = tensor_parallel_(Toy())
    low_bit_(model, path, settings=ONE)
    model(ids())


def installed_twice(path: str) -> None:
    model = tensor_parallel_(Toy())
    low_bit_(model, path, settings=ONE).remove()
    low_bit_(model, path, settings=ONE)
    low_bit_(model, path, settings=ONE)


def unknown_style() -> None:
    from transformers.distributed import tensor_parallel

    class Scattered(tensor_parallel.MoeExpertsParallel):
        """Returns something else."""

    model = cut(moe("mixtral"), "own")
    experts = model.model.layers[1].mlp.experts
    del experts.forward
    Scattered().install_forward(experts, experts.down_proj.device_mesh)
    low_bit_(model, INT8)


def no_style() -> None:
    model = cut(moe("mixtral"), "own")
    del model.model.layers[0].mlp.experts.forward
    low_bit_(model, INT8)


class Linear8bitLt(nn.Linear):
    __module__ = "bitsandbytes.nn.modules"


def of_bitsandbytes() -> None:
    model = llama()
    model.model.layers[0].mlp.down_proj.__class__ = Linear8bitLt
    low_bit_(hf_parallel(model), INT8)


def refusals(path: str) -> list[str]:
    rank, nothing, own = dist.get_rank(), cast(Any, None), f"{WIDTH} features, float32"

    def install(source: Any, model: nn.Module | None = None, **settings: Any) -> Callable[[], object]:
        return lambda: low_bit_(tensor_parallel_(model or Toy()), source, settings=SumSettings(**settings))

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
        (lambda: with_gradients(path), RuntimeError, "layers.0.attn.*no_grad"),
        (lambda: tensor_parallel_(tensor_parallel_(Toy())), ValueError, "already"),
        (lambda: installed_twice(path), ValueError, r"layers.0.attn.o adds up .* in few bits already.*remove\(\)"),
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


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.down(self.up(self.embed(tokens)).relu()))


def pytorch_styles() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    plan = {"up": "colwise", "down": "rowwise"}
    results: dict[str, Any] = {}
    reference = Pair()
    calibration = calibrate(Pair(), sequences(), ranks=2, plan=plan)
    codec = calibration.codec("down")
    assert isinstance(codec, FeatureInt)
    with torch.no_grad():
        drift = Drift(every=1)
        results["full"] = reference(ids())
        with emulate_tensor_parallel_(reference, 2, calibration, plan=plan, settings=ONE):
            results["emulated"] = reference(ids())
        by_name = {"up": ColwiseParallel(), **low_bit_styles(calibration, mesh, settings=ONE, drift=drift)}
        results["styles"] = parallelize_module(Pair(), mesh, by_name)(ids())
        assert [row.layer for row in drift.report().rows] == ["down"]
        assert drift.report().rows[0].samples == 1
        whole_input = {
            "embed": LowBitRowwiseParallel(codec, input_layouts=Replicate()),
            "down": LowBitRowwiseParallel(codec, settings=ONE, input_layouts=Replicate(), use_local_output=False),
        }
        module = parallelize_module(Pair(), mesh, whole_input)
        output = module.down(module.up(module.embed(ids())).relu())
        assert isinstance(output, DTensor)
        results["whole input"] = module.norm(output.to_local())
    for style, module, error in (
        (LowBitRowwiseParallel(codec), nn.LayerNorm(4), "is LayerNorm"),
        (LowBitRowwiseParallel(codec), nn.Linear(8, 4), "has 2 ranks and 4 features"),
        (LowBitRowwiseParallel(GroupInt(bits=4 + 4 * dist.get_rank())), nn.Linear(8, 4), "do not agree"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=error):
            parallelize_module(module, mesh, style)
    with pytest.raises(ValueError, match="output_layouts"):
        LowBitRowwiseParallel(codec, output_layouts=Shard(1))
    return results


def test_pytorch_styles(ranks: Ranks):
    first, second = ranks.run(pytorch_styles)
    for key in first:
        assert torch.equal(first[key], second[key]), key
    assert torch.equal(first["styles"], first["emulated"])
    assert torch.equal(first["whole input"], first["emulated"])
    assert not torch.equal(first["emulated"], first["full"])
