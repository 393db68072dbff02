"""Machines that meet on this one, and what they do with bytes of others."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowbit.config import ConfigError
from lowbit.doctor import channel as channels
from lowbit.doctor.channel import Channel, SecretError, StrangerError, read
from lowbit.doctor.cluster import check_file, write_cluster
from lowbit.doctor.command import rows_of
from lowbit.doctor.messages import Door, Facts, Finding, MachineRow
from lowbit.doctor.ports import DROPPED, OPEN, OTHER, REFUSED, Ports, knock
from lowbit.doctor.settings import DoctorSettings
from lowbit.doctor.speed import speed
from tests.command_line import invoke
from tests.doctor.machines import RECIPE, TEXT, start

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


def pair_of_channels(first: bytes = b"s", second: bytes = b"s") -> tuple[Channel, Channel]:
    ends = socket.socketpair(socket.AF_UNIX)
    # These have no TCP_NODELAY.
    tcp = [_Tcp(end) for end in ends]
    made: list[Channel] = []
    thread = threading.Thread(target=lambda: made.append(Channel(tcp[1], accepted=True, secret=second)))  # pyright: ignore
    thread.start()
    connected = Channel(tcp[0], accepted=False, secret=first)  # pyright: ignore
    thread.join()
    return connected, made[0]


class _Tcp:
    """A socket without options of TCP."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def setsockopt(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)


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
        "doctor.json", environment={"LOWBIT_SECRET": ""},
    )  # fmt: skip
    page = " ".join(machine.page(150).split())
    assert machine.code == 0, machine.said()
    assert "[/x]desk" in page, "text of a machine is no markup"
    assert "LOWBIT_SECRET is not set" in (tmp_path / "a" / "doctor.html").read_text()
    assert "LOWBIT_SECRET is not set" in page
    assert "tflops = " in (tmp_path / "a" / "cluster.toml").read_text()


def test_a_host_that_does_not_answer(tmp_path: Path):
    """Nothing listens there; the page names it."""
    port = free_port()
    machine = start(
        tmp_path / "a", "--meet", f"127.0.0.1:{port}", "--machines", "2", "--wait", "1", "--name", "desk", "run.toml"
    )
    page = " ".join(machine.page().split())
    assert machine.code == 1
    assert f"STOPS desk: 1 of 2 machines did not come to 127.0.0.1:{port} within 1 s" in page


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"\x00" * 400])
def test_a_foreign_program_on_the_port(greeting: bytes, tmp_path: Path):
    def work(connection: socket.socket) -> None:
        connection.sendall(greeting)
        time.sleep(8)

    with answering(work) as port:
        machine = start(tmp_path / "a", "--meet", f"127.0.0.1:{port}", "run.toml")
        machine.page()
    assert machine.code == 1
    assert machine.said().count("error:") == 1
    assert f"what answers at 127.0.0.1:{port} is of no use" in machine.said()


def test_a_program_that_hangs_up(tmp_path: Path):
    with answering(lambda connection: None) as port:
        machine = start(tmp_path / "a", "--meet", f"127.0.0.1:{port}", "run.toml")
        machine.page()
    assert machine.code == 1
    assert f"127.0.0.1:{port} is taken by another program" in machine.said()


def test_ports_are_told_apart():
    own = Ports("here", b"s", 41000, 41070)
    mute = socket.create_server(("127.0.0.1", 0))
    try:
        doors = [Door(id="here", addresses=("127.0.0.1",), ports=own.numbers)]
        assert {state for *_, state in knock(doors, b"s")} == {OPEN}
        assert {state for *_, state in knock(doors, b"another")} == {OTHER}
        other = [Door(id="there", addresses=("127.0.0.1",), ports=own.numbers[:1])]
        assert knock(other, b"s")[0][3] == OTHER
        closed = Door(id="here", addresses=("127.0.0.1",), ports=(free_port(), mute.getsockname()[1]))
        assert [state for *_, state in knock([closed], b"s")] == [REFUSED, OTHER]
    finally:
        own.close()
        mute.close()
    assert DROPPED == "dropped", "tests/doctor/test_network.py has it"


def test_messages_pass_both_ways():
    first, second = pair_of_channels()
    first.send({"a": [1, "text\x1b[31m"]})
    assert second.receive(1) == {"a": [1, "text\\x1b[31m"]}
    second.send({"b": None})
    assert first.receive(1) == {"b": None}


def test_another_secret_is_noticed_by_both():
    first, second = pair_of_channels(b"one", b"two")
    first.send({})
    with pytest.raises(SecretError):
        second.receive(1)
    second.send({})
    with pytest.raises(SecretError):
        first.receive(1)


def test_a_changed_or_repeated_message_is_refused():
    first, second = pair_of_channels()
    first.send({"a": 1})
    second.receive(1)
    body = json.dumps({"a": 2}).encode()
    first.connection.sendall(channels._HEAD.pack(len(body), b"x" * 16) + body)
    with pytest.raises(StrangerError, match="somebody has changed"):
        second.receive(1)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"1", b"[" * 5000, b'{"a": ' * 900 + b"1" + b"}" * 900, b'"' + b"x" * 100, b"\xff\xfe", b"{}x"],
)
def test_bodies_that_are_no_message(body: bytes):
    first, second = pair_of_channels()
    first.connection.sendall(channels._HEAD.pack(len(body), first._proof(first._ends[0], 1, body)) + body)
    with contextlib.suppress(StrangerError):  # deep values are read where the recursion allows
        assert isinstance(second.receive(1), dict)


def test_random_bytes_and_a_large_length():
    for garbage in (b"\xff" * 100, *(secrets.token_bytes(64) for _ in range(20))):
        first, second = pair_of_channels()
        first.connection.sendall(garbage)
        first.connection.close()
        with pytest.raises(OSError, match="bytes|closed|secret"):
            second.receive(1)


def test_a_peer_that_drips_has_a_limit():
    first, second = pair_of_channels()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.05):
            first.connection.sendall(b"\x00")

    threading.Thread(target=drip, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        second.receive(0.4)
    ended.set()
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize(
    "change",
    [{"id": 1}, {"cores": -1}, {"cores": "two"}, {"ports": ["a"]}, {"memory_bytes": float("inf")}, {"name": "x" * 2000},
     {"settings": {"a": 1}}, {"torch": None}, {"gpus": 1.5}],
)  # fmt: skip
def test_facts_that_cannot_be(change: dict[str, Any]):
    good: dict[str, Any] = dict.fromkeys(("id", "name", "lowbit", "torch", "python", "device", "address"), "x")
    good["cores"] = 2
    assert read(Facts, good | {"unknown": 1}).cores == 2
    with pytest.raises(StrangerError, match="a value that it cannot have"):
        read(Facts, good | change)


@pytest.mark.parametrize(
    "values", [[1], [{}], [{"kind": "other"}], [{"kind": "finding", "level": "bad", "what": ""}], [{"kind": []}]]
)
def test_pages_that_cannot_be(values: list[Any]):
    with pytest.raises(StrangerError):
        rows_of(values)


def test_rows_come_back_as_they_were():
    rows = [Finding(level="stop", machine="a", what="b"), machine_row("a")]
    assert rows_of(json.loads(json.dumps([vars(row) for row in rows]))) == rows


def machine_row(name: str) -> MachineRow:
    return MachineRow(
        name=name, address="", interface="", device="CPU", cores=1, gpus=0, memory_bytes=1e9, python="", torch="",
        lowbit="", clock_ms=None, layer_seconds=0.5, layer_tokens=64, layer_overhead=0.0, tflops=0.0, optimizer_ns=1.0,
        coding=("bf16=1/2",),
    )  # fmt: skip


def test_a_file_of_the_user_is_kept(tmp_path: Path):
    path = str(tmp_path / "cluster.toml")
    assert write_cluster(path, [machine_row("a")], overwrite=False)
    assert write_cluster(path, [machine_row('b "quoted"')], overwrite=False), "unchanged since"
    text = (tmp_path / "cluster.toml").read_text()
    (tmp_path / "cluster.toml").write_text(text.replace("0.5", "0.7"))
    with pytest.raises(
        ConfigError, match="exists and was not written by lowbit, or was changed since; allowed: another file, or --ov"
    ):
        check_file(path, overwrite=False)
    result = invoke("doctor", "--meet", "127.0.0.1:29400", "--output", path)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: output is")
    assert "0.7" in (tmp_path / "cluster.toml").read_text()
    assert write_cluster(path, [machine_row("a")], overwrite=True)


def test_a_recipe_that_chooses_its_formats_is_measured(tmp_path: Path):
    recipe = RECIPE.replace('forward = "bf16"\nbackward = "bf16"', 'forward = "auto"')
    (tmp_path / "run.toml").write_text(recipe)
    (tmp_path / "text.txt").write_text(TEXT)
    found = speed(DoctorSettings(recipe=str(tmp_path / "run.toml")))
    assert not found.problem
    assert found.layer_overhead <= found.layer_seconds
    assert [text for text in found.coding if "TransformQuant" in text]


def test_long_findings_are_cut():
    assert len(Finding(level="stop", machine="m" * 999, what="w" * 999).what) == 600


def test_nothing_is_written_without_a_speed(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    assert not write_cluster(str(path), [], overwrite=False)
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            (),
            "meet is ''; allowed: the address of the first machine and a port, such as 192.168.1.10:29400; this ",
        ),
        (("--meet", "a:b"), "meet is 'a:b'"),
        (("--meet", "::1"), "meet is '::1'"),
        (("--meet", "a:70000"), "meet is 'a:70000'"),
        (("--machines", "99"), "machines is 99; allowed: at least 0 and at most 32"),
        (("--host", "a"), "hosts is ['a']; allowed: two or more, each once"),
        (("--host=-oProxyCommand=x,b",), "hosts is ['-oProxyCommand=x', 'b']"),
        (("--format", "int9"), "codec is 'int9'"),
    ],
)
def test_wrong_settings_are_one_line(words: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = invoke("doctor", *words)
    assert result.exit_code == 2, result.output
    assert line in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_environment_of_a_training_is_enough(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29444", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert DoctorSettings().place == ("192.0.2.1", 29444)
    assert DoctorSettings().count == 3
    assert DoctorSettings(meet="desk", machines=2).place == ("desk", 29400)
    assert DoctorSettings(machines=2).count == 2
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many'"):
        _ = DoctorSettings().count
