"""Benchmarks that only developers of lowbit run: `python -m benchmarks NAME ...`, with the runner of `lowbit bench`."""

COMMANDS = {
    "race": "benchmarks.race",
    "real": "benchmarks.real",
    "saved": "benchmarks.saved",
}
"""The module of each benchmark, which has its `COMMAND`."""
