"""One trial from start to end: a run, its fault, the ends of its ranks, and the run that resumes it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lowbit.config import to_toml
from lowbit.train import TrainConfig
from lowbit_lab.network import SlowLink
from tests.torture.attempt import Attempt
from tests.torture.checks import LIMIT, Ending, Reference, complaints, endings, gave_up, lost
from tests.torture.faults import CUT_SECONDS, Fault
from tests.torture.plan import HOSTS, MICROBATCHES, REJOIN, REJOIN_GONE, SHAPES, STEPS, Shape, Trial

RATE = 100  # Mbit/s
DISK_BYTES = 64 << 20
RESUME = ("--resume=auto",)
SUPERVISE = ("--supervise",)
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
    config = shape.config(_fresh(folder), rejoin=REJOIN_GONE if trial.fault == "gone" else REJOIN)
    with _stage(config, folder, disk=disk) as link:
        words = SUPERVISE if trial.supervised else ()
        attempt = Attempt(shape, link, folder, name="first", words=words)
        if trial.fault == "nan":
            attempt.nan[trial.victim] = int(((trial.step or 0) % STEPS + trial.share) * MICROBATCHES)
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
            size = f"size={DISK_BYTES}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "torture", str(hosts[disk])], check=True)
            undo.callback(subprocess.run, ["umount", "--lazy", str(hosts[disk])], check=True)
        yield undo.enter_context(SlowLink(hosts=HOSTS, rate_mbit=RATE))


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _disturb(attempt: Attempt, fault: Fault, expected: Reference, outcome: Outcome) -> None:
    """Start, let the fault come, and wait for the end; nothing runs afterwards."""
    trial = fault.trial
    attempt.start()
    if trial.fault != "nan":  # which comes with a step
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
    if trial.supervised and trial.fault != "gone":
        outcome.wrong += expected.differences(attempt.curve(), attempt.summary())
        for rank in range(attempt.shape.ranks):
            end = attempt.ends.get(rank)
            if end is None or end.code:
                outcome.wrong.append(f"supervised: rank {rank} {'hangs' if end is None else f'ended with {end.code}'}")
    elif outcome.finished and trial.fault != "gone" and not fault.silenced:
        outcome.wrong += expected.differences(attempt.curve(), attempt.summary())
    elif trial.fault != "gone":
        outcome.wrong += complaints(attempt, fault, outcome.ends)
        _go_on(attempt, RESUME, expected, outcome)
    elif not outcome.finished:  # else the machine was no longer needed
        outcome.wrong += gave_up(outcome.ends)
        _go_on(attempt, SUPERVISE, expected, outcome)


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
    outcome.wrong += [f"resume: {each}" for each in wrong]
    outcome.wrong += lost(steps, summary)
