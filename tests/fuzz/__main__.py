"""Attack decoders in processes that may crash, and say what they survived."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .worker import MOST_FAULTS

CHUNK = 100_000  # cases of a process
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """A case that was not survived: which of the seed, what it is, and what went wrong or how the process ended."""

    number: int
    text: str
    why: str


@dataclass
class Outcome:
    """Payloads survived, by target; and the cases that were not."""

    survived: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)


def attack(seed: int, numbers: range, *, seconds: float = float("inf"), only: str = "") -> Outcome:
    """Carry cases out in new processes: after one that crashed, another one continues.

    Args:
        seed: of all cases. numbers: which of them. seconds: after which it ends.
        only: of targets whose name contains this.
    """
    outcome, end = Outcome(), time.monotonic() + seconds
    while numbers and len(outcome.faults) < MOST_FAULTS and time.monotonic() < end:
        last, text, why = _attack(outcome, seed, numbers, end - time.monotonic(), only)
        if not why:
            break
        outcome.faults.append(Fault(last, text, why))
        numbers = range(last + numbers.step, numbers.stop, numbers.step)
    return outcome


def _attack(outcome: Outcome, seed: int, numbers: range, seconds: float, only: str) -> tuple[int, str, str]:
    """Run one process, which says what it does; return the last case, and how the process ended, if not well."""
    settings = (seed, numbers.start, numbers.stop, numbers.step, seconds, only)
    command, last, text = [sys.executable, "-m", "tests.fuzz.worker", *map(str, settings)], numbers.stop, "start"
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            match json.loads(line):
                case ["at", last, text]:
                    pass
                case ["survived", name, payloads]:
                    outcome.survived[name] += payloads
                case ["failed", why]:
                    outcome.faults.append(Fault(last, text, why))
        code = process.wait()
        errors.seek(0)
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return last, text, f"{ended}\n{errors.read()[-2000:]}".rstrip() if code else ""


def main() -> int:
    """Run the command; 1 if anything was not survived."""
    options, begun = _parser().parse_args(), time.monotonic()
    total = Outcome()
    for numbers in _chunks(options):
        seconds = 60 * (options.minutes or float("inf")) - (time.monotonic() - begun)
        if seconds <= 0 or len(total.faults) >= MOST_FAULTS:
            break
        with ThreadPoolExecutor(options.jobs) as pool:
            parts = [range(numbers.start + job, numbers.stop, options.jobs) for job in range(options.jobs)]
            for done in pool.map(partial(attack, options.seed, seconds=seconds, only=options.only), parts):
                total.survived.update(done.survived)
                total.faults += done.faults
        _say(f"{sum(total.survived.values())} survived after {time.monotonic() - begun:.0f} s")
    for fault in total.faults:
        only = f" --only {options.only!r}" if options.only else ""
        again = f"python -m tests.fuzz --seed {options.seed} --case {fault.number}{only}"
        _say(f"NOT SURVIVED: {fault.text}\n  {fault.why}\n  again: {again}")
    for name, count in sorted(total.survived.items()):
        _say(f"{count:>9}  {name}")
    encoded = sum(count for name, count in total.survived.items() if name.startswith("encode "))
    decoded, seconds = sum(total.survived.values()) - encoded, time.monotonic() - begun
    _say(f"{decoded:>9}  payloads survived in all, seed {options.seed}, {seconds:.0f} s")
    _say(f"{encoded:>9}  tensors to encode survived\n{len(total.faults):>9}  not survived")
    return 1 if total.faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long (default: until --count)")
    parser.add_argument(
        "--count",
        type=int,
        help="how many cases, most of one payload, some of four (default: 20000, or no limit with --minutes)",
    )
    parser.add_argument("--seed", type=int, default=0, help="other payloads (default: 0)")
    parser.add_argument("--case", type=int, help="one case of the seed alone, as a fault names it")
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    return parser


def _chunks(options: argparse.Namespace) -> list[range]:
    if options.case is not None:
        return [range(options.case, options.case + 1)]
    count = options.count or (20_000 if options.minutes is None else 10**9)
    size = CHUNK * options.jobs
    return [range(start, min(count, start + size)) for start in range(0, count, size)]


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
