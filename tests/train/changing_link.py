"""Runs of `lowbit train` with `pipeline.forward = "auto"` over a link whose rate changes.

`python -m tests.train.changing_link 100,10,100 OPTIONS` prints what a run with these options of `lowbit train` chooses
after each change of the rate (Mbit/s, round trip 40 ms). `100~15` is a rate that wobbles by 15 %.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.train.metrics import read_metrics
from lowbit_lab.network import SlowLink

RTT_MS = 40.0
_MODEL = (
    "--model.layers 8 --model.dim 128 --model.heads 2 --model.ffn 256 --data.sequence 128 --data.batch 16 "
    "--pipeline.microbatches 4 --pipeline.warmup_steps 0 --data.held_out_share 0 --run.steps 100000 --run.threads 1 "
    "--run.save_model false --run.progress false --run.overwrite true --pipeline.forward auto"
).split()


class Seen(NamedTuple):
    """A choice of formats: seconds and steps after the last change of the rate, the rate, and the choice."""

    seconds: float
    steps: int
    rate: str
    choice: dict[str, Any]


def follow(
    rates: Sequence[str], options: Sequence[str], folder: Path, *, least: float, most: float, settle: int = 25
) -> Iterator[Seen]:
    """Train while the rate changes, and yield each choice as it is made.

    Args:
        rates: Mbit/s, one after the other; "100~15" wobbles by 15 %. options: of `lowbit train`.
        least: seconds that each rate lasts, and `settle` the steps; most: seconds after which it ends at the latest.
    """
    own = [str(folder / "run"), str(folder / "text.txt")]
    (folder / "text.txt").write_text(" ".join(f"word {i % 97} of {i % 89}" for i in range(40_000)))
    first = rates[0].partition("~")[0]
    with SlowLink(2, float(first), rtt_ms=RTT_MS) as link:
        command = [sys.executable, "-m", "lowbit", "train", *_MODEL, "--run.output", own[0], "--data.text", own[1]]
        shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
        with (folder / "log.txt").open("w") as log:
            ranks = [
                link.popen(
                    rank, [*command, *options], stdout=log, stderr=log,
                    env=os.environ | shared | {"RANK": str(rank), "MASTER_ADDR": link.address(0)}
                    | {"GLOO_SOCKET_IFNAME": link.interface(rank)},
                )
                for rank in range(2)
            ]  # fmt: skip
            known = 0
            for rate in rates:
                middle, _, wobble = rate.partition("~")
                began, start = time.monotonic(), _steps(folder)
                for i in itertools.count():
                    share = 1 + float(wobble or 0) / 100 * math.sin(0.7 * i)
                    if not i or wobble:
                        link.set_rate(float(middle) * share)
                    time.sleep(1)
                    if any(process.poll() is not None for process in ranks):
                        raise RuntimeError((folder / "log.txt").read_text()[-3000:])
                    passed, steps = time.monotonic() - began, _steps(folder) - start
                    choices = _choices(folder)
                    for choice in choices[known:]:
                        yield Seen(passed, choice["step"] - start, rate, choice)
                    known = len(choices)
                    if passed > most or (passed > least and steps > settle and known):
                        break
            for process in ranks:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)


def _steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return sum(1 for _ in path.open()) if path.exists() else 0


def _choices(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "ranks.json"
    return json.loads(path.read_text()).get("formats", []) if path.exists() else []


def main() -> None:
    """Print what a run chooses, and how long it takes."""
    least = float(os.environ.get("SECONDS", "100"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seconds, steps, rate, choice in follow(sys.argv[1].split(","), sys.argv[2:], folder, least=least, most=300):
            mbit = ", ".join(f"{value:.1f}" for value in choice["mbit"].values())
            predicted = ", ".join(f"{value:.3f}" for value in choice["predicted"].values())
            print(
                f"{rate} Mbit/s: {steps} steps, {seconds:.0f} s after the change: {choice['formats']}; measured {mbit}"
                f"; share {choice['share']:.2f}; change {choice['change']}; predicted {predicted}; compute "
                f"{choice['compute']}", flush=True,
            )  # fmt: skip
        lines = read_metrics(folder / "run" / "metrics.jsonl")
        if path := os.environ.get("KEEP"):
            Path(path).write_text((folder / "run" / "metrics.jsonl").read_text())
        for i in range(0, len(lines), 10):
            part = lines[i : i + 10]
            print(
                i,
                *(
                    f"{sum(x[k] for x in part) / len(part):.3f}"
                    for k in ("seconds", "compute_seconds", "codec_seconds", "wait_seconds", "bits_forward")
                ),
                min(part[-1]["waiting"].values()),
            )  # noqa: E501
        print((folder / "log.txt").read_text()[-3000:])


if __name__ == "__main__":
    main()
