"""Runs of `lowbit train` with `pipeline.forward = "auto"` over a link whose rate changes.

`python -m benchmarks.changing_link 100,10,100 OPTIONS` prints what a run with these options of `lowbit train` chooses
after each change of the rate (Mbit/s, round trip 40 ms). `100~15` is a rate that wobbles by 15 %.
"""

import itertools
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.codecs import parse_pair
from lowbit_lab.network import SlowLink
from lowbit_run.train.metrics import read_metrics

RTT_MS = 40.0
_MODEL = shlex.split(
    "--model.layers 8 --model.dim 128 --model.heads 2 --model.ffn 256 --data.sequence 128 --data.batch 16 "
    "--pipeline.microbatches 4 --pipeline.warmup_steps 0 --data.held_out_share 0 --run.steps 100000 --run.threads 1 "
    "--run.save_model false --run.progress false --run.prompt '' --run.overwrite true --pipeline.forward auto"
)


class Seen(NamedTuple):
    """A choice of formats: the phase and its rate, seconds and steps since its begin, and the choice."""

    phase: int
    rate: str
    seconds: float
    steps: int
    choice: dict[str, Any]

    @property
    def nbits(self) -> float:
        """Bits per element of the first boundary, both ways."""
        return sum(8 * codec.nbytes((4, 128, 128)) / (4 * 128 * 128) for codec in parse_pair(self.choice["formats"][0]))


def follow(
    rates: Sequence[str], options: Sequence[str], folder: Path, *, least: float, most: float, settle: int = 15
) -> Iterator[Seen]:
    """Train while the rate changes, and yield each choice as it is made.

    Args:
        rates: Mbit/s, one after the other; "100~15" wobbles by 15 %. options: of `lowbit train`.
        least: seconds that a rate lasts after which formats have changed, and `settle` the steps. most: seconds of the
            others.
    """
    (folder / "text.txt").write_text(" ".join(f"word {i % 97} of {i % 89}" for i in range(40_000)))
    files = ["--run.output", str(folder / "run"), "--data.text", str(folder / "text.txt")]
    with (
        SlowLink(2, float(rates[0].partition("~")[0]), rtt_ms=RTT_MS) as link,
        (folder / "log.txt").open("w") as log,
    ):
        ranks = [
            link.popen(
                rank, [sys.executable, "-m", "lowbit", "train", *_MODEL, *files, *options], stdout=log, stderr=log,
                env=os.environ | link.environment(rank),
            )
            for rank in range(2)
        ]  # fmt: skip
        known = 0
        for phase, rate in enumerate(rates):
            middle, _, wobble = rate.partition("~")
            before, began, start = known, time.monotonic(), _steps(folder)
            for i in itertools.count():
                if not i or wobble:
                    link.set_rate(float(middle) * (1 + float(wobble or 0) / 100 * math.sin(0.7 * i)))
                time.sleep(1)
                if any(process.poll() is not None for process in ranks):
                    raise RuntimeError((folder / "log.txt").read_text()[-3000:])
                passed, steps, choices = time.monotonic() - began, _steps(folder) - start, _choices(folder)
                for choice in choices[known:]:
                    yield Seen(phase, rate, passed, choice["step"] - start, choice)
                known = len(choices)
                if passed > most or (passed > least and steps > settle and known > before):
                    break


def _steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return sum(1 for _ in path.open()) if path.exists() else 0


def _choices(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "ranks.json"
    return json.loads(path.read_text()).get("formats", []) if path.exists() else []


def main() -> None:
    """Print what a run chooses, and how long it takes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seen in follow(sys.argv[1].split(","), sys.argv[2:], folder, least=60, most=200):
            mbit = ", ".join(f"{value:.1f}" for value in seen.choice["mbit"].values())
            predicted = ", ".join(f"{value:.2f}" for value in seen.choice["predicted"].values())
            print(  # noqa: T201
                f"{seen.rate} Mbit/s: {seen.steps} steps, {seen.seconds:.0f} s after the change: "
                f"{seen.choice['formats']}, {seen.nbits:.1f} bits; measured {mbit}; "
                f"share {seen.choice['share']:.2f}; predicted {predicted}",
                flush=True,
            )  # fmt: skip
        lines = read_metrics(folder / "run" / "metrics.jsonl")
    for few in (lines[i : i + 10] for i in range(0, len(lines), 10)):
        parts = ("seconds", "compute_seconds", "codec_seconds", "wait_seconds")
        print(  # noqa: T201
            few[0]["step"],
            *(f"{statistics.median(line[part] for line in few):.2f}" for part in parts),
            few[-1]["rates"],
        )


if __name__ == "__main__":
    main()
