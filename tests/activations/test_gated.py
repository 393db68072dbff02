"""Gated activations: gradients against autograd's, kernels against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowbit import kernels
from lowbit.activations.gated.reference import ACTIVATIONS, activate
from lowbit.codecs import GroupInt
from tests.activations.operators import Guarded, close, decoded_by, device_of, hard

FUNCTIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = [  # shape, activation, dtype of inputs, of results, bits, group, seed, gated
    ((5, 77), "silu", F32, F32, 4, 64, None, True),
    ((4, 256), "silu", BF16, BF16, 4, 64, 7, True),
    ((4, 100), "gelu", F32, BF16, 3, 32, None, True),
    ((4, 100), "gelu_tanh", BF16, F32, 8, 64, None, False),
    ((4, 96), "relu", F16, F16, 5, 24, None, True),
    ((1, 5), "gelu", F32, F32, 2, 8, 2**32 - 1, False),
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_reference_is_autograd_at_the_decoded_inputs(activation: str, gated: bool) -> None:
    codec = GroupInt(bits=5, group=32)
    gate, up, grad = torch.randn(3, 6, 50).mul(3).unbind()
    payloads = [codec.encode(t) for t in (gate, up)]
    x, y = (decoded_by(codec, p, gate.shape).double().requires_grad_() for p in payloads)
    expected = FUNCTIONS[activation](x) * (y if gated else 1)
    expected.backward(grad.double())
    out, again, grad_gate, grad_up = (torch.empty_like(gate) for _ in range(4))
    second = payloads[1] if gated else None
    with kernels.backend("reference"):
        torch.ops.lowbit.gated_recompute(payloads[0], second, out, activation, 5, 32)
        torch.ops.lowbit.gated_backward(
            *(payloads[0], second, grad, grad_gate, grad_up if gated else None, again), *(activation, 5, 32)
        )
    assert torch.equal(out, again)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grad_gate.double(), x.grad, rtol=1e-6, atol=2e-5)
    if gated:
        torch.testing.assert_close(grad_up.double(), y.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_kernels(case: tuple) -> None:
    compare("cpu", *case)


@pytest.mark.parametrize("case", CASES[1:5], ids=str)
def test_gpu_kernels(case: tuple) -> None:
    compare("gpu", *case)


def test_lines_of_several_threads() -> None:
    compare("cpu", (40, 1000), "silu", BF16, F32, 4, 64, None, True)


def compare(
    backend: str, shape: tuple[int, int], activation: str, dtype: torch.dtype, result: torch.dtype,
    bits: int, group: int, seed: int | None, gated: bool,
) -> None:  # fmt: skip
    device = device_of(backend)
    gate, up = hard(*shape, dtype=dtype, seed=1), hard(*shape, dtype=dtype, seed=2)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    if shape[0] > 3:
        gate[1, 3], gate[1, 4], up[2, 3] = torch.nan, torch.inf, -torch.inf
    made, read = {}, {}
    for name in ("reference", backend):
        with kernels.backend(name):
            made[name], read[name] = calls(
                gate.to(device), up.to(device) if gated else None, grad.to(device),
                result, activation, bits, group, seed,
            )  # fmt: skip
    for found, expected in zip(made[backend], made["reference"], strict=True):
        assert torch.equal(found, expected)
    # A function's share of its input is within 2.5e-7 on both sides, its slope within 2e-6 (see `cpu/curves.py`).
    codec = GroupInt(bits=bits, group=group)
    x, y = (
        decoded_by(codec, p, shape).double() for p in (made["reference"] * 2)[:2]
    )  # of the gate twice, if it is alone
    y = y if gated else torch.ones_like(y)
    given_y = up.double().to(device) if gated else y
    grad = grad.double().to(device).abs()
    bounds = {
        "out": 5e-7 * (gate.double().to(device) * given_y).abs(),
        "recomputed": 5e-7 * (x * y).abs(),
        "grad_gate": 4e-6 * (grad * y).abs(),
        "grad_up": 5e-7 * (grad * x).abs(),
        "again": 5e-7 * (x * y).abs(),
    }
    for key, expected in read["reference"].items():
        close(read[backend][key], expected, bounds[key].nan_to_num(0, 0, 0))


def calls(
    gate: Tensor, up: Tensor | None, grad: Tensor, dtype: torch.dtype,
    activation: str, bits: int, group: int, seed: int | None,
) -> tuple[list[Tensor], dict[str, Any]]:  # fmt: skip
    """Payloads and results of the three operators."""
    room, shape, settings = Guarded(gate.device.type), tuple(gate.shape), (activation, bits, group)
    names = ("out", "recomputed", "grad_gate", "again", *(("grad_up",) if up is not None else ()))
    results = {name: room.empty(shape, dtype) for name in names}
    payloads = [room.payload(gate.numel(), bits, group) for _ in range(2 if up is not None else 1)]
    first, second = payloads[0], payloads[1] if up is not None else None
    torch.ops.lowbit.gated_encode(gate, up, first, second, results["out"], *settings, seed)
    torch.ops.lowbit.gated_recompute(first, second, results["recomputed"], *settings)
    torch.ops.lowbit.gated_backward(
        *(first, second, grad, results["grad_gate"], results.get("grad_up"), results["again"]), *settings
    )
    room.check()
    return payloads, results


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_slopes_everywhere(activation: str) -> None:
    """The CPU's, through operators: 8 bits hold grids of 256 exactly, so nothing is lost on the way."""
    steps = torch.linspace(-100, 100, 200 * 256 + 1)[:-1]
    x = torch.cat([steps, torch.tensor([0.0, -1e30, 1e30, -1e38, 1e38, 1e-30] * 32)])
    zero, out, slope = torch.zeros_like(x), torch.empty_like(x), torch.empty_like(x)
    payload = torch.empty(group_bytes(x), dtype=torch.uint8)
    with kernels.backend("cpu"):
        torch.ops.lowbit.gated_encode(x, None, payload, None, out, activation, 8, 8, None)
        torch.ops.lowbit.gated_backward(payload, None, zero + 1, slope, None, None, activation, 8, 8)
    decoded = decoded_by(GroupInt(bits=8, group=8), payload, x.shape)
    value, _ = activate(x.double(), activation)
    _, expected = activate(decoded.double(), activation)
    assert ((out - value).abs() <= 3e-7 * x.abs() + 2.0**-126).all()
    assert ((slope - expected).abs() <= 5e-7)[: len(steps)].all()
    assert slope.isfinite().all()


def group_bytes(x: Tensor) -> int:
    return GroupInt(bits=8, group=8).format_nbytes(x.shape)
