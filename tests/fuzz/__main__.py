"""Attack decoders in processes that may crash, and say what they survived."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .notes import Fault, Note, Outcome

CHUNK = 100_000  # cases of a process
SILENCE = 300.0  # seconds that a case may take, kernels compiled meanwhile
MOST_FAULTS = 10
ROOT = Path(__file__).parents[2]


def attack(seed: int, numbers: range, *, seconds: float = float("inf"), only: str = "") -> Outcome:
    """Carry cases out in new processes: behind one that crashed, another one goes on.

    Args:
        seed: of all cases. numbers: which of them. seconds: after which it ends.
        only: of targets whose name contains this.
    """
    total, end = Outcome(), time.monotonic() + seconds
    while numbers and len(total.faults) < MOST_FAULTS and time.monotonic() < end:
        outcome, last = _attack(seed, numbers, end - time.monotonic(), only)
        total.add(outcome)
        if last is None:
            break
        numbers = range(last + numbers.step, numbers.stop, numbers.step)
    return total


def _attack(seed: int, numbers: range, seconds: float, only: str) -> tuple[Outcome, int | None]:
    """One process: what it did, and at which case it ended before its time, if it did."""
    with tempfile.TemporaryDirectory() as folder:
        note, result = Path(folder, "note"), Path(folder, "result")
        noted = Note(note)
        command = [sys.executable, "-m", "tests.fuzz", "--worker", str(note), str(result), str(seed)]
        command += [str(n) for n in (numbers.start, numbers.stop, numbers.step, seconds)]
        process = subprocess.Popen([*command, only], stderr=subprocess.PIPE, text=True, cwd=ROOT)
        why = _wait(process, noted)
        outcome, (number, text) = Outcome.load(result), noted.read()
        if not why:
            return outcome, None
        outcome.faults.append(Fault(number=number, text=text or "start", why=why))
        return outcome, number if number >= 0 else numbers.stop


def _wait(process: subprocess.Popen[str], note: Note) -> str:
    """Until it ends, or is at one case for too long; why it did not end well."""
    last, since = note.read(), time.monotonic()
    while True:
        try:
            _, told = process.communicate(timeout=1.0)
            break
        except subprocess.TimeoutExpired:
            if note.read() != last:
                last, since = note.read(), time.monotonic()
            elif time.monotonic() - since > SILENCE:
                process.kill()
                process.communicate()
                return f"no end within {SILENCE:.0f} s"
    code = process.returncode
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{ended}\n{told[-2000:]}".rstrip() if code else ""


def main() -> int:
    """Run the command; 1 if anything was not survived."""
    if sys.argv[1:2] == ["--worker"]:
        from . import worker

        note, result, seed, start, stop, step, seconds, only = sys.argv[2:]
        numbers = range(int(start), int(stop), int(step))
        worker.main(note, result, int(seed), numbers, float(seconds), only)
        return 0
    options, begun = _parser().parse_args(), time.monotonic()
    total = Outcome()
    for numbers in _chunks(options):
        seconds = 60 * (options.minutes or float("inf")) - (time.monotonic() - begun)
        if seconds <= 0 or len(total.faults) >= MOST_FAULTS:
            break
        total.add(_side_by_side(options, numbers, seconds))
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


def _side_by_side(options: argparse.Namespace, numbers: range, seconds: float) -> Outcome:
    """Every process takes each so manieth case."""
    jobs, total = options.jobs, Outcome()
    with ThreadPoolExecutor(jobs) as pool:
        parts = [range(numbers.start + j, numbers.stop, jobs) for j in range(jobs)]
        work = [pool.submit(attack, options.seed, p, seconds=seconds, only=options.only) for p in parts]
        for done in work:
            total.add(done.result())
    return total


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
