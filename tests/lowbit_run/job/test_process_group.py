"""Ranks that meet at a store, prove that they belong to a run, and join."""

import contextlib
import logging
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from lowbit.wire.pytorch import default_group
from lowbit.wire.store import of_attempt
from lowbit_run.config import ConfigError
from lowbit_run.job import process_group
from lowbit_run.job.process_group import (
    AloneError,
    MeetingError,
    connect,
    interface_problem,
    interface_towards,
    is_launched,
    joined,
    listen,
    master_port,
    meet,
    new_secret,
    prove,
    world,
)
from tests.forked import CONTEXT, run_script
from tests.processes import Ranks, on_ranks


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port, where the ranks of a run meet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        found = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(found))
    return found


def test_a_store_listens_where_it_was_asked_to_only(caplog: pytest.LogCaptureFixture):
    store = listen("127.0.0.1", 0, timeout=5)
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
    with caplog.at_level(logging.WARNING):  # unless that is no address of this machine
        store = listen("192.0.2.1", 0, timeout=5)
    assert "192.0.2.1 is not an address of this machine" in caplog.text
    socket.create_connection(("127.0.0.2", store.port), timeout=5).close()


def test_a_port_that_is_taken_is_an_error_at_once(port: int):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(MeetingError, match="rank 0 cannot listen at .*Address already in use"),
    ):
        meet(0, 2, timeout=5, patience=5)


@pytest.mark.slow
def test_a_rank_that_waits_says_for_whom_and_where(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("lowbit_run.job.process_group._QUIET_SECONDS", 0.3)
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        with pytest.raises(AloneError, match="rank 1 did not meet all 2 ranks .* nobody answers"):
            meet(1, 2, timeout=5, patience=1.2)
        assert time.monotonic() - begin < 4
        store = meet(0, 2, timeout=5, patience=1)
        with pytest.raises(AloneError, match="within 1.2 s"):
            prove(store, 0, 2, secret=b"", patience=1.2)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("rank 1 waits up to 1 s for rank 0 at 127.0.0.1:")] == lines[:1]
    assert lines[1:] == [f"rank 0 waits up to 1 s for rank 1 to come to 127.0.0.1:{port}"]


def test_a_store_that_does_not_answer_is_tried_again(port: int):
    """Its keeper was stopped, then killed, and started again."""
    with ThreadPoolExecutor(1) as pool:
        with socket.create_server(("127.0.0.1", port)):
            met = pool.submit(meet, 1, 2, timeout=1, patience=20)
            time.sleep(1.5)
        kept = listen("127.0.0.1", port, timeout=5)
        met.result(timeout=20).set("key", "value")
        assert of_attempt(kept).get("key") == b"value"


def _keep(port: Connection) -> None:
    store = listen("127.0.0.1", 0, timeout=5)
    port.send(store.port)
    time.sleep(60)


@pytest.mark.slow
def test_a_keeper_that_was_stopped_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch):
    """Its kernel accepts connections, and PyTorch waits for an answer for ever."""
    ours, theirs = CONTEXT.Pipe()
    keeper = CONTEXT.Process(target=_keep, args=(theirs,), daemon=True)
    keeper.start()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(ours.recv()))
    os.kill(keeper.pid or 0, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(AloneError, match="within 2 s: no"):
        meet(1, 2, timeout=5, patience=2)
    assert time.monotonic() - begin < 6
    keeper.kill()


@pytest.mark.parametrize("kept_elsewhere", ["", "True"])  # by torchrun
def test_an_open_run_is_warned_of(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept_elsewhere: str
):
    monkeypatch.delenv("LOWBIT_SECRET", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", kept_elsewhere)
    monkeypatch.setattr("lowbit_run.job.process_group._LOOPBACK", ("localhost",))
    with pytest.raises(MeetingError) if kept_elsewhere else contextlib.nullcontext():
        meet(0, 2, timeout=5, patience=0.2 if kept_elsewhere else 5)
    assert "LOWBIT_SECRET is not set: whoever reaches 127.0.0.1:" in caplog.text


def _proves(secrets: dict[int, bytes], patience: float = 20) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank in secrets:
        store = PrefixStore("prove", default_group().get_group_store())
        store.set(f"hello/{rank}", str(rank))
        prove(store, rank, ranks, secret=secrets[rank], patience=patience)


def test_ranks_with_one_secret_meet_and_who_does_not_come_is_named(ranks: Ranks):
    ranks.run(_proves, dict.fromkeys(range(3), b"a"), ranks=3)
    ranks.run(_proves, dict.fromkeys(range(2), b""))
    first, second, third = ranks.outcomes(_proves, {0: b"a", 2: b"a"}, 1, ranks=3)
    assert first.kind == third.kind == "AloneError"
    assert first.text.endswith("within 1 s: rank 1 did not join")
    assert second is None


@on_ranks(3)
def test_who_does_not_know_the_secret_is_named_on_all_ranks() -> None:
    rank = dist.get_rank()
    strangers = "rank 0, rank 2" if rank == 1 else "rank 1"
    expected = f"^{strangers} did not prove knowledge of this run's secret to rank {rank}"
    with pytest.raises(MeetingError, match=expected):
        _proves({0: b"a", 1: b"", 2: b"a"})


@pytest.mark.parametrize("garbage", [b"", b"\xff\0[" * 1000], ids=["replayed", "garbage"])
@on_ranks
def test_the_proof_of_another_rank_and_garbage_prove_nothing(garbage: bytes) -> None:
    """Rank 1 writes these bytes; without any, the proof of rank 0."""
    store = PrefixStore("pretends", default_group().get_group_store())
    if dist.get_rank() == 1:
        store.set("hello/1", garbage or "0" * 32)
        store.set("proof/1", garbage or store.get("proof/0"))
        return
    store.set("hello/0", "1" * 32)
    with pytest.raises(MeetingError, match="^rank 1 did not prove knowledge of this run's secret to rank 0"):
        prove(store, 0, 2, secret=b"a", patience=20)


def test_a_store_survives_what_is_no_message():
    store = listen("127.0.0.1", 0, timeout=5)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, bytes(4096), b""):
        with socket.create_connection(("127.0.0.1", store.port), timeout=5) as stranger:
            stranger.sendall(said)
        store.set("key", said)
        assert store.get("key") == said


def test_a_launcher_keeps_the_secret_that_it_was_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOWBIT_SECRET", raising=False)
    assert len(new_secret()) == 64
    assert new_secret() != new_secret()
    monkeypatch.setenv("LOWBIT_SECRET", "mine")
    assert new_secret() == os.environ["LOWBIT_SECRET"]


def test_a_process_may_meet_again_and_a_rank_be_there_once(port: int):
    """A second run in the same processes has the store for itself; a rank that was started twice is told."""
    for number in range(2):
        first = meet(0, 2, timeout=5, patience=5, number=number)
        meet(1, 2, timeout=5, patience=5, number=number)
        first.set("number", str(number))
    assert meet(0, 2, timeout=5, patience=5, number=2).check(["number"]) is False
    with pytest.raises(AloneError, match="another process has joined as rank 1 already; was it"):
        meet(1, 2, timeout=5, patience=1, number=1)


WHOLE = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_launcher_tells_the_rank_and_half_an_environment_is_refused(environment: pytest.MonkeyPatch):
    assert world() == (0, 1)
    for name, value in WHOLE.items():
        environment.setenv(name, value)
    assert world() == (1, 3)
    for port in ("", "x", "-1", "65536", "29400.0"):
        environment.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match=f"MASTER_PORT is '{port}'; allowed: 0 to 65535"):
            master_port()
    for name in ("WORLD_SIZE", "MASTER_PORT"):
        environment.delenv(name)
    with pytest.raises(ConfigError, match="has RANK, MASTER_ADDR but not WORLD_SIZE, MASTER_PORT"):
        world()


def test_a_machine_of_several_whose_rank_was_forgotten_does_not_train_alone(environment: pytest.MonkeyPatch):
    assert not is_launched()
    environment.setenv("MASTER_ADDR", "192.0.2.1")
    environment.setenv("WORLD_SIZE", "1")
    assert not is_launched()
    environment.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="^WORLD_SIZE is 2 and RANK is not set; allowed: RANK=0 on the machine of MASTER"
    ):
        is_launched()
    environment.setenv("RANK", "1")
    assert is_launched()


@pytest.mark.slow
def test_a_program_that_takes_connections_and_says_nothing_is_not_waited_for_in_silence(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(process_group, "_TRY_SECONDS", 0.5)
    monkeypatch.setattr(process_group, "_QUIET_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", port)), caplog.at_level(logging.WARNING), pytest.raises(AloneError):
        meet(1, 2, timeout=5, patience=3)
    waits = rf"rank 1 waits up to \d s for rank 0 at 127.0.0.1:{port}: nobody answers there \(no answer within 0.5 s\)"
    assert re.search(waits, caplog.text)


def test_one_process_needs_no_launcher():
    with joined(5):
        assert dist.get_world_size() == 1
        with joined(5):  # the group there is
            assert world() == (0, 1)
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_ranks_that_do_not_come_are_waited_for_so_long_only(environment: pytest.MonkeyPatch):
    for name, value in (WHOLE | {"RANK": "0", "MASTER_PORT": "0", "WORLD_SIZE": "2"}).items():
        environment.setenv(name, value)
    with pytest.raises(ConnectionError, match=r"rank 0 did not meet all 2 ranks at 127.0.0.1:0"), joined(1):
        pass


def test_the_interface_is_the_one_that_leads_there():
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no.such.host.invalid") is None


def test_data_ports_that_nothing_reaches_are_an_error_in_time(environment: pytest.MonkeyPatch):
    """As behind a firewall: Gloo itself would try five times as long."""
    environment.setattr(dist, "init_process_group", lambda *args, **kwargs: time.sleep(20))
    begin = time.monotonic()
    expected = "rank 0 did not connect to all 1 ranks within 0.8 s: .* firewalls"
    with pytest.raises(MeetingError, match=expected), joined(1):
        pass
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("eth9", "eth9 is not an interface of this machine"),
        ("lo,eth9", "eth9 is not an interface of this machine"),
        ("lo:1\x1b[2K", r"lo:1\x1b[2K has no address"),
        ("down", "down is down"),
        ("bare", "bare has no address"),
        ("six", ""),
        ("lo", ""),
        ("lo,", ""),
        ("", ""),
    ],
)
def test_an_interface_that_gloo_cannot_use_is_named(
    environment: pytest.MonkeyPatch, tmp_path: Path, value: str, fault: str
):
    real = process_group.asked

    def asked(name: str, request: int) -> bytes:
        if name not in ("down", "bare", "six"):
            return real(name, request)
        if request == process_group._SIOCGIFADDR:
            raise OSError
        return bytes([name != "down"]).ljust(16, b"\0")

    environment.setattr(process_group, "asked", asked)
    environment.setattr(process_group, "_INTERFACES6", tmp_path / "if_inet6")
    lines = [f"{64 * '0'} 02 40 {each}\n" for each in ("20 80 bare", "20 80 six", "00 80 six")]
    (tmp_path / "if_inet6").write_text("".join(lines))
    environment.setenv("GLOO_SOCKET_IFNAME", value)
    problem = interface_problem()
    assert ": lo" in problem if fault else not problem
    assert f": {fault}; allowed: " in problem or not fault


WRONG = """
import os, time
from lowbit_run.job.process_group import joined

rank = os.environ["RANK"]
os.environ["GLOO_SOCKET_IFNAME"] = "lo" if rank == "0" else "eth9"
begin = time.monotonic()
try:
    with joined(40):
        pass
except (ValueError, RuntimeError) as error:
    print(f"{time.monotonic() - begin < 8} {type(error).__name__} {error}")
"""


def test_all_ranks_learn_at_once_whose_interface_is_wrong(tmp_path: Path):
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    output = run_script(script, ranks=2, folder=tmp_path).output.splitlines()
    wrong = "GLOO_SOCKET_IFNAME is 'eth9': eth9 is not an interface of this machine; allowed: lo"
    assert [line.partition(wrong)[0] for line in output if line] == 2 * ["True InterfaceError rank 1: "]


def test_a_name_that_leads_nowhere_is_reported_at_once(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name, value in (WHOLE | {"MASTER_ADDR": "nowhere.invalid"}).items():
        environment.setenv(name, value)
    with pytest.raises(AloneError), joined(1):
        pass
    assert caplog.messages[0].startswith("rank 1 cannot look up MASTER_ADDR, 'nowhere.invalid': ")
    environment.setenv("MASTER_ADDR", "two..dots")
    with pytest.raises(ConfigError, match="MASTER_ADDR is 'two..dots'; allowed: an address or"), joined(1):
        pass


@pytest.mark.parametrize(
    ("error", "advice"), [("unsupported gloo device", False), ("[host]: Connection timed out", True)]
)
def test_only_connections_that_fail_bring_advice_about_firewalls(
    environment: pytest.MonkeyPatch, error: str, advice: bool
):
    environment.setattr(dist, "init_process_group", mock.Mock(side_effect=RuntimeError(f"{error}\nC++")))
    with pytest.raises(MeetingError) as raised:
        connect("gloo", HashStore(), 0, 1, timedelta(seconds=1))
    assert f": {error}" in str(raised.value)
    assert ("firewalls" in str(raised.value)) == advice
