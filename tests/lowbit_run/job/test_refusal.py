"""A rank that refuses its settings, before the ranks have met, is heard by those that wait for it, within seconds."""

import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowbit.wire.store import of_attempt
from lowbit_run.cli import main
from lowbit_run.config import to_toml
from lowbit_run.job import decline, process_group, refusal
from lowbit_run.job.decline import say
from lowbit_run.job.process_group import AloneError, MisplacedError, SizeError, is_own, listen, meet, prove, reach
from lowbit_run.job.refusal import RefusedError
from tests.forked import CONTEXT
from tests.lowbit_run.train.runs import tiny

SECONDS = 5  # within which the other side learns it
EVIL = "no file\x1b[2J\nerror: all is well"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a rank, at a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "LOWBIT_SECRET": "of the run"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def waits(rank: int, ranks: int = 2, *, secret: bytes = b"of the run", patience: float = 30) -> None:
    """Wait for the other ranks as a rank does."""
    prove(meet(rank, ranks, timeout=5, patience=patience), rank, ranks, secret=secret, patience=patience)


@pytest.mark.parametrize("refuses", [0, 1])
def test_a_refusal_is_heard_on_the_other_side(refuses: int, place: dict[str, str]):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits, 1 - refuses)
        begin = time.monotonic()
        say(EVIL, refuses, 2)
        with pytest.raises(RefusedError) as raised:
            waiting.result(SECONDS)
        assert time.monotonic() - begin < SECONDS
    assert str(raised.value) == rf"rank {refuses} does not come: no file\x1b[2J error: all is well"
    assert raised.value.told == (refuses == 0), "rank 0, which has the store, still passes it on"


def test_a_rank_that_comes_later_hears_it_too(place: dict[str, str]):
    with ThreadPoolExecutor(2) as pool:
        says = pool.submit(say, "no file", 0, 3)
        for rank in (1, 2):
            with pytest.raises(RefusedError, match="^rank 0 does not come: no file$"):
                waits(rank, 3)
        says.result(SECONDS)


def test_rank_0_hears_what_was_refused_while_it_was_not_ready(place: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """It may read its text for minutes; the rank that refuses does not stay that long."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    process_group.open_store()
    begin = time.monotonic()
    say("no file", 1, 2)
    assert time.monotonic() - begin < SECONDS
    with pytest.raises(RefusedError, match="^rank 1 does not come: no file$"):
        waits(0)


@pytest.mark.slow
def test_a_rank_that_waits_on_rank_0s_machine_says_so(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As where RANK=0 and RANK=1 were swapped."""
    monkeypatch.setattr(process_group, "_QUIET_SECONDS", 0.1)
    with pytest.raises(AloneError):
        meet(1, 2, timeout=1, patience=1)
    assert "this machine" not in caplog.text, "several ranks may run here"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(AloneError):
        meet(1, 2, timeout=1, patience=1)
    assert caplog.text.count("127.0.0.1 is this machine: if no other process here is rank 0, set RANK=0") == 1


def test_what_strangers_write_is_shown_and_ends_nothing(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    kept = of_attempt(listen("127.0.0.1", int(place["MASTER_PORT"]), timeout=5), "0/0")
    monkeypatch.setattr(decline, "run_secret", lambda: b"of somebody")
    say(EVIL, 1, 2)
    with caplog.at_level(logging.WARNING), pytest.raises(AloneError):
        waits(1, patience=1)
    assert caplog.text.count(r"a rank does not come: no file\x1b[2J error: all is well") == 1, "shown, once"
    for garbage in (b"\xff" * 99, b"[" * 9999, b"{}", b"[]", b"[1, 2]", b"null"):
        kept.set("refused", garbage)
        refusal.Listener(kept, 1, b"of the run").hear()


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_machines_of_different_size_are_told_on_both(sizes: tuple[int, int], place: dict[str, str]):
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(waits, rank, size) for rank, size in enumerate(sizes)]
        for rank, waiting in enumerate(ranks):
            with pytest.raises(SizeError, match=f"WORLD_SIZE is {sizes[rank]} on rank {rank} and {sizes[1 - rank]} on"):
                waiting.result(SECONDS)


@pytest.mark.slow
def test_rank_0_on_two_machines_says_which_to_set(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """This machine seems to have another address than MASTER_ADDR."""
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")
    monkeypatch.setattr(process_group, "is_own", lambda host: False)
    monkeypatch.setattr(process_group, "_ELSEWHERE_SECONDS", 0.3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits, 0, patience=2)  # behind a NAT, rank 0 finds itself there
        time.sleep(0.8)
        monkeypatch.setattr(process_group, "_kept", {})  # as on another machine
        with pytest.raises(MisplacedError, match="where a rank 0 answers; allowed here: set RANK=1"):
            reach(0, timeout=5, patience=5)
        with pytest.raises(AloneError):
            waiting.result(20)
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    store = meet(0, 2, timeout=5, patience=5)  # it came first
    real = process_group.peek
    monkeypatch.setattr(process_group, "peek", lambda at, key: b"of another" if at is not store else real(at, key))
    with pytest.raises(MisplacedError, match="another machine, where a rank 0 answers"):
        prove(store, 0, 2, secret=b"", patience=10)
    with caplog.at_level(logging.WARNING):
        listen("192.0.2.1", 0, timeout=5)
    assert "on all machines except rank 0's, set RANK=1 or more" in caplog.text


REFUSALS = {  # words and environment of the rank that refuses, and what both say
    "a wrong path": ("--data.text gone", {}, "data.text has 'gone', where there is no file"),
    "a folder that is in use": ("--run.output {taken}", {}, "which lowbit has no record of making"),
    "a slip in an option": ("--run.step 3", {}, "unknown option --run.step; did you mean --run.steps?"),
    "a wrong value": ("--run.steps 0", {}, "run.steps is 0; allowed: at least 1"),
    "no such file": ("gone.toml", {}, "configuration file gone.toml: No such file"),
    "a tokenizer that is gone": ("--data.tokenizer gone", {}, "data.tokenizer is 'gone'"),
    "too many stages": ("--pipeline.stages_per_rank 2", {}, "pipeline.stages_per_rank is 2; allowed with 1F1B: 1"),
    "an option without effect": ("--elastic.name a", {}, "elastic.name is 'a' and elastic.lighthouse is ''"),
    "a device that is not there": ("--run.device cuda", {}, "run.device is cuda"),
    "a format that is none": ("--pipeline.forward int99", {}, "pipeline.forward: codec is 'int99'"),
    "another number of machines": ("", {"WORLD_SIZE": "3"}, "WORLD_SIZE is "),
    "a rank that there is not": ("", {"RANK": "7"}, "RANK is 7; allowed with WORLD_SIZE 2: 0 to 1"),
    "half an environment": ("", {"WORLD_SIZE": ""}, "the environment has RANK, MASTER_ADDR, MASTER_PORT but not WORLD"),
}
QUICK = ("a wrong path", "another number of machines")


def command(words: list[str], environment: dict[str, str], folder: Path, rank: int) -> None:
    """`lowbit` as the process of a rank."""
    os.dup2(os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {name: value for name, value in environment.items() if value}
    os.chdir(folder)
    decline._PATIENCE = SECONDS  # also with those who never come
    main(words)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("refuses", [0, 1])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in REFUSALS])
def test_both_machines_report_it(name: str, refuses: int, place: dict[str, str], tmp_path: Path):
    words, changes, text = REFUSALS[name]
    if changes.get("RANK") and refuses == 0:
        pytest.skip("then no rank is rank 0")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").touch()
    started, begin = [], dict[int, float]()
    for rank in (1 - refuses, refuses):  # the other waits already
        config = tiny(tmp_path, run={"output": str(tmp_path / f"run-{rank}"), "timeout_seconds": 100})
        (tmp_path / f"{rank}.toml").write_text(to_toml(config))
        own = {"RANK": str(rank), "WORLD_SIZE": "2"} | (changes if rank == refuses else {})
        more = words.format(taken=tmp_path / "taken").split() if rank == refuses else []
        file = [] if more[:1] == ["gone.toml"] else [str(tmp_path / f"{rank}.toml")]
        given = (["train", *file, *more], place | own, tmp_path, rank)
        started.append(CONTEXT.Process(target=command, args=given))
        started[-1].start()
    waiting, refusing = started
    try:
        for process in (refusing, waiting):
            process.join(110)
            begin[process.pid] = time.monotonic()
    finally:
        for process in started:
            process.kill()
    told = [(tmp_path / f"errors-{rank}").read_text() for rank in range(2)]
    assert begin[waiting.pid] - begin[refusing.pid] < 4 * SECONDS, "which both spend on modules if all cores are busy"
    assert (refusing.exitcode, waiting.exitcode) == (2, 2), told
    for errors in told:
        assert text in errors, told
        assert "Connection refused" not in errors.splitlines()[-1]
