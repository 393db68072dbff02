"""One trial from start to end: a run, its fault, the ends of its ranks, the run that resumes it, and its report.

Checks: ranks end in time with one clear line each, nothing is lost, and losses are bit-identical.
"""

import contextlib
import csv
import dataclasses
import io
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lowbit_lab.network import SlowLink
from lowbit_run.config import to_toml
from lowbit_run.train import TrainConfig
from lowbit_run.train.metrics import Summary
from tests.torture.attempt import CUT_SECONDS, Attempt, Curve, Fault
from tests.torture.plan import EVERY, GRACE, HOSTS, LIMIT, MICROBATCHES, REJOIN_GONE, SHAPES, STEPS, Shape, Trial

_ERROR = re.compile(r"^(?:rank \d+: )?error: (.*)$")
_HARMLESS = re.compile(
    r"^(warning: |step \d+|boundary \d+|no checkpoint in |rank \d+ waits up to )|hostname of the client socket cannot"
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The run without a fault, and its seconds: until the first step was written down, of each, after the last."""

    curve: Curve
    summary: Summary
    seconds: float
    start: float
    step: float
    end: float

    def differences(self, curve: Curve, summary: Summary | None) -> list[str]:
        if summary is None:
            return [f"did not finish: {len(curve)} of {STEPS} steps"]
        differences = [
            f"step {ours[0]}: loss, norm {theirs[1:]} instead of {ours[1:]}"
            for ours, theirs in zip(self.curve, curve, strict=False)
            if ours != theirs
        ][:1]
        if len(curve) != len(self.curve):
            differences.append(f"{len(curve)} lines of metrics instead of {len(self.curve)}")
        for name in ("held_out_loss", "held_out_loss_codecs"):
            theirs, ours = getattr(summary, name), getattr(self.summary, name)
            if theirs is None or theirs != ours:
                differences.append(f"{name} {theirs} instead of {ours}")
        return differences


@dataclass(kw_only=True)
class Ending:
    """How one rank ended after a fault: seconds since it could have known, and exit code; None: not by itself.

    `noise`: lines that are neither errors nor harmless, tracebacks for example.
    """

    rank: int
    seconds: float | None
    code: int | None
    errors: list[str]
    noise: list[str]


def endings(attempt: Attempt, fault: Fault) -> list[Ending]:
    found = []
    for rank in range(attempt.shape.ranks):
        if rank not in fault.silenced:
            end, lines = attempt.ends.get(rank), attempt.errors(rank)
            seconds = None if end is None else round(end.at - _could_know(attempt, fault, rank), 2)
            errors = [match[1] for line in lines if (match := _ERROR.match(line))]
            noise = [line for line in lines if not (_ERROR.match(line) or _HARMLESS.search(line)) and line.strip()]
            found.append(Ending(rank=rank, seconds=seconds, code=end and end.code, errors=errors, noise=noise))
    return found


def _could_know(attempt: Attempt, fault: Fault, rank: int) -> float:
    """When the clock of a rank starts."""
    assert fault.began is not None
    if fault.trial.fault == "stop20" and rank == fault.trial.victim:
        return fault.ended or fault.began
    if fault.trial.fault == "nan":
        return float(attempt.nan_at.read_text()) if attempt.nan_at.exists() else fault.began
    if fault.trial.fault == "disk":  # nobody knows before somebody writes
        return max(fault.began, min((end.at for end in attempt.ends.values()), default=fault.began))
    return fault.began


def complaints(attempt: Attempt, fault: Fault, ends: list[Ending]) -> list[str]:
    problems = _about_ends(ends, LIMIT)
    for end in ends:
        if end.code and end.code > 0 and len(end.errors) != 1:
            problems.append(f"words: rank {end.rank} said {len(end.errors)} error lines")
        if end.noise:
            problems.append(f"noise: rank {end.rank} printed {len(end.noise)} more lines: {end.noise[-1][:100]}")
    if attempt.curve():  # all had met: then the cause can be known
        problems += _about_causes(attempt, fault, [end for end in ends if end.errors])
    return problems


def gave_up(ends: list[Ending]) -> list[str]:
    problems = _about_ends(ends, LIMIT + REJOIN_GONE + GRACE)
    problems += [f"crash: rank {end.rank} ended with 0" for end in ends if end.code == 0]
    for end in ends:
        last = (end.errors or ["nothing"])[-1]
        if "not all machines came back in time. The same command continues from" not in last:
            problems.append(f"words: the last of rank {end.rank}: {last[:300]}")
    return problems


def _about_ends(ends: list[Ending], limit: float) -> list[str]:
    problems = []
    for end in ends:
        if end.seconds is None:
            problems.append(f"hang: rank {end.rank} did not end by itself")
        elif end.seconds > limit:
            problems.append(f"late: rank {end.rank} ended after {end.seconds:.1f} s")
        if end.code is not None and end.code < 0:
            problems.append(f"crash: rank {end.rank} ended by signal {-end.code}")
    return problems


def _about_causes(attempt: Attempt, fault: Fault, ends: list[Ending]) -> list[str]:
    """Ranks that hear each other must give the same cause, and it must name a rank that the fault has hit."""
    problems = []
    cut = fault.trial.fault in ("cut", "cut5")
    if fault.trial.fault == "stop20":  # which wakes up when the others are gone, with what they knew
        ends = [end for end in ends if end.rank != fault.trial.victim]
    host = attempt.shape.host
    # Ranks hear each other through rank 0, which keeps the store: those without it find the cause each for itself.
    hit = attempt.shape.on(1) if cut else set()
    if fault.trial.victim == 0 and fault.trial.fault in ("kill", "stop", "stop20"):
        hit = {end.rank for end in ends}
    sides = [[e for e in ends if e.rank not in hit], *([e] for e in ends if e.rank in hit)]
    for side in filter(None, sides):
        causes = _causes(side)
        if len(causes) > 1:
            problems.append(f"causes: {len(causes)} different ones: {' | '.join(sorted(causes))[:300]}")
        guilty = [f"rank {fault.trial.victim}"]
        if fault.trial.fault == "nan":
            guilty = ["nan", "inf"]
        elif cut:
            guilty = [f"rank {rank}" for rank in sorted(attempt.shape.on(1 - host(side[0].rank)))]
        elif fault.trial.fault == "disk":  # which the ranks of a machine share
            guilty = [f"rank {rank}" for rank in sorted(attempt.shape.on(fault.host))]
        if blind := [c for c in causes if not any(re.search(rf"\b{g}\b", c) for g in guilty)]:
            problems.append(f"blame: {blind[0][:200]} (names none of {', '.join(guilty)})")
    return problems


def _causes(side: list[Ending]) -> set[str]:
    """The causes that ranks gave, made comparable: a failed rank omits its number, the others omit the type."""
    others = {re.sub(r"^(rank \d+ failed: )\w+: ", r"\1", end.errors[-1]) for end in side}
    own = {end.errors[-1]: f"rank {end.rank} failed: {end.errors[-1]}" for end in side}
    return others - {text for text, full in own.items() if full in others}


def lost(steps_before: int, resumed: Summary | None) -> list[str]:
    """Whether a resumed run had to start before the newest checkpoint that was complete."""
    if resumed is None:
        return []
    start, at_least = STEPS - resumed.steps_here, max(0, steps_before - 1) // EVERY * EVERY
    return [f"lost: went on from step {start}, not {at_least}"] if start < at_least else []


PATIENCE = 30.0  # seconds after which something that should have ended counts as a hang


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        wrong: its problems. began: seconds into the run when the fault came. steps: done by then. finished: the run
            reached its end in spite of the fault.
        to_error: seconds until the last survivor ended. to_recovery: until the next new step, where the run went on.
    """

    trial: Trial
    wrong: list[str] = field(default_factory=list)
    began: float = 0.0
    steps: int = 0
    finished: bool = False
    to_error: float | None = None
    to_recovery: float | None = None
    seconds: float = 0.0
    ends: list[Ending] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.wrong


def reference(shape: Shape, folder: Path) -> Reference:
    with _stage(shape.config(_fresh(folder)), folder, disk=None) as link:
        attempt = Attempt(shape, link, folder, name="whole")
        attempt.start()
        attempt.wait(attempt.began + 120, lambda now: attempt.steps() > 0)
        first = time.monotonic()
        attempt.wait(attempt.began + 120, lambda now: attempt.steps() >= STEPS)
        last = time.monotonic()
        attempt.wait(attempt.began + 120)
        summary = attempt.summary()
        if attempt.stop() or summary is None or any(end.code for end in attempt.ends.values()):
            raise RuntimeError(f"the run of shape {shape.name} fails without a fault: see {folder}")
    over = max(end.at for end in attempt.ends.values())
    start, step = first - attempt.began, (last - first) / (STEPS - 1)
    seconds = over - attempt.began
    return Reference(curve=attempt.curve(), summary=summary, seconds=seconds, start=start, step=step, end=over - last)


def run(trial: Trial, expected: Reference, folder: Path) -> Outcome:
    began = time.monotonic()
    while True:
        with contextlib.suppress(_TooLate):
            outcome = _run(trial, expected, folder)
            outcome.seconds = round(time.monotonic() - began, 1)
            return outcome
        trial = dataclasses.replace(trial, share=0.5 * trial.share)


def _run(trial: Trial, expected: Reference, folder: Path) -> Outcome:
    shape, outcome = SHAPES[trial.shape], Outcome(trial=trial)
    disk = shape.host(trial.victim) if trial.fault == "disk" else None
    with _stage(shape.config(_fresh(folder)), folder, disk=disk) as link:
        attempt = Attempt(shape, link, folder, name="first", words=trial.words)
        if trial.fault == "nan":
            attempt.nan[trial.victim] = int(((trial.step or 0) % STEPS + trial.share) * MICROBATCHES)
        if trial.fault == "late":
            attempt.late[trial.victim] = trial.pause
        fault = Fault(trial, attempt)
        _disturb(attempt, fault, expected, outcome)
        _judge(attempt, fault, expected, outcome)
    return outcome


class _TooLate(Exception):
    """The run was over before its fault came: nobody would wait for a machine that comes back."""


@contextmanager
def _stage(config: TrainConfig, folder: Path, *, disk: int | None) -> Iterator[SlowLink]:
    """Two hosts with a configuration and a folder each; `disk`: the host whose folder is a small disk of its own."""
    (folder / "config.toml").write_text(to_toml(config))
    hosts = [_fresh(folder / f"host-{host}") for host in range(HOSTS)]
    with contextlib.ExitStack() as undo:
        if disk is not None:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={64 << 20}", "torture", str(hosts[disk])], check=True)
            undo.callback(subprocess.run, ["umount", "--lazy", str(hosts[disk])], check=True)
        yield undo.enter_context(SlowLink(hosts=HOSTS, rate_mbit=100))


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _disturb(attempt: Attempt, fault: Fault, expected: Reference, outcome: Outcome) -> None:
    """Start, let the fault come, and wait for the end; nothing runs afterwards."""
    trial = fault.trial
    attempt.start()
    if trial.fault not in ("nan", "late"):  # which come with a step, and with the start
        _await_moment(attempt, trial, expected)
    outcome.steps = len(attempt.curve())
    fault.begin()
    assert fault.began is not None
    outcome.began = round(fault.began - attempt.began, 2)
    rest = 2 * expected.seconds + (CUT_SECONDS + 3 * LIMIT if trial.supervised else LIMIT)

    def watch(now: float) -> bool:
        fault.tick(now)
        if trial.fault == "nan" and not attempt.nan_at.exists():
            outcome.steps, outcome.began = attempt.steps(), round(now - attempt.began, 2)
        if outcome.to_recovery is None and outcome.steps and attempt.steps() > outcome.steps + 1:
            outcome.to_recovery = round(now - attempt.began - outcome.began, 2)
        return False

    attempt.wait(fault.began + rest + PATIENCE, watch)
    fault.end()
    attempt.stop()
    if attempt.nan_at.exists():
        outcome.began = round(float(attempt.nan_at.read_text()) - attempt.began, 2)
    outcome.ends = endings(attempt, fault)
    outcome.finished = all(end.code == 0 for end in outcome.ends)


def _await_moment(attempt: Attempt, trial: Trial, expected: Reference) -> None:
    """Return when it is time for the fault, with a process there that it can hit."""
    limit = attempt.began + 10 * expected.seconds
    rest = expected.start
    if (step := trial.step) is not None:
        rest = expected.end if step == STEPS else expected.step
        attempt.wait(limit, lambda now: bool(attempt.ends) or attempt.steps() >= step)
    moment = time.monotonic() + trial.share * rest
    attempt.wait(moment, lambda now: bool(attempt.ends))
    attempt.wait(limit, lambda now: bool(attempt.ends) or attempt.trainer(trial.victim) is not None)
    over = trial.fault in ("machine", "gone") and attempt.summary() is not None
    if over or any(end.code == 0 for end in attempt.ends.values()):
        raise _TooLate


def _judge(attempt: Attempt, fault: Fault, expected: Reference, outcome: Outcome) -> None:
    """The run went on, or ended as it should and goes on when it is told to."""
    trial = outcome.trial
    if trial.fault == "gone":
        if not outcome.finished:  # else the machine was no longer needed
            outcome.wrong += gave_up(outcome.ends)
            _go_on(attempt, attempt.words, expected, outcome)
    elif trial.supervised or trial.fault == "late":
        outcome.wrong += expected.differences(attempt.curve(), attempt.summary())
        for rank in range(attempt.shape.ranks):
            end = attempt.ends.get(rank)
            if end is None or end.code:
                how = "hangs" if end is None else f"ended with {end.code}"
                outcome.wrong.append(f"{trial.mode}: rank {rank} {how}")
    elif outcome.finished and not fault.silenced:
        outcome.wrong += expected.differences(attempt.curve(), attempt.summary())
    else:
        outcome.wrong += complaints(attempt, fault, outcome.ends)
        _go_on(attempt, ("--resume=auto",), expected, outcome)


def _go_on(attempt: Attempt, words: tuple[str, ...], expected: Reference, outcome: Outcome) -> None:
    outcome.to_recovery = None
    outcome.to_error = max((end.seconds for end in outcome.ends if end.seconds is not None), default=None)
    steps = len(attempt.curve())
    again = Attempt(attempt.shape, attempt.link, attempt.folder, name="resumed", words=words)
    again.start()
    again.wait(again.began + 2 * expected.seconds + PATIENCE)
    wrong = [f"ranks {left} did not end"] if (left := again.stop()) else []
    for rank, end in again.ends.items():
        if end.code:
            wrong.append(f"rank {rank} ended with {end.code}: {' '.join(again.errors(rank)[-1:])[:300]}")
    summary = None if wrong else again.summary()
    wrong += expected.differences(again.curve(), summary)
    outcome.wrong += [*(f"resume: {each}" for each in wrong), *lost(steps, summary)]


_COLUMNS = (
    "fault", "ranks", "mode", "trials", "passed", "outcome", "error_seconds_median", "error_seconds_largest",
    "recovery_seconds_median", "recovery_seconds_largest",
)  # fmt: skip


def summary_line(outcome: Outcome) -> str:
    text = "passed" if outcome.passed else "FAILED: " + "; ".join(outcome.wrong)
    when = f"at {outcome.began:.1f} s, step {outcome.steps}"
    return f"{outcome.trial.name} {when}: {_end(outcome)}: {text} ({outcome.seconds:.0f} s)"


def _end(outcome: Outcome) -> str:
    if outcome.finished:
        return "finished"
    seconds = "never" if outcome.to_error is None else f"after {outcome.to_error:.1f} s"
    causes = {cause for end in outcome.ends for cause in end.errors}
    return f"ended {seconds} with {' | '.join(sorted(causes)) or 'no word'}"


def table(outcomes: Sequence[Outcome]) -> str:
    """The columns of `docs/results/data/reliability.csv`."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.trial.number):
        trial = outcome.trial
        groups.setdefault((trial.fault, trial.shape.replace("x", " × "), trial.mode), []).append(outcome)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for key, group in groups.items():
        ends = Counter("went on" if outcome.finished else "ended" for outcome in group)
        ends.update(f"FAILED {kind}" for o in group for kind in {wrong.partition(":")[0] for wrong in o.wrong})
        counts = (len(group), sum(outcome.passed for outcome in group))
        words = ", ".join(f"{count} {kind}" for kind, count in ends.items())
        times = [[o.to_error for o in group], [o.to_recovery for o in group]]
        writer.writerow([*key, *counts, words, *(cell for each in times for cell in _spread(each))])
    return text.getvalue()


def _spread(values: Sequence[float | None]) -> tuple[str, str]:
    known = [value for value in values if value is not None]
    return (f"{statistics.median(known):.1f}", f"{max(known):.1f}") if known else ("", "")
