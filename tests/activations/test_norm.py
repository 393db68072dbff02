"""Norms: gradients against autograd's, kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowbit import kernels
from lowbit.codecs import GroupInt
from tests.activations.operators import BACKENDS, Guarded, close, decoded_by, device_of, hard

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = [  # shape, dtypes of inputs and of results, centred, weight and bias, offset, bits, group, seed
    ((5, 128), F32, F32, False, "w", 0.0, 4, 64, None),
    ((5, 64), BF16, BF16, False, "w", 1.0, 4, 64, 7),
    ((4, 100), F32, BF16, True, "wb", 0.0, 3, 32, None),
    ((7, 7), BF16, F32, True, "", 0.0, 8, 64, 3),
    ((4, 96), F16, F16, True, "b", 0.0, 5, 24, None),
    ((1, 1), F32, F32, False, "wb", 0.0, 2, 8, None),
]


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_reference_is_autograd_at_the_decoded_input(centred: bool, affine: bool) -> None:
    codec = GroupInt(bits=5, group=32)
    given, grad = torch.randn(2, 6, 50).mul(3).add(1).unbind()
    payload = codec.encode(given)
    x = decoded_by(codec, payload, given.shape).double().requires_grad_()
    weight, bias = (torch.randn(50) for _ in range(2))
    w, b = weight.double().requires_grad_(), bias.double().requires_grad_()
    if centred:
        expected = functional.layer_norm(x, (50,), *((w + 1, b) if affine else ()), eps=1e-3)
    else:
        expected = functional.rms_norm(x, (50,), w + 1 if affine else None, 1e-3)
        expected = expected + b if affine else expected
    expected.backward(grad.double())
    out, again, grad_x = (torch.empty_like(given) for _ in range(3))
    grad_weight, grad_bias = torch.empty(50), torch.empty(50)
    parameters = (weight, bias) if affine else (None, None)
    gradients = (grad_weight, grad_bias) if affine else (None, None)
    settings = 1e-3, centred, 1.0, 5, 32
    with kernels.backend("reference"):
        torch.ops.lowbit.norm_recompute(payload, *parameters, out, *settings)
        torch.ops.lowbit.norm_backward(payload, *parameters, grad, grad_x, *gradients, again, *settings)
    assert torch.equal(out, again)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grad_x.double(), x.grad, rtol=1e-6, atol=1e-5)
    if affine:
        torch.testing.assert_close(grad_weight.double(), w.grad, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(grad_bias.double(), b.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_kernels(case: tuple) -> None:
    compare("cpu", *case)


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[4]], ids=str)
def test_gpu_kernels(case: tuple) -> None:
    compare("gpu", *case)


@pytest.mark.parametrize("channels", [512, 300])
def test_rows_of_several_threads(channels: int) -> None:
    compare("cpu", (90, channels), BF16, F32, channels == 300, "wb", 0.0, 4, 64, None)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_nan_and_inf_stay_visible(backend: str) -> None:
    """In the rows that have them, but for a group that lies in two rows, and in the parameters' gradients."""
    x = torch.randn(4, 64, device=device_of(backend))
    x[0, 3], x[2, 5] = torch.nan, torch.inf
    with kernels.backend(backend):
        _, results = calls(x, x[3], None, x, F32, 1e-6, False, 0.0, 4, 32, None)
    for name in ("out", "recomputed", "grad_x", "again"):
        assert results[name].isfinite().all(-1).tolist() == [False, True, False, True], name
    assert results["grad_weight"].isnan().all()


def compare(
    backend: str, shape: tuple[int, int], dtype: torch.dtype, result: torch.dtype, centred: bool,
    parameters: str, offset: float, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    device, channels = device_of(backend), shape[1]
    x, generator = hard(*shape, dtype=dtype), torch.Generator().manual_seed(3)
    weight, bias = torch.randn(2, channels, generator=generator).to(result).to(device)
    grad = torch.randn(shape, generator=generator).to(dtype).to(device)
    given = weight if "w" in parameters else None, bias if "b" in parameters else None
    made, read = {}, {}
    for name in ("reference", backend):
        with kernels.backend(name):
            made[name], read[name] = calls(x.to(device), *given, grad, result, 1e-6, centred, offset, bits, group, seed)
    assert torch.equal(made[backend], made["reference"])
    # Any order of a sum of C terms errs by less than C half steps of their magnitudes, and rows are divided by a sum.
    share = (channels + 16) * 2.0**-24
    decoded = decoded_by(GroupInt(bits=bits, group=group), made["reference"], shape).double()
    for key, expected in read["reference"].items():
        source = x.to(device).double() if key == "out" else decoded
        scale = expected.double().nan_to_num(0, 0, 0).abs().max()
        if key in ("grad_weight", "grad_bias"):
            scale = scale + shape[0] * 4 * channels**0.5
        if centred:  # what is left after the mean has the mean's error
            offsets = source.nan_to_num(0, 0, 0)
            left = (offsets - offsets.mean(-1, keepdim=True)).square().mean(-1) + 1e-6
            scale = scale * (1 + (offsets.abs().mean(-1) / left.sqrt()).max())
        close(read[backend][key], expected, float(share * scale))


def calls(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor, dtype: torch.dtype,
    eps: float, centred: bool, offset: float, bits: int, group: int, seed: int | None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The payload and the results of the three operators."""
    room, shape = Guarded(x.device.type), tuple(x.shape)
    results = {n: room.empty(shape, dtype) for n in ("out", "recomputed", "grad_x", "again")}
    for name, parameter in (("grad_weight", weight), ("grad_bias", bias)):
        if parameter is not None:
            results[name] = room.empty(shape[1:], dtype)
    payload = room.payload(x.numel(), bits, group)
    settings = eps, centred, offset, bits, group
    torch.ops.lowbit.norm_encode(x, weight, bias, payload, results["out"], *settings, seed)
    torch.ops.lowbit.norm_recompute(payload, weight, bias, results["recomputed"], *settings)
    torch.ops.lowbit.norm_backward(
        *(payload, weight, bias, grad, results["grad_x"]),
        *(results.get("grad_weight"), results.get("grad_bias"), results["again"], *settings),
    )
    room.check()
    return payload, results
