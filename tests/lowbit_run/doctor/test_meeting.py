"""Machines that meet on this one, and what they do with bytes of others."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from lowbit_run.config import ConfigError
from lowbit_run.doctor import meeting, survey
from lowbit_run.doctor.command import write_output
from lowbit_run.doctor.facts import Facts, StatementError, _coding, busy_seconds, facts, gloo, read
from lowbit_run.doctor.meeting import FirstMachineError, Meeting
from lowbit_run.doctor.settings import DoctorSettings
from lowbit_run.doctor.survey import DROPPED, OPEN, OTHER, REFUSED, Ports, probe
from lowbit_run.train import TrainConfig, from_mapping
from tests.command_line import invoke
from tests.lowbit_run.doctor.machines import start

pytestmark = pytest.mark.timeout(200)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def answering(work: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port of this machine where `work` gets each connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    work(connection)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.close()


@pytest.mark.slow
def test_three_machines_with_one_name_meet(tmp_path: Path):
    words = ("--meet", f"127.0.0.1:{free_port()}", "--machines", "3", "--name", "box", "--seconds", "0.2", "run.toml")
    machines = [start(tmp_path / str(number), *words) for number in range(3)]
    pages = [machine.page() for machine in machines]
    assert [machine.code for machine in machines] == [0, 0, 0], machines[0].said()
    assert all(name in pages[0] for name in ("box", "box-2", "box-3"))
    assert sum("cluster.toml has" in page for page in pages) == 1
    assert len({page.partition("cluster.toml has")[0].strip() for page in pages}) == 1


def test_one_machine_without_a_recipe_gives_a_cluster(tmp_path: Path):
    machine = start(
        tmp_path / "a", "--machines", "1", "--meet", f"127.0.0.1:{free_port()}", "--name", "[/x]desk", "--json",
        "doctor.json", environment={"LOWBIT_SECRET": ""}, changes={"facts.TrainConfig": _small}, speed=True,
    )  # fmt: skip
    page = " ".join(machine.page().split())
    assert machine.code == 0, machine.said()
    assert "[/x]desk" in page, "text of a machine is no markup"
    assert "LOWBIT_SECRET is not set" in (tmp_path / "a" / "doctor.html").read_text()
    assert "LOWBIT_SECRET is not set" in page
    assert "tflops = " in (tmp_path / "a" / "cluster.toml").read_text()


def _small() -> TrainConfig:
    """What is measured where no recipe names a model."""
    return from_mapping({
        "model": {"dim": 32, "layers": 2, "heads": 2}, "data": {"sequence": 32, "batch": 4},
        "pipeline": {"forward": "bf16", "backward": "bf16"},
    })  # fmt: skip


@pytest.mark.slow
def test_another_program_has_the_port(tmp_path: Path):
    """It is silent, talks, or hangs up."""

    def work(greeting: bytes, seconds: float, connection: socket.socket) -> None:
        connection.sendall(greeting)
        time.sleep(seconds)

    greetings = {"silent": (b"", 8), "talks": (b"SSH-2.0-OpenSSH_9.6\r\n" * 20, 8), "hangs-up": (b"", 0)}
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(answering(partial(work, *each))) for each in greetings.values()]
        machines = [
            start(tmp_path / name, "--meet", f"127.0.0.1:{port}", "run.toml", changes={"meeting._TRY_SECONDS": 1.5})
            for name, port in zip(greetings, ports, strict=True)
        ]
        for port, machine in zip(ports, machines, strict=True):
            machine.page()
            assert machine.code == 1
            assert machine.said().count("error:") == 1
            assert f"error: 127.0.0.1:{port} is taken by another program" in machine.said()


def test_ports_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    """Those of others are silent, say something else, or drip."""

    def drip(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)

    monkeypatch.setattr(survey, "_ANSWER_SECONDS", 0.5)
    own = Ports(41000, 41070)
    own.answer("word")
    with contextlib.ExitStack() as stack:
        stack.callback(own.close)
        works = [lambda _: time.sleep(8), lambda connection: connection.sendall(b"word\n" * 99), drip]
        others = [stack.enter_context(answering(work)) for work in works]
        places = [(1, "127.0.0.1", port) for port in (*own.numbers, free_port(), *others)]
        begin = time.monotonic()
        states, seen = probe([*places, (2, *places[0][1:])], {1: "word", 2: "another"})
        assert time.monotonic() - begin < 3
    assert states == [OPEN] * len(own.numbers) + [REFUSED, OTHER, OTHER, OTHER, OTHER]
    assert seen == {"127.0.0.1"}
    assert len(own.numbers) == 8
    assert DROPPED == "dropped", "tests/lowbit_run/doctor/test_network.py has it"


FACTS: dict[str, Any] = {
    **dict.fromkeys(("name", "lowbit", "torch", "python", "device", "address"), "x"), "cores": 2, "unknown": 1
}  # fmt: skip


def alone(stated: str) -> Meeting:
    """The first machine of three, the second of which has stated something as its facts."""
    first = Meeting.__new__(Meeting)
    first.rank, first.ranks, first.store = 0, 3, HashStore()
    first.store.set("Facts/1", stated)
    return first


@pytest.mark.parametrize(
    "stated",
    [
        "[]", "{", "1", "[" * 5000, '"' + "x" * 100, "{}x", "{}", "\x1b[31m", '{"a": ' * 900 + "1" + "}" * 900,
        json.dumps(FACTS | {"name": "x" * 2_000_000}),
        *(json.dumps(FACTS | change) for change in (
            {"cores": -1}, {"cores": "two"}, {"ports": ["a"]}, {"memory_bytes": float("inf")},
            {"ports": [1 << 16]}, {"ports": [1] * 65}, {"settings": {"a": 1}}, {"torch": None}, {"gpus": 1.5},
        )),
    ],
)  # fmt: skip
def test_an_invalid_statement_is_one_clear_error(stated: str):
    with pytest.raises(StatementError, match=r"^machine 1 \(0: the first\): \w+: .*$"):
        alone(stated).exchange(read(Facts, FACTS), 0.1)


def test_a_first_machine_that_ends_while_machines_prove_themselves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meeting, "_join", lambda settings: (0, HashStore()))
    monkeypatch.setattr(meeting, "prove", mock.Mock(side_effect=RuntimeError("Connection reset")))
    with pytest.raises(FirstMachineError, match="the first machine is gone: RuntimeError: Connection reset"):
        Meeting(DoctorSettings(meet="127.0.0.1:1", machines=1), "a")


def test_a_machine_that_states_nothing_is_left_out():
    begin = time.monotonic()
    stated = alone(json.dumps(FACTS)).exchange(read(Facts, FACTS), 0.3)
    assert 0.3 <= time.monotonic() - begin < 3
    assert {rank: facts.cores for rank, facts in stated.items()} == {0: 2, 1: 2}


def test_a_file_of_the_user_is_kept(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    settings = DoctorSettings(meet="127.0.0.1:29400", output=str(path), machines=1)
    row = {
        "kind": "machine", "name": 'b "quoted"', "address": "", "cores": 1, "gpus": 0, "memory_bytes": 1e9,
        "layer_seconds": 0.5, "layer_tokens": 64, "layer_overhead": 0.0, "tflops": 0.0, "optimizer_ns": 1.0,
        "coding": ("bf16=1/2",),
    }  # fmt: skip
    assert "was not written" in write_output(settings, [])
    assert "has the machines" in write_output(settings, [row])
    assert "has the machines" in write_output(settings, [{**row, "name": "a"}]), "unchanged since"
    before = path.read_text()
    assert "was not written again: 1 of 2 machines came" in write_output(replace(settings, machines=2), [row])
    assert path.read_text() == before
    elsewhere = replace(settings, machines=2, output=str(tmp_path / "new.toml"))
    assert "new.toml has 1 of 2 machines: lowbit plan" in write_output(elsewhere, [row])
    path.write_text(path.read_text().replace("0.5", "0.7"))
    result = invoke("doctor", "--meet", "127.0.0.1:29400", "--output", str(path), "--wait", "1")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: output is")
    assert "was changed since; allowed: another file, or --overwrite" in result.stderr
    assert "0.7" in path.read_text()
    assert "has the machines" in write_output(replace(settings, overwrite=True), [row])
    link = {"kind": "link", "first": 'b "quoted"', "second": "c", "mbit": 5, "back_mbit": None, "rtt_ms": 1}
    unknown = {**row, "name": "c", "layer_seconds": None, "tflops": None}
    line = write_output(replace(settings, overwrite=True), [row, unknown, link])
    assert 'but not c and the link of b "quoted" and c, which could not be measured: lowbit plan' in line


def test_a_report_replaces_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "run.toml"
    recipe.write_text("[run]\nsteps = 5\n")
    words = ("doctor", "--meet", f"127.0.0.1:{free_port()}", "--machines", "1")
    for more, said in (
        (["--json", "run.toml"], "run.toml is not JSON"),
        (["--json", "cluster.toml", "--output", "./cluster.toml"], "are both cluster.toml"),
    ):
        outcome = invoke(*words, *more)
        assert (outcome.exit_code, len(outcome.stderr.splitlines())) == (2, 1)
        assert said in outcome.stderr
    assert recipe.read_text() == "[run]\nsteps = 5\n"


def test_a_recipe_for_several_ranks_on_a_machine_is_not_laid_out_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text. " * 1000)
    Path("run.toml").write_text(
        '[model]\nlayers = 8\ndim = 32\nheads = 2\n[data]\ntext = "text.txt"\n'
        "[pipeline]\nranks = 4\nlayers = [3, 2, 2, 1]\n"
    )
    settings = DoctorSettings(recipe="run.toml", meet="127.0.0.1:29400", machines=2)
    found = facts(settings)
    assert (found.recipe_problem, found.needs) == ("", ())


def test_a_recipe_that_chooses_its_formats_has_them_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowbit_run.doctor.facts.coding_speed", lambda codec, *_: (1e9, 1e9))  # compiling takes long
    config = from_mapping({"pipeline": {"forward": "auto"}})
    found = _coding(DoctorSettings(), config, (1, 32, 32), torch.device("cpu"))
    assert [text for text in found if "TransformQuant" in text]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "meet is ''; allowed: the address of the first machine and a port, such as 192.168.1.10:29400; this "),
        (("--meet", "a:b"), "meet is 'a:b'"),
        (("--meet", "::1"), "meet is '::1', an IPv6 address; allowed: an IPv4 address, since Gloo listens at those"),
        (("--meet", "[fd00::1]"), "meet is '[fd00::1]', an IPv6 address"),
        (("--meet", "[fd00::1]:29400"), "meet is '[fd00::1]:29400', an IPv6 address"),
        (("--meet", "no.such.invalid"), "meet is 'no.such.invalid:29400': "),
        (
            ("--meet", "desk:29400"),
            "error: meet is 'desk:29400', which has only the IPv6 address fd00::1; allowed: an IPv4",
        ),
        (("--meet", "a:70000"), "meet is 'a:70000'"),
        (("--machines", "99"), "machines is 99; allowed: at least 0 and at most 32"),
        (("--format", "int9"), "codec is 'int9'"),
    ],
)
def test_wrong_settings_are_one_line(words: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    resolve, desk = socket.getaddrinfo, [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 29400, 0, 0))]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **by: desk if host == "desk" else resolve(host, *more, **by)
    )
    result = invoke("doctor", *words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert line in result.stderr


def test_the_environment_of_a_training_is_enough(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29444", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert (DoctorSettings().place, DoctorSettings().count) == (("192.0.2.1", 29444), 3)
    given = DoctorSettings(meet="desk", machines=2)
    assert (given.place, given.count) == (("desk", 29400), 2)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many'"):
        _ = DoctorSettings().count


def test_other_programs_keep_the_cores_busy():
    def others() -> float:
        busy, own = busy_seconds(), time.process_time()
        time.sleep(0.5)
        return busy_seconds() - busy - (time.process_time() - own)

    cores = len(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        time.sleep(0.2)
        assert 0.35 * cores < others() < 0.7 * cores
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def test_what_the_kernel_states_about_interfaces(monkeypatch: pytest.MonkeyPatch):
    found = facts(DoctorSettings(meet="127.0.0.1:29400"))
    assert found.near
    assert not found.vpn
    assert not facts(DoctorSettings(meet="203.0.113.9:29400")).near
    assert found.network == str(os.stat("/proc/self/ns/net").st_ino)

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert gloo("lo")["gloo_problem"].startswith(
        "GLOO_SOCKET_IFNAME is 'eth7': eth7 is not an interface of this machine; allowed: lo"
    )
