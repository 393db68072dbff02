"""Benchmarks that only developers of lowbit run: `python -m benchmarks NAME ...`, with the runner of `lowbit bench`."""

from __future__ import annotations

COMMANDS = {
    "race": "benchmarks.race",
    "simulate": "benchmarks.simulate",
    "auto": "benchmarks.auto",
    "grid": "benchmarks.grid",
    "plans": "benchmarks.plans",
    "arena": "benchmarks.arena",
    "events": "benchmarks.events",
    "codecs": "benchmarks.codecs",
    "activations": "benchmarks.activations",
    "titan": "benchmarks.titan",
    "tune": "benchmarks.tune",
    "replicas": "benchmarks.replicas",
    "diloco": "benchmarks.diloco",
    "reduce": "benchmarks.reduce",
    "sums": "benchmarks.sums",
    "ranks": "benchmarks.ranks",
    "real": "benchmarks.real",
    "parallel": "benchmarks.parallel",
}
"""The module of each benchmark, which has its `COMMAND`."""
