"""What the trials are judged by, without a trial."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowbit_run.config import to_toml
from tests.command_line import invoke
from tests.torture.attempt import Attempt, End, Fault
from tests.torture.plan import FAULTS, LIMIT, PLAIN, SHAPES, STEPS, Trial, plan
from tests.torture.trial import Outcome, complaints, endings, gave_up, table


def _plan(trials: int, *, supervised: bool, seed: int = 0) -> list[Trial]:
    return plan(seed=seed, trials=trials, faults=tuple(FAULTS), ranks=(2, 4), supervised=supervised)


@pytest.mark.parametrize("supervised", [False, True])
def test_a_plan_spreads_faults_and_moments_by_number_and_seed(supervised: bool):
    trials = _plan(108, supervised=supervised)
    assert {trial.fault for trial in trials} == set(FAULTS if supervised else PLAIN)
    assert {trial.shape for trial in trials} == set(SHAPES)
    assert all(trial.victim < SHAPES[trial.shape].ranks for trial in trials)
    assert 0.05 < sum(trial.step is None for trial in trials) / len(trials) < 0.3
    assert {trial.step for trial in trials} >= {0, STEPS}
    assert len({trial.name for trial in trials}) == len(trials)
    assert trials[:9] == _plan(9, supervised=supervised) != _plan(9, supervised=supervised, seed=1)


@pytest.mark.parametrize(("shape", "supervised"), [("2", True), ("4", False), ("2x2", False)])
def test_the_command_takes_the_settings_of_a_trial(shape: str, supervised: bool, tmp_path: Path):
    (trial, *_) = (each for each in _plan(108, supervised=supervised) if each.shape == shape)
    (tmp_path / "config.toml").write_text(to_toml(SHAPES[shape].config(tmp_path)))
    result = invoke("train", "--dry-run", str(tmp_path / "config.toml"), *trial.words)
    assert result.exit_code == 0, result.stderr


def _broken(fault: str, tmp_path: Path, said: dict[int, str], after: dict[int, float]) -> Fault:
    """A run of two ranks whose victim is rank 1, ended with these lines after so many seconds."""
    trial = Trial(number=0, seed=0, fault=fault, shape="2", supervised=False, step=3, share=0.5, victim=1, pause=1.0)
    attempt = Attempt(SHAPES["2"], cast(Any, SimpleNamespace()), tmp_path, name="first")
    (tmp_path / "host-0" / "run").mkdir(parents=True)
    for rank, text in said.items():
        (tmp_path / f"first-rank-{rank}.err").write_text(text)
        attempt.ends[rank] = End(1, 100.0 + after[rank])
    line = json.dumps({"step": 0, "loss": 1.0, "grad_norm": 1.0})
    (tmp_path / "host-0" / "run" / "metrics.jsonl").write_text(f"{line}\n")
    found = Fault(trial, attempt)
    found.began, found.ended = 100.0, 120.0
    found.silenced = {1} if fault in ("kill", "gone") else set()
    return found


GOOD = "step 3 loss 5\nrank 0: error: rank 1 stopped answering\n"
MINE = "rank 1: error: rank 0 stopped answering\n"
FULL = "rank 1: error: rank 1: full\n"


@pytest.mark.parametrize(
    ("fault", "said", "after", "wrong"),
    [
        ("kill", {0: "rank 0 waits up to 7 s for rank 1 to come to 198.18.0.1:29452\n" + GOOD}, {0: 9.0}, []),
        ("kill", {0: GOOD}, {0: LIMIT + 1}, ["late"]),
        ("kill", {0: GOOD + "rank 0: error: and more\n"}, {0: 9.0}, ["words", "blame"]),
        ("kill", {0: "Traceback (most recent call last):\n" + GOOD}, {0: 9.0}, ["noise"]),
        ("kill", {0: "rank 0: error: something failed\n"}, {0: 9.0}, ["blame"]),
        ("kill", {0: ""}, {0: 9.0}, ["words"]),
        ("kill", {}, {}, ["hang"]),
        ("stop20", {0: GOOD, 1: MINE}, {0: 9.0, 1: 30.0}, []),  # who was stopped has its own clock and cause
        ("disk", {0: GOOD, 1: FULL}, {0: 2.0, 1: 1.0}, ["causes"]),  # ranks that hear each other say the same
        ("disk", {0: "rank 0: error: rank 1 failed: OSError: full", 1: "error: full"}, {0: 2.0, 1: 1.0}, []),
    ],
)
def test_ranks_end_in_time_with_one_clear_error(tmp_path: Path, fault: str, said: Any, after: Any, wrong: list[str]):
    broken = _broken(fault, tmp_path, said, after)
    found = complaints(broken.attempt, broken, endings(broken.attempt, broken))
    assert [each.partition(":")[0] for each in found] == wrong


def test_who_waits_for_a_machine_says_how_to_go_on(tmp_path: Path):
    way = "not all machines came back in time. The same command continues from step 4"
    said = f"{GOOD}error: rank 0 ended with exit code 4; {way}\n"
    well, badly = (_broken("gone", tmp_path / name, {0: x}, {0: 30.0}) for name, x in (("well", said), ("badly", GOOD)))
    assert not gave_up(endings(well.attempt, well))
    (wrong,) = gave_up(endings(badly.attempt, badly))
    assert wrong.startswith("words: the last of rank 0: rank 1 stopped")


def test_outcomes_make_a_table():
    trials = _plan(1, supervised=False) + _plan(2, supervised=True)
    outcomes = [Outcome(trial=trial, to_error=4.0 + trial.number) for trial in trials]
    outcomes[2].wrong = ["hang: rank 0 did not end by itself"]
    lines = table(outcomes).splitlines()
    assert lines[1] == "kill,2,plain,1,1,1 ended,4.0,4.0,,"
    assert lines[3].startswith('stop20,2,supervised,1,0,"1 ended, 1 FAILED hang"')
