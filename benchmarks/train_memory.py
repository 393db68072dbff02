"""Measure the memory of each rank of `lowbit train` over its own share of the weights.

`python -m benchmarks.train_memory FOLDER [OPTIONS]` starts a run with these options of `lowbit train` in FOLDER, with
checkpoints and a saved model, and samples the anonymous and resident memory of its ranks. What an interpreter takes
that has imported as much as a rank is subtracted. Linux only.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lowbit_lab.bench.timing import memory_of_process

PHASES = ("loading", "steps", "saving")
KINDS = {"anonymous": "RssAnon", "resident": "VmRSS"}
_IMPORTS = "import lowbit_run.train.trainer, transformers, torch._dynamo; print(flush=True); input()"
_PERIOD = 0.02  # seconds between samples

Peaks = dict[tuple[int, str, str], float]
"""Most MB by rank, phase and kind of memory."""


def measure(folder: Path, options: Sequence[str]) -> Peaks:
    """Train with these options, and return the peaks of all ranks, less an idle interpreter's memory."""
    idle = _idle()
    command = [sys.executable, "-m", "lowbit", "train", *options, "--run.output", str(folder), "--run.overwrite=true"]
    peaks: Peaks = {}
    with subprocess.Popen(command) as run:
        while run.poll() is None:
            phase = _phase(folder)
            for rank, pid in _ranks(run.pid):
                with contextlib.suppress(OSError, KeyError):  # it has ended
                    for kind, mb in _memory(pid).items():
                        key = rank, phase, kind
                        peaks[key] = max(peaks.get(key, 0.0), mb - idle[kind])
            time.sleep(_PERIOD)
    if run.returncode:
        raise SystemExit(run.returncode)
    return peaks


def shares(folder: Path) -> dict[int, float]:
    """Return the MB of each rank's weights, as the run has recorded them."""
    ranks = json.loads((folder / "ranks.json").read_text("utf-8"))["memory"]
    return {each["rank"]: sum(stage["weights"] for stage in each["stages"]) / 1e6 for each in ranks}


def _phase(folder: Path) -> str:
    """Tell a run's phase by the files that it has written: the first step follows the loading at once."""
    if (folder / "model").exists() or any((folder / "checkpoints").glob("step-*")):
        return PHASES[2]
    return PHASES[(folder / "metrics.jsonl").exists()]


def _ranks(parent: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks among the descendants of a process."""
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                yield from ((int(x[5:]), child) for x in variables if x.startswith(b"RANK="))
                yield from _ranks(child)


def _memory(pid: int) -> dict[str, float]:
    memory = memory_of_process(pid)
    return {kind: memory[name] / 1024e3 for kind, name in KINDS.items()}


def _idle() -> dict[str, float]:
    """Return the memory of a process that has imported what a rank imports."""
    with subprocess.Popen([sys.executable, "-c", _IMPORTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory = _memory(process.pid)
        process.communicate(b"\n")
    return memory


def main() -> None:
    """Print a row for each rank and phase."""
    folder, options = Path(sys.argv[1]), sys.argv[2:]
    if folder.exists():
        raise SystemExit(f"error: {folder} exists; allowed: a new folder")
    peaks = measure(folder, options)
    weights = shares(folder)
    lines = [f"{'rank':>4}  {'phase':8}  {'memory':10}  {'MB':>6}  over its weights"]
    for (rank, phase, kind), mb in sorted(peaks.items(), key=lambda item: (item[0][0], PHASES.index(item[0][1]))):
        lines.append(f"{rank:4}  {phase:8}  {kind:10}  {mb:6.0f}  {mb / weights[rank]:.2f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
