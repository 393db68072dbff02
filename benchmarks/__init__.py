"""Benchmarks that only developers of lowbit run: `python -m benchmarks NAME ...`, with the runner of `lowbit bench`."""

from __future__ import annotations

COMMANDS = {
    "race": "benchmarks.race",
    "simulate": "benchmarks.simulate",
    "grid": "benchmarks.predicted:GRID",
    "arena": "benchmarks.predicted:ARENA",
    "activations": "benchmarks.activations",
    "real": "benchmarks.real",
    "parallel": "benchmarks.parallel",
}
"""The module of each benchmark, with the name of its `lowbit.report.Command` after a colon if it is not COMMAND."""
