"""Disturb real runs at random moments, and check how they end.

    python -m tests.torture --trials 100                            # or: make torture ARGS="--trials 100"
    python -m tests.torture --trials 100 --supervise --json FILE    # runs that look after themselves
    python -m tests.torture --faults kill,cut --ranks 2 --trials 4
    python -m tests.torture --trials 100 --only 17                  # the same trial again
    python -m tests.torture --trials 500 --faults late              # each run must succeed

Each trial has two hosts with a real network of their own between them, and a real `lowbit train` for each rank.
Trials of one `--seed` are the same each time, except for the speed of the machine. The files of failed trials stay in
`--folder`. Exits with 1 if one failed. Needs root, for the small disks that run full.
"""

import os

# Before PyTorch is imported: no threads, so that processes can fork; and as quiet as the command line.
os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL")

import argparse
import ctypes
import dataclasses
import gc
import importlib
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from lowbit.pipeline.boundary import warm_up
from lowbit.wire import connections as pieces
from lowbit_lab.network import SlowLink
from lowbit_run.train.prepare import prepare
from tests.torture import plan as plans
from tests.torture.plan import FAULTS, SHAPES, USUAL, plan
from tests.torture.trial import Outcome, reference, run, summary_line, table


def main() -> int:
    args = _parse()
    plans.connections = args.connections
    pieces.LEAST_PIECE = 256  # messages of these small models are cut, too
    if reason := SlowLink.available():
        sys.exit(f"error: {reason}")
    trials = plan(seed=args.seed, trials=args.trials, faults=args.faults, ranks=args.ranks, supervised=args.supervise)
    trials = [trial for trial in trials if not args.only or trial.number in args.only]
    _own_view_of_disks()
    _warm_up(args.folder / "warm-up")
    outcomes: list[Outcome] = []
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(args.jobs, mp_context=context, initializer=_end_with_parent) as pool:
        shapes = sorted({trial.shape for trial in trials})
        whole = [pool.submit(reference, SHAPES[name], args.folder / f"whole-{name}") for name in shapes]
        expected = {name: future.result() for name, future in zip(shapes, whole, strict=True)}
        futures = {pool.submit(run, t, expected[t.shape], args.folder / t.name): t for t in trials}
        for count, future in enumerate(as_completed(futures), start=1):
            error = future.exception()
            broken = Outcome(trial=futures[future], wrong=[f"harness: {error!r}"])
            outcomes.append(broken if error else future.result())
            print(f"{count}/{len(trials)} {summary_line(outcomes[-1])}", flush=True)
            if outcomes[-1].passed:
                shutil.rmtree(args.folder / outcomes[-1].trial.name)
            if args.json:
                header = {"seed": args.seed, "jobs": args.jobs, "seconds": round(time.monotonic() - began)}
                rows = [dataclasses.asdict(outcome) | {"passed": outcome.passed} for outcome in outcomes]
                args.json.write_text(json.dumps({"command": "torture", **header, "rows": rows}, indent=2) + "\n")
    print(table(outcomes))
    if failed := sum(not outcome.passed for outcome in outcomes):
        print(f"{failed} of {len(outcomes)} failed; what they left: {args.folder}")
    return int(failed > 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--trials", type=int, default=100, help="how many")
    add("--seed", type=int, default=0, help="of moments and victims")
    add("--ranks", type=_numbers, default=(2, 4), help="such as 2,4")
    add("--faults", type=_faults, default=USUAL, help=f"of {','.join(FAULTS)}")
    add("--supervise", action="store_true", help="with `lowbit train --supervise`")
    add("--connections", type=int, default=1, help="for each pair of ranks, over which messages are cut in pieces")
    add("--jobs", type=int, default=2, help="trials at a time")
    add("--only", type=_numbers, default=(), help="numbers of trials, such as 3,17")
    add("--json", type=Path, help="file for all that was seen")
    add("--folder", type=Path, default=Path("runs/torture").absolute(), help="for what failed trials leave")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _faults(text: str) -> tuple[str, ...]:
    if bad := set(text.split(",")) - set(FAULTS):
        raise argparse.ArgumentTypeError(f"no fault {sorted(bad)}; allowed: {', '.join(FAULTS)}")
    return tuple(text.split(","))


def _own_view_of_disks() -> None:
    """What is mounted from now on, this process and its children see only, and it goes with them."""
    if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
        sys.exit("error: a disk that runs full has to be mounted, which needs root")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _end_with_parent() -> None:
    """Its namespaces, and what lives in them, follow."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


_OF_A_RANK = (
    "numba torch.distributed.pipelining transformers.models.llama.modeling_llama lowbit_run.cli.app "
    "lowbit_run.train.loop lowbit.codecs.tah_quant.cpu lowbit.codecs.transform_quant.cpu"
)


def _warm_up(folder: Path) -> None:
    """What takes each process seconds when it does it for the first time: imports, kernels, names of a model's weights.

    A fork has it then; nothing here starts a thread.
    """
    for name in _OF_A_RANK.split():
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
    config = SHAPES["2"].config(folder)
    codecs = prepare(config, ranks=2).codecs
    shape = torch.Size((config.rows, config.data.sequence, config.model.dim))
    for codec in (*codecs.forward, *codecs.backward):
        warm_up(codec, shape, torch.float32, torch.device("cpu"))
    shutil.rmtree(folder)
    gc.collect()
    gc.freeze()  # else each fork looks at all of it again when it ends, for a second
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: forks would lack all but one"


if __name__ == "__main__":
    sys.exit(main())
