"""One trial from start to end: a run, its fault, what the ranks say of it, and the run that goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.network import SlowLink
from tests.torture import faults
from tests.torture.attempt import POLL, Attempt
from tests.torture.checks import LIMIT, Ending, Reference, complaints, endings, lost
from tests.torture.faults import Fault
from tests.torture.plan import MICROBATCHES, SHAPES, STEPS, Shape, Trial, write_config

RATE = 100  # Mbit/s
RESUME = ("--resume",)
SUPERVISE = ("--supervise",)
_PATIENCE = 30.0  # seconds after which something that should have ended counts as a hang


@dataclass(kw_only=True)
class Outcome:
    """What became of a trial.

    Attributes:
        wrong: what it should not have shown; empty: passed.
        began: seconds into the run when the fault came; steps: done by then, and `steps_after` before the run ended.
        finished: the run reached its end in spite of the fault.
        to_error: seconds until the last survivor ended. to_recovery: seconds until the next new step, where the run is
            supervised or went on. lost_seconds: more than undisturbed. restarts: of supervised ranks together.
        resumed_from: step.
    """

    trial: Trial
    wrong: list[str] = field(default_factory=list)
    began: float = 0.0
    steps: int = 0
    steps_after: int = 0
    finished: bool = False
    to_error: float | None = None
    to_recovery: float | None = None
    lost_seconds: float | None = None
    restarts: int = 0
    resumed_from: int | None = None
    ends: list[Ending] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all was as it must be."""
        return not self.wrong


def reference(shape: Shape, folder: Path) -> Reference:
    """The run of a shape that nothing disturbs."""
    with _stage(shape, folder, disk=None) as link:
        attempt = Attempt(shape, link, folder, name="whole")
        attempt.start()
        attempt.wait(time.monotonic() + 120)
        if attempt.stop() or any(end.code for end in attempt.ends.values()):
            raise RuntimeError(f"the run of shape {shape.name} fails without a fault: see {folder}")
        summary = attempt.summary()
    assert summary is not None
    assert summary.held_out_loss is not None
    assert summary.held_out_loss_codecs is not None
    return Reference(
        curve=attempt.curve(),
        held_out_loss=summary.held_out_loss,
        held_out_loss_codecs=summary.held_out_loss_codecs,
        seconds=max(end.at for end in attempt.ends.values()) - attempt.began,
    )


def run(trial: Trial, expected: Reference, folder: Path) -> Outcome:
    """Carry out a trial. What it leaves in `folder` explains a failure."""
    while True:
        with contextlib.suppress(_TooLate):
            return _run(trial, expected, folder)
        trial = dataclasses.replace(trial, moment=0.8 * trial.moment)


def _run(trial: Trial, expected: Reference, folder: Path) -> Outcome:
    shape, outcome = SHAPES[trial.shape], Outcome(trial=trial)
    disk = shape.host(trial.victim) if trial.fault == "disk" else None
    with _stage(shape, folder, disk=disk) as link:
        words = SUPERVISE if trial.supervised else ()
        attempt = Attempt(shape, link, folder, name="first", words=words)
        if trial.fault == "nan":
            attempt.nan[trial.victim] = int(trial.moment * STEPS * MICROBATCHES)
        fault = Fault(trial, attempt)
        _disturb(attempt, fault, expected, outcome)
        judge = _judge_supervised if trial.supervised else _judge_plain
        judge(attempt, fault, expected, outcome)
    return outcome


class _TooLate(Exception):
    """The run had ended before its fault came."""


@contextmanager
def _stage(shape: Shape, folder: Path, *, disk: int | None) -> Iterator[SlowLink]:
    """Two hosts with a configuration and a folder each; `disk`: the host whose folder is a small disk of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    write_config(shape.config(folder), _made(folder) / "config.toml")
    hosts = [_made(folder / f"host-{host}") for host in range(2)]
    if disk is not None:
        faults.mount(hosts[disk])
    try:
        with SlowLink(hosts=2, rate_mbit=RATE) as link:
            yield link
    finally:
        if disk is not None:
            faults.unmount(hosts[disk])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _disturb(attempt: Attempt, fault: Fault, expected: Reference, outcome: Outcome) -> None:
    """Start, let the fault come, and wait for the end; nothing runs afterwards."""
    trial = fault.trial
    attempt.start()
    if trial.fault != "nan":  # which comes with a step
        attempt.wait(attempt.began + trial.moment * expected.seconds)
        while trial.supervised and attempt.trainer(trial.victim) is None and attempt.running():
            time.sleep(POLL)
        if not attempt.running():
            raise _TooLate
    outcome.steps = len(attempt.curve())
    fault.begin()
    assert fault.began is not None
    outcome.began = round(fault.began - attempt.began, 2)
    rest = 2 * expected.seconds + (
        faults.CUT_SECONDS["cut"] + 3 * LIMIT if trial.supervised else LIMIT
    )

    def watch(now: float) -> None:
        fault.tick(now)
        if (
            outcome.to_recovery is None
            and outcome.steps
            and len(attempt.curve()) > outcome.steps + 1
        ):
            outcome.to_recovery = round(now - attempt.began - outcome.began, 2)

    attempt.wait(fault.began + rest + _PATIENCE, watch)
    fault.end()
    attempt.stop()
    outcome.steps_after = len(attempt.curve())
    if attempt.nan_at.exists():
        outcome.began = round(float(attempt.nan_at.read_text()) - attempt.began, 2)
    outcome.ends = endings(attempt, fault)
    outcome.finished = all(end.code == 0 for end in outcome.ends)


def _judge_plain(attempt: Attempt, fault: Fault, expected: Reference, outcome: Outcome) -> None:
    """The run went on, or ended as it should and goes on when it is told to."""
    if outcome.finished and not fault.silenced:
        outcome.wrong += expected.differences(attempt.curve(), attempt.summary())
        return
    outcome.to_recovery = None
    outcome.to_error = max(
        (end.seconds for end in outcome.ends if end.seconds is not None), default=None
    )
    outcome.wrong += complaints(attempt, fault, outcome.ends)
    again = Attempt(attempt.shape, attempt.link, attempt.folder, name="resumed", words=RESUME)
    again.start()
    again.wait(again.began + 2 * expected.seconds + _PATIENCE)
    if left := again.stop():
        outcome.wrong.append(f"resume: ranks {left} did not end")
    for rank, end in again.ends.items():
        if end.code:
            outcome.wrong.append(
                f"resume: rank {rank} ended with {end.code}: {' '.join(again.errors(rank)[-1:])[:300]}"
            )
    summary = None if left or any(end.code for end in again.ends.values()) else again.summary()
    outcome.wrong += [f"resume: {each}" for each in expected.differences(again.curve(), summary)]
    outcome.wrong += lost(outcome.steps_after, summary)
    outcome.resumed_from = STEPS - summary.steps_here if summary else None


def _judge_supervised(
    attempt: Attempt, fault: Fault, expected: Reference, outcome: Outcome
) -> None:
    """The run reached its last step by itself."""
    outcome.wrong += expected.differences(attempt.curve(), attempt.summary())
    for rank in range(attempt.shape.ranks):
        end = attempt.ends.get(rank)
        if end is None or end.code:
            outcome.wrong.append(
                f"supervised: rank {rank} {'hangs' if end is None else f'ended with {end.code}'}"
            )
        outcome.restarts += max(0, len(attempt.started(rank)) - 1)
    if attempt.ends:
        whole = max(end.at for end in attempt.ends.values()) - attempt.began
        outcome.lost_seconds = round(whole - expected.seconds, 2)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """All of it, for a file."""
    return dataclasses.asdict(outcome) | {"passed": outcome.passed}
