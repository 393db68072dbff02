import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowbit_run.job.exit_codes import ALONE, DIVERGED, FAILED, USAGE
from lowbit_run.train import ConfigError, LaunchError, TrainConfig, launch, run
from lowbit_run.train.launch import Attempts, supervise
from tests.lowbit_run.train.runs import LIMIT, again, curve, losses, tiny
from tests.lowbit_run.train.test_launch import _process_of_rank, _wait_for_lines
from tests.processes import Ranks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_supervised_run_reaches_its_last_step_bit_for_bit(ranks: Ranks, tmp_path: Path):
    """A rank is killed, and later another one stopped for good."""
    config = tiny(
        tmp_path,
        model={"layers": 2},
        pipeline={"forward": "TransformQuant()", "warmup_steps": 2},
        run={"steps": 40, "checkpoint_every": 5, "overwrite": False, "timeout_seconds": 8},
    )
    whole = again(config, run={"output": str(tmp_path / "whole"), "checkpoint_every": 0})
    expected = ranks.run(losses, whole, timeout=LIMIT)[0]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, again(config, run={"supervise": True}))
        for lines, rank, fault in ((7, 1, signal.SIGKILL), (17, 0, signal.SIGSTOP)):
            _wait_for_lines(config.run.output, lines, running.done)
            os.kill(_process_of_rank(rank), fault)
            time.sleep(1)
        summary = running.result(timeout=120)
    assert curve(config) == curve(whole)
    assert summary is not None
    assert summary.held_out_loss == expected[-1]
    assert 0 < summary.steps_here < 40


def test_what_cannot_be_mended_by_another_attempt_ends_the_run():
    assert Attempts(5, 10).give_up(USAGE, 10) == "another attempt would end in the same way"
    assert Attempts(5, 10).give_up(ALONE, 20) == "not all machines came back in time"
    twice = Attempts(5, 10)
    assert not twice.give_up(DIVERGED, 10)
    assert not twice.give_up(-signal.SIGKILL, 10)
    assert "after the same checkpoint" in twice.give_up(DIVERGED, 10)
    moving = Attempts(5, 10)
    assert not moving.give_up(DIVERGED, 10)
    assert not moving.give_up(DIVERGED, 20), "a new checkpoint lies between"


def test_attempts_count_where_they_bring_no_checkpoint():
    attempts = Attempts(2, None)
    assert [attempts.give_up(FAILED, None) for _ in range(3)] == ["", "", "gave up after 3 attempts"]
    attempts = Attempts(2, None)
    assert not any(attempts.give_up(FAILED, step) for step in (None, None, 5, 5, 9, 9))
    assert attempts.in_vain == 2
    assert attempts.pause == 2


@pytest.mark.parametrize("failures", [2, 9])
def test_failed_attempts_are_followed_by_others_that_resume_until_it_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failures: int
):
    """With real ranks: the slow tests here, and the resumed run of tests/lowbit_run/train/test_launch.py."""
    attempts: list[str | bool] = []

    def start_ranks(config: TrainConfig) -> None:
        attempts.append(config.run.resume)
        if len(attempts) <= failures:
            raise LaunchError("rank 1 was ended by SIGKILL", -9)

    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    config = tiny(tmp_path, run={"supervise": True, "restarts": 2, "overwrite": False})
    text = "^rank 1 was ended by SIGKILL; gave up after 3 attempts. The same command continues from the start$"
    with pytest.raises(LaunchError, match=text) if failures > 2 else contextlib.nullcontext():
        run(config)
    assert attempts == ["auto", "auto", "auto"]
    assert caplog.text.count("Starting again from the start") == 2


def test_an_interruption_is_no_failure(tmp_path: Path):
    def interrupted(config: object) -> None:
        raise LaunchError("interrupted by SIGTERM", interrupted=True)

    with pytest.raises(LaunchError, match="interrupted by SIGTERM"):
        supervise(tiny(tmp_path, run={"overwrite": False}), interrupted)


def test_it_is_not_for_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigError, match="torchrun --max-restarts with run.resume=auto"):
        launch.run(tiny(tmp_path, run={"supervise": True, "overwrite": False}))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_hangs_ends_the_run_in_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    config = tiny(tmp_path, model={"layers": 2}, run={"steps": 400, "timeout_seconds": 6})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, config)
        _wait_for_lines(config.run.output, 3, running.done)
        os.kill(_process_of_rank(1), signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(LaunchError, match=r"rank 1 .*all ranks were ended"):
            running.result(timeout=60)
    assert time.monotonic() - begin < 6 + 5 + 2, "its limit, and to end the processes"
    assert capfd.readouterr().err.count("error:") == 1
