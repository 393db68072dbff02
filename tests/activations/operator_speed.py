"""Times of norms and gated activations with 4-bit payloads: `python -m tests.activations.operator_speed`.

Prints nanoseconds for each element, the median of some rounds in which every operation has its turn, from cold caches.
`--device cuda` on a GPU; `--gemm` for GEMMs whose output is encoded block by block of rows, while it is in a cache;
`--step LAYERS` for forward and backward of a Llama.
"""

from __future__ import annotations

import argparse
import functools
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
        "norm_backward": lambda i: torch.ops.lowbit.norm_backward(
            p[i], w, None, g[i], gx[i], gw, None, None, *NORM, *CODE
        ),
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


def gemms(shape: tuple[int, int], dtype: torch.dtype, device: str) -> dict[str, Operation]:
    """Gate and up of a Llama of 512 channels: GEMMs of all rows, then codes; or both for a block of rows at a time."""
    x = many(lambda: torch.randn(shape[0], 512, device=device).to(dtype))
    w, v = (torch.randn(512, shape[1], device=device).to(dtype) for _ in range(2))
    gate, up, o = (torch.empty(shape, dtype=dtype, device=device) for _ in range(3))

    def encoded(i: int, rows: int) -> None:
        for first in range(0, shape[0], rows):
            part = slice(first, first + rows)
            torch.mm(x[i][part], w, out=gate[part])
            torch.mm(x[i][part], v, out=up[part])
            p, q = (torch.empty(GroupInt().nbytes(gate[part].shape), dtype=torch.uint8, device=device) for _ in "ab")
            torch.ops.lowbit.gated_encode(gate[part], up[part], p, q, o[part], "silu", *CODE, None)

    def plain(i: int) -> None:
        torch.mm(x[i], w, out=gate)
        torch.mm(x[i], v, out=up)
        torch.mul(functional.silu(gate), up, out=o)

    blocks = {f"blocks of {n} rows": functools.partial(encoded, rows=n) for n in (64, 128, 256)}
    whole = functools.partial(encoded, rows=shape[0])
    return {"GEMMs and silu(gate) * up": plain, "GEMMs, then gated_encode": whole, **blocks}


def steps(layers: int, autocast: bool) -> dict[str, Operation]:
    """Forward and backward of a small Llama on 1024 tokens: plain, with 4-bit saved activations, with checkpointing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowbit.activations import compress_saved_

    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    names = "plain", "compress_saved_", "checkpointing"
    models = {name: LlamaForCausalLM(config).train() for name in names}
    compress_saved_(models["compress_saved_"])
    models["checkpointing"].gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, 2048, (1, 1024))

    def step(name: str, _: int) -> None:
        with torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = models[name](input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        models[name].zero_grad(set_to_none=False)

    return {name: functools.partial(step, name) for name in names}


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
    parser.add_argument("--gemm", action="store_true")
    parser.add_argument("--step", type=int, metavar="LAYERS", help="time a whole step, in seconds")
    parser.add_argument("--autocast", action="store_true", help="in bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.step:
        times = in_turn(steps(given.step, given.autocast), rounds=given.rounds, buffers=1)
        for name, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, times["plain"], strict=True))
            print(f"step {name:28s} {statistics.median(seconds):8.3f} s, {ratio:.3f}x")
        return
    cases = {"gemm": (gemms, 1408)} if given.gemm else {"norm": (norms, 1024), "gated": (gates, 1408)}
    for dtype in (torch.bfloat16, torch.float32)[given.gemm :]:
        for name, (make, channels) in cases.items():
            shape = given.rows, channels
            title = f"{name} {str(dtype).removeprefix('torch.')}"
            report(title, make(shape, dtype, given.device), given.rows * channels, given.device)


if __name__ == "__main__":
    main()
