"""Norms and gated activations: gradients against autograd's, kernels against the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowbit import kernels
from lowbit.activations.gated.reference import ACTIVATIONS, TABLE
from lowbit.codecs import GroupInt
from lowbit.codecs.group_int.reference import group_int_layout

GUARD = 64
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NORMS = [  # shape, dtypes of inputs and of results, centred, weight and bias, offset, bits, group, seed
    ((5, 128), F32, F32, False, "w", 0.0, 4, 64, None),
    ((5, 64), BF16, BF16, False, "w", 1.0, 4, 64, 7),
    ((4, 100), F32, BF16, True, "wb", 0.0, 3, 32, None),
    ((7, 7), BF16, F32, True, "", 0.0, 8, 64, 3),
    ((4, 96), F16, F16, True, "b", 0.0, 5, 24, None),
    ((1, 1), F32, F32, False, "wb", 0.0, 2, 8, None),
]
GATES = [  # shape, activation, dtype of inputs, of results, bits, group, seed, gated
    ((5, 77), "silu", F32, F32, 4, 64, None, True),
    ((4, 256), "silu", BF16, BF16, 4, 64, 7, True),
    ((4, 100), "gelu", F32, BF16, 3, 32, None, True),
    ((4, 100), "gelu_tanh", BF16, F32, 8, 64, None, False),
    ((4, 96), "relu", F16, F16, 5, 24, None, True),
    ((1, 5), "gelu", F32, F32, 2, 8, 2**32 - 1, False),
]
FUNCTIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class Guarded:
    """Tensors for an operator to write, each amid a buffer that it must not touch."""

    def __init__(self, device: str) -> None:
        self.device, self.buffers = device, []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * GUARD,), 77, dtype=dtype, device=self.device)
        self.buffers.append((buffer, count))
        return buffer[GUARD : GUARD + count].view(shape)

    def payload(self, count: int, bits: int, group: int) -> Tensor:
        return self.empty((group_int_layout(count, bits, group, False).nbytes,), torch.uint8)

    def check(self) -> None:
        for buffer, count in self.buffers:
            assert (buffer[:GUARD] == 77).all()
            assert (buffer[GUARD + count :] == 77).all()


def hard(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows of very different sizes, outliers, denormals, and a row of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(shape[0], 1, generator=g))
    x[0] *= 1e-38
    x[-1] = 0
    x.view(-1)[::50] *= -100
    return x.to(dtype)


def close(found: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Within a bound for float32, and a step of narrower types; finite where the other is."""
    a, b = found.double(), expected.double()
    assert torch.equal(a.isfinite(), b.isfinite())
    step = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
    least = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
    allowed = bound + b.abs() * step[found.dtype] + least[found.dtype]
    excess = torch.where(b.isfinite(), (a - b).abs() - allowed, 0)
    assert (excess <= 0).all(), f"{excess.max()} too far, of {b[b.isfinite()].abs().max()}"


def decoded_by(codec: GroupInt, payload: Tensor, shape: Any) -> Tensor:
    """What kernels have written, of any size: a codec by itself sends the smallest tensors as they are."""
    out = torch.empty(shape, device=payload.device)
    codec._decode(payload, out, False)
    return out


def on_both(backend: str, calls: Callable[..., Any], *tensors: Tensor | None, settings: tuple[Any, ...]) -> Any:
    """Payloads and results of a backend ("gpu": in Triton's interpreter where there is no GPU), then the reference's.

    The payloads must be equal.
    """
    if backend == "gpu":
        pytest.importorskip("triton", reason="no Triton; make test-cpus installs it")
    device = "cuda" if backend == "gpu" and torch.cuda.is_available() else "cpu"
    found = []
    for name in (backend, "reference"):
        with kernels.backend(name):
            payloads, results = calls(*(None if t is None else t.to(device) for t in tensors), *settings)
        found.append(([p.cpu() for p in payloads], {key: t.cpu() for key, t in results.items()}))
    (made, read), (expected, wanted) = found
    assert all(map(torch.equal, made, expected))
    return expected, read, wanted


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_norms_are_autograd_at_the_decoded_input(centred: bool, affine: bool) -> None:
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
    out, grad_x = (torch.empty_like(given) for _ in range(2))
    grad_weight, grad_bias = torch.empty(50), torch.empty(50)
    parameters = (weight, bias) if affine else (None, None)
    gradients = (grad_weight, grad_bias) if affine else (None, None)
    settings = 1e-3, centred, 1.0, 5, 32
    with kernels.backend("reference"):
        torch.ops.lowbit.norm_recompute(payload, *parameters, out, *settings)
        torch.ops.lowbit.norm_backward(payload, parameters[0], grad, grad_x, *gradients, *settings)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grad_x.double(), x.grad, rtol=1e-6, atol=1e-5)
    if affine:
        torch.testing.assert_close(grad_weight.double(), w.grad, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(grad_bias.double(), b.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("case", [NORMS[1], NORMS[2], NORMS[4]], ids=str)
def test_norms_on_a_gpu(case: tuple) -> None:
    compare_norms("gpu", *case)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_nan_and_inf_stay_visible(backend: str) -> None:
    """In the rows that have them, but for a group that lies in two rows, and in the parameters' gradients."""
    x = torch.randn(4, 64)
    x[0, 3], x[2, 5] = torch.nan, torch.inf
    for results in on_both(backend, norm_calls, x, x[3], None, x, settings=(F32, 1e-6, False, 0.0, 4, 32, None))[1:]:
        for name in ("out", "recomputed", "grad_x"):
            assert results[name].isfinite().all(-1).tolist() == [False, True, False, True], name
        assert results["grad_weight"].isnan().all()


def compare_norms(
    backend: str, shape: tuple[int, int], dtype: torch.dtype, result: torch.dtype, centred: bool,
    parameters: str, offset: float, bits: int, group: int, seed: int | None,
) -> None:  # fmt: skip
    channels = shape[1]
    x, generator = hard(*shape, dtype=dtype), torch.Generator().manual_seed(3)
    weight, bias = torch.randn(2, channels, generator=generator).to(result)
    grad = torch.randn(shape, generator=generator).to(dtype)
    given = weight if "w" in parameters else None, bias if "b" in parameters else None
    settings = result, 1e-6, centred, offset, bits, group, seed
    (payload,), read, wanted = on_both(backend, norm_calls, x, *given, grad, settings=settings)
    # Any order of a sum of C terms errs by less than C half steps of their magnitudes, and rows are divided by a sum.
    share = (channels + 16) * 2.0**-24
    decoded = decoded_by(GroupInt(bits=bits, group=group), payload, shape).double()
    for key, expected in wanted.items():
        source = x.double() if key == "out" else decoded
        scale = expected.double().nan_to_num(0, 0, 0).abs().max()
        if key in ("grad_weight", "grad_bias"):
            scale = scale + shape[0] * 4 * channels**0.5
        if centred:  # what is left after the mean has the mean's error
            offsets = source.nan_to_num(0, 0, 0)
            left = (offsets - offsets.mean(-1, keepdim=True)).square().mean(-1) + 1e-6
            scale = scale * (1 + (offsets.abs().mean(-1) / left.sqrt()).max())
        close(read[key], expected, float(share * scale))


def norm_calls(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor, dtype: torch.dtype,
    eps: float, centred: bool, offset: float, bits: int, group: int, seed: int | None,
) -> tuple[list[Tensor], dict[str, Tensor]]:  # fmt: skip
    """The payload and the results of the three operators."""
    room, shape = Guarded(x.device.type), tuple(x.shape)
    results = {n: room.empty(shape, dtype) for n in ("out", "recomputed", "grad_x")}
    for name, parameter in (("grad_weight", weight), ("grad_bias", bias)):
        if parameter is not None:
            results[name] = room.empty(shape[1:], dtype)
    payload = room.payload(x.numel(), bits, group)
    settings = eps, centred, offset, bits, group
    torch.ops.lowbit.norm_encode(x, weight, bias, payload, results["out"], *settings, seed)
    torch.ops.lowbit.norm_recompute(payload, weight, bias, results["recomputed"], *settings)
    torch.ops.lowbit.norm_backward(
        *(payload, weight, grad, results["grad_x"]),
        *(results.get("grad_weight"), results.get("grad_bias"), *settings),
    )
    room.check()
    return [payload], results


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_gates_are_autograd_at_the_decoded_inputs(activation: str, gated: bool) -> None:
    codec, g = GroupInt(bits=5, group=32), torch.Generator().manual_seed(0)
    gate, up, grad = torch.randn(3, 6, 50, generator=g).mul(3).unbind()  # products of 100 and more would need more room
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


@pytest.mark.parametrize("case", GATES[1:5], ids=str)
def test_gates_on_a_gpu(case: tuple) -> None:
    compare_gates("gpu", *case)


def compare_gates(
    backend: str, shape: tuple[int, int], activation: str, dtype: torch.dtype, result: torch.dtype,
    bits: int, group: int, seed: int | None, gated: bool,
) -> None:  # fmt: skip
    gate, up = hard(*shape, dtype=dtype, seed=1), hard(*shape, dtype=dtype, seed=2)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    if shape[0] > 3:
        gate[1, 3], gate[1, 4], up[2, 3] = torch.nan, torch.inf, -torch.inf
    tensors = gate, up if gated else None, grad
    payloads, read, wanted = on_both(backend, gate_calls, *tensors, settings=(result, activation, bits, group, seed))
    # A function's share of its input is within 2.5e-7 on both sides, its slope within 2e-6.
    codec = GroupInt(bits=bits, group=group)
    x, y = (decoded_by(codec, p, shape).double() for p in (payloads * 2)[:2])  # of the gate twice, if it is alone
    y = y if gated else torch.ones_like(y)
    given_y, grad = up.double() if gated else y, grad.double().abs()
    bounds = {
        "out": 5e-7 * (gate.double() * given_y).abs(),
        "recomputed": 5e-7 * (x * y).abs(),
        "grad_gate": 4e-6 * (grad * y).abs(),
        "grad_up": 5e-7 * (grad * x).abs(),
        "again": 5e-7 * (x * y).abs(),
    }
    for key, expected in wanted.items():
        close(read[key], expected, bounds[key].nan_to_num(0, 0, 0))


def gate_calls(
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
    payload = torch.empty(GroupInt(bits=8, group=8).format_nbytes(x.shape), dtype=torch.uint8)
    with kernels.backend("cpu"):
        torch.ops.lowbit.gated_encode(x, None, payload, None, out, activation, 8, 8, None)
        torch.ops.lowbit.gated_backward(payload, None, zero + 1, slope, None, None, activation, 8, 8)
    decoded = decoded_by(GroupInt(bits=8, group=8), payload, x.shape)
    value = TABLE[activation].value(x.double())
    expected = TABLE[activation].gradient(torch.ones_like(x).double(), decoded.double())
    assert ((out - value).abs() <= 3e-7 * x.abs() + 2.0**-126).all()
    assert ((slope - expected).abs() <= 2e-6)[: len(steps)].all()
    assert slope.isfinite().all()
