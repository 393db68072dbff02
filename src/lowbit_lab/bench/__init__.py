"""Benchmarks: the module of each declares a `lowbit_run.report.Command`; `lowbit bench NAME` runs it."""

COMMANDS = {
    "pipeline": "lowbit_lab.bench.pipeline",
    "codecs": "lowbit_lab.bench.codecs",
    "spectrum": "lowbit_lab.bench.spectrum",
    "assumptions": "lowbit_lab.bench.assumptions",
    "gradients": "lowbit_lab.bench.gradients",
    "tensor-parallel": "lowbit_lab.bench.tensor_parallel",
    "convergence": "lowbit_lab.bench.convergence",
    "memory": "lowbit_lab.bench.memory",
    "generation": "lowbit_lab.bench.generation",
}
"""The module of each benchmark, which has its `COMMAND`. They import PyTorch: import one only when it is needed."""

__all__ = ["COMMANDS"]
