"""Benchmarks: the module of each declares a `lowbit.report.Command`; `lowbit bench NAME` runs it."""

from __future__ import annotations

COMMANDS = {
    "pipeline": "lowbit.bench.pipeline",
    "codecs": "lowbit.bench.codecs",
    "spectrum": "lowbit.bench.spectrum",
    "assumptions": "lowbit.bench.assumptions",
    "gradients": "lowbit.bench.gradients",
    "tensor-parallel": "lowbit.bench.tensor_parallel",
    "convergence": "lowbit.bench.convergence",
    "memory": "lowbit.bench.memory",
    "families": "lowbit.bench.families",
    "generation": "lowbit.bench.generation",
}
"""The module of each benchmark, which has its `COMMAND`. They import PyTorch: import one when it is asked for."""

__all__ = ["COMMANDS"]
