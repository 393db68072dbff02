"""Benchmarks that only developers of lowbit run: `python -m benchmarks NAME ...`, with the runner of `lowbit bench`."""

from __future__ import annotations

COMMANDS = {
    "race": "benchmarks.race:RACE",
    "simulate": "benchmarks.simulate",
    "auto": "benchmarks.choices:AUTO_COMMAND",
    "grid": "benchmarks.predicted:GRID",
    "plans": "benchmarks.choices:PLANS",
    "arena": "benchmarks.predicted:ARENA",
    "codecs": "benchmarks.codecs",
    "activations": "benchmarks.activations",
    "tune": "benchmarks.race:TUNE",
    "replicas": "benchmarks.elastic:REPLICAS",
    "diloco": "benchmarks.elastic:DILOCO",
    "ranks": "benchmarks.ranks",
    "real": "benchmarks.real",
    "parallel": "benchmarks.parallel",
}
"""The module of each benchmark, with the name of its `lowbit.report.Command` after a colon if it is not COMMAND."""
