"""Times of norms and gated activations with 4-bit payloads: `python -m tests.lowbit.activations.operator_speed`.

Prints nanoseconds for each element, the median of some rounds in which every operation has its turn, from cold caches.
`--device cuda` on a GPU.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.codecs import GroupInt
from lowbit_lab.bench.timing import in_turn

BUFFERS, ROUNDS = 3, 15
NORM, CODE = (1e-6, False, 0.0), (4, 64)
Operation = Callable[[int], object]


def many(make: Callable[[], Tensor]) -> list[Tensor]:
    return [make() for _ in range(BUFFERS)]


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As Hugging Face's Llama computes it."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def payloads(shape: tuple[int, int], device: str) -> list[Tensor]:
    size = GroupInt().nbytes(shape)
    return many(lambda: torch.empty(size, dtype=torch.uint8, device=device))


def norms(shape: tuple[int, int], dtype: torch.dtype, device: str) -> dict[str, Operation]:
    x, g, o, gx = (many(lambda: torch.randn(shape, device=device).to(dtype)) for _ in range(4))
    w = torch.randn(shape[1], device=device).to(dtype).requires_grad_()
    gw, p = torch.empty_like(w.detach()), payloads(shape, device)
    leaves = [t.clone().requires_grad_() for t in x]
    graphs = [eager_norm(t, w) for t in leaves]
    return {
        "copy": lambda i: o[i].copy_(x[i]),
        "Llama's RMSNorm": lambda i: eager_norm(x[i], w.detach()),
        "norm_encode": lambda i: torch.ops.lowbit.norm_encode(x[i], w, None, p[i], o[i], *NORM, *CODE, None),
        "Llama's RMSNorm, backward": lambda i: torch.autograd.grad(graphs[i], [leaves[i], w], g[i], retain_graph=True),
        "norm_recompute": lambda i: torch.ops.lowbit.norm_recompute(p[i], w, None, o[i], *NORM, *CODE),
        "norm_backward": lambda i: torch.ops.lowbit.norm_backward(p[i], w, g[i], gx[i], gw, None, *NORM, *CODE),
    }


def gates(shape: tuple[int, int], dtype: torch.dtype, device: str) -> dict[str, Operation]:
    x, y, g, o, gx, gy = (many(lambda: torch.randn(shape, device=device).to(dtype)) for _ in range(6))
    p, q = payloads(shape, device), payloads(shape, device)
    leaves = [(a.clone().requires_grad_(), b.clone().requires_grad_()) for a, b in zip(x, y, strict=True)]
    graphs = [functional.silu(a) * b for a, b in leaves]
    settings = "silu", *CODE
    return {
        "copy": lambda i: o[i].copy_(x[i]),
        "silu(gate) * up": lambda i: functional.silu(x[i]) * y[i],
        "gated_encode": lambda i: torch.ops.lowbit.gated_encode(x[i], y[i], p[i], q[i], o[i], *settings, None),
        "silu(gate) * up, backward": lambda i: torch.autograd.grad(graphs[i], leaves[i], g[i], retain_graph=True),
        "gated_recompute": lambda i: torch.ops.lowbit.gated_recompute(p[i], q[i], o[i], *settings),
        "gated_backward": lambda i: torch.ops.lowbit.gated_backward(p[i], q[i], g[i], gx[i], gy[i], None, *settings),
    }


def report(title: str, operations: Mapping[str, Operation], elements: int, device: str) -> None:
    with torch.no_grad():
        times = in_turn(operations, rounds=ROUNDS, buffers=BUFFERS, device=device)
    for name, seconds in times.items():
        print(f"{title} {name:28s} {statistics.median(seconds) / elements * 1e9:8.4f} ns")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=2048)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for dtype in (torch.bfloat16, torch.float32):
        for name, (make, channels) in {"norm": (norms, 1024), "gated": (gates, 1408)}.items():
            shape = given.rows, channels
            title = f"{name} {str(dtype).removeprefix('torch.')}"
            report(title, make(shape, dtype, given.device), given.rows * channels, given.device)


if __name__ == "__main__":
    main()
