import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from lowbit_run.config import to_toml
from lowbit_run.job import stop
from lowbit_run.job.launch import LaunchError, RankProgram, start_one
from lowbit_run.job.stop import StopRequest
from lowbit_run.train import StepMetrics, StoppedError, TrainConfig, train
from lowbit_run.train.checkpoints.manifest import newest_step
from lowbit_run.train.checkpoints.save import Checkpoints
from lowbit_run.train.launch import _goes_on
from lowbit_run.train.trainer import LocalModel, StepSums, Trainer
from tests.lowbit_run.train.runs import LIMIT, ONE, RESUME, again, curve, losses, tiny
from tests.lowbit_run.train.test_launch import _process_of_rank, _wait_for_lines
from tests.processes import Ranks


def _stopped(config: TrainConfig, on_step: Callable[[StepMetrics], None] | None = None) -> tuple[str, int]:
    with pytest.raises(StoppedError) as stopped:
        train(config, on_step=on_step)
    return str(stopped.value), stopped.value.code


def _signal_to(rank: int, step: int, config: TrainConfig) -> tuple[str, int]:
    def send(metrics: StepMetrics) -> None:
        if metrics.step == step and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    return _stopped(config, send)


@pytest.mark.timeout(180)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(ranks: Ranks, tmp_path: Path):
    pipeline = {"forward": "aq-sgd", "backward": "TransformQuant()", "warmup_steps": 2}
    config = tiny(tmp_path, model={"layers": 2}, pipeline=pipeline, run={"steps": 9, "checkpoint_every": 100})
    whole = again(config, run={"output": str(tmp_path / "whole"), "checkpoint_every": 0})
    expected = ranks.run(losses, whole, timeout=LIMIT)[0]
    text = "rank 1 got SIGTERM; stopped after step 5, which is saved"
    assert ranks.run(_signal_to, 1, 4, config, timeout=LIMIT) == [(text, 143)] * 2
    assert newest_step(Path(config.run.output) / "checkpoints") == 5
    resumed = ranks.run(losses, again(config, run=RESUME), timeout=LIMIT)[0]
    assert curve(config) == curve(whole)
    assert resumed == expected[5:]


def _signal_in(place: str, config: TrainConfig) -> tuple[str, int]:
    """The signal comes while this rank runs the function `place` for the first time."""
    owner, name = {
        "save": (Checkpoints, "save"),
        "load": (LocalModel, "_build_modules"),
        "evaluate": (Trainer, "evaluate"),
    }[place]
    whole, requests = getattr(owner, name), list[StopRequest]()

    class Noted(StopRequest):
        def __init__(self) -> None:
            requests.append(self)

    def interrupted(*args: object, **kwargs: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        while not requests[-1].number:  # by a thread, which may have to wait for a core
            time.sleep(0.001)
        return whole(*args, **kwargs)

    with mock.patch.object(owner, name, interrupted), mock.patch.object(stop, "StopRequest", Noted):
        return _stopped(config)


@pytest.mark.parametrize(
    ("place", "run", "text", "saved"),
    [
        ("load", {}, "stopped before the first step", None),
        ("save", {"checkpoint_every": 2}, "stopped after step 2, which is saved", 2),
        ("evaluate", {"eval_every": 2}, "stopped after step 2, which is saved", 2),
        ("evaluate", {"eval_every": 2, "checkpoint_every": 0},
         "stopped after step 2, which is not saved: run.checkpoint_every is 0", None),
    ],
)  # fmt: skip
def test_a_signal_between_steps_costs_no_further_one(
    ranks: Ranks, tmp_path: Path, place: str, run: dict[str, int], text: str, saved: int | None
):
    config = tiny(tmp_path, pipeline=dict(ONE), model={"layers": 1}, run={"steps": 6, "checkpoint_every": 100} | run)
    assert ranks.run(_signal_in, place, config, ranks=1, timeout=LIMIT) == [(text, 130)]
    assert newest_step(Path(config.run.output) / "checkpoints") == saved


def _finished(config: TrainConfig) -> int:
    summary = train(config, on_step=lambda metrics: os.kill(os.getpid(), signal.SIGTERM) if metrics.step == 3 else None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return summary.steps


def test_a_signal_at_the_last_step_lets_the_run_finish(ranks: Ranks, tmp_path: Path):
    assert ranks.run(_finished, tiny(tmp_path, pipeline=dict(ONE), model={"layers": 1}), ranks=1, timeout=LIMIT) == [3]


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize("supervise", [False, True])
def test_a_launched_run_stops_and_says_how_to_resume(tmp_path: Path, supervise: bool):
    """The launcher and a rank get the signal, as from a batch system; or, supervised, only a rank."""
    run = {"steps": 400, "checkpoint_every": 300, "overwrite": False, "supervise": supervise}
    config = tiny(tmp_path, model={"layers": 2}, run=run)
    (tmp_path / "run.toml").write_text(to_toml(config))
    command = [sys.executable, "-m", "lowbit", "train", str(tmp_path / "run.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launched:
        _wait_for_lines(config.run.output, 3, lambda: launched.poll() is not None)
        os.kill(_process_of_rank(1, launched.pid), signal.SIGTERM)
        if not supervise:
            launched.send_signal(signal.SIGTERM)
        _, told = launched.communicate(timeout=60)
    step = len(curve(config))
    assert launched.returncode == 143, told
    assert newest_step(Path(config.run.output) / "checkpoints") == step < 400
    last = told.splitlines()[-1]
    assert f"stopped after step {step}, which is saved" in last
    how = f"The same command continues from step {step}" if supervise else f"--resume continues from step {step}"
    how += f", and lowbit export {config.run.output} makes a model of it"
    assert last.startswith("error: rank 1 got" if supervise else "error: interrupted by SIGTERM; ")
    assert last.endswith(how)
    assert "Starting again" not in told


@pytest.mark.parametrize(
    ("number", "code", "interrupted"),
    [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, True), (signal.SIGKILL, -9, False)],
)
def test_a_signal_to_a_rank_that_still_reads_the_text_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, interrupted: bool
):
    """It ends by the signal, as it has nothing to save; a supervisor must not start it again."""
    start, reading = subprocess.Popen, f"import os, time; os.kill(os.getpid(), {number:d}); time.sleep(60)"
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **pipes: start([sys.executable, "-c", reading], **pipes))
    with pytest.raises(LaunchError, match=f"^rank 0 was ended by {number.name}$") as ended:
        start_one(RankProgram(module="", order="", timeout=30, threads=1, grace=5))
    assert (ended.value.code, ended.value.interrupted) == (code, interrupted)


def test_who_has_a_part_of_a_checkpoint_is_told_to_copy_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("lowbit_run.train.launch.newest_step", lambda _: 7)
    config = tiny(tmp_path)
    here = f"step 7, and lowbit export {config.run.output} makes a model of it"
    for sizes in ({}, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}):
        for name, value in sizes.items():
            monkeypatch.setenv(name, value)
        assert _goes_on(config, "step {}") == here
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    copied = "once the checkpoints folders of all machines are copied into it"
    assert _goes_on(config, "step {}") == here.replace(" makes", f", {copied}, makes")


@pytest.mark.slow
def test_a_signal_while_the_other_machine_is_awaited_ends_a_rank_at_once(tmp_path: Path):
    """There is no step to wait for."""
    (tmp_path / "run.toml").write_text(to_toml(tiny(tmp_path)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "LOCAL_WORLD_SIZE": "1"}
    waiting = subprocess.Popen(
        [sys.executable, "-m", "lowbit", "train", str(tmp_path / "run.toml")],
        env=os.environ | place | {"RANK": "0", "WORLD_SIZE": "2"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert waiting.stderr is not None
        assert any("rank 0 waits up to" in line for line in waiting.stderr)
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(10) in (-signal.SIGTERM, 143)
    finally:
        waiting.kill()


PASSED_ON = """
import os, signal, socket, time
from lowbit_run.job.stop import stop_requests
ours, theirs = socket.socketpair()
ours.setblocking(False)
signal.signal(signal.SIGTERM, lambda number, frame: None)
signal.set_wakeup_fd(ours.fileno())
with stop_requests(60, lambda request: os.write(1, request.name.encode()), lambda *_: None):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
theirs.settimeout(10)
print(*theirs.recv(9))
"""


def test_signals_that_the_program_handles_reach_its_event_loop():
    done = subprocess.run([sys.executable, "-c", PASSED_ON], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"SIGINT{signal.SIGTERM:d}\n", done.stderr


FORCED = """
import sys, threading, time
from lowbit_run.job.stop import end_rank, stop_requests
with stop_requests(float(sys.argv[1]), lambda request: print(request.name, flush=True), end_rank):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("grace", "second", "text"),
    [(60, True, "it got SIGTERM after SIGTERM"), (0.5, False, "it did not end within 0.5 s of SIGTERM")],
)
def test_a_second_signal_or_the_grace_time_ends_a_rank_at_once(grace: float, second: bool, text: str):
    command = [sys.executable, "-c", FORCED, str(grace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        begin = time.monotonic()
        rank.terminate()
        rank.terminate()  # at the same moment: the same request
        assert rank.stdout.readline() == "SIGTERM\n"
        while second and time.monotonic() < begin + 1.1:
            time.sleep(0.05)
            assert rank.poll() is None
        if second:
            rank.terminate()
        _, told = rank.communicate(timeout=20)
    assert (rank.returncode, told) == (143, f"rank 0: error: ended at once: {text}\n")
    assert time.monotonic() - begin < 10


def test_a_checkpoint_is_saved_by_the_clock_of_rank_0_alone(ranks: Ranks, tmp_path: Path):
    """Another rank, whose clock may say that one is due, never decides alone."""
    config = tiny(tmp_path, model={"layers": 2}, run={"steps": 4, "checkpoint_every": 100, "keep": 9})
    for minutes, steps in ((1e-6, [1, 2, 3, 4]), (0.0, [4]), (10.0, [4])):
        timed = again(config, run={"checkpoint_minutes": minutes, "output": str(tmp_path / f"run-{minutes}")})
        ranks.run(_with_a_clock_of_its_own, timed, timeout=LIMIT)
        checkpoints = Path(timed.run.output) / "checkpoints"
        assert [int(path.name[5:]) for path in sorted(checkpoints.iterdir())] == steps
        assert all(len(list(path.iterdir())) == 2 for path in checkpoints.iterdir())


def _with_a_clock_of_its_own(config: TrainConfig) -> None:
    due = property(lambda sums: True, lambda sums, value: None)
    with mock.patch.object(StepSums, "wants_checkpoint", due) if dist.get_rank() else contextlib.nullcontext():
        train(config)
