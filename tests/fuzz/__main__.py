"""Attack decoders in processes that may crash, and say what they survived."""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .attack import MOST_FAULTS, Outcome, attack

CHUNK = 100_000  # cases of a process
_say = partial(print, flush=True)


def main() -> int:
    """Run the command; 1 if anything was not survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, help="how long (default: until --count)")
    add("--count", type=int, help="how many cases, of one payload or four (default: 20000, no limit with --minutes)")
    add("--seed", type=int, default=0, help="other payloads (default: 0)")
    add("--case", type=int, help="one case of the seed alone, as a fault names it")
    add("--only", default="", help="targets whose name contains this")
    add("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    options, begun, total = parser.parse_args(), time.monotonic(), Outcome()
    cases = range(options.count or (20_000 if options.minutes is None else 10**9))
    if options.case is not None:
        cases = range(options.case, options.case + 1)
    for start in range(0, len(cases), CHUNK * options.jobs):
        numbers = cases[start : start + CHUNK * options.jobs]
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


if __name__ == "__main__":
    sys.exit(main())
