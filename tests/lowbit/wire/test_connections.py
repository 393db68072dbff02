"""Messages over several connections for each pair of ranks; what connections lose, and how they control congestion."""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lowbit.codecs import Cast, GroupInt, TransformQuant
from lowbit.collectives import DamagedError, PeerError, all_reduce
from lowbit.wire import connections, mailbox, tags
from lowbit.wire.connections import LEAST_PIECE, MOST_CONNECTIONS, Segments, connect_more, connections_of, segments
from lowbit.wire.errors import AgreementError
from lowbit.wire.messages import Messages
from lowbit.wire.pytorch import default_group
from tests.damage import Flip, on_the_way
from tests.lowbit.pipeline import toy
from tests.lowbit.wire.test_lengths import collected, conversed
from tests.processes import Ranks, impatient, on_ranks

SIZES = (0, 1, 255, 256, LEAST_PIECE - 8, LEAST_PIECE, 100_000, 131_064, 131_065, 1 << 20, 3_000_001)


def sent_round(order: int) -> None:
    """Messages of all sizes, each with other bytes, taken in another order than they were sent in."""
    messages = Messages(None, "test", timeout=20)
    there, back = (messages.rank + 1) % messages.ranks, (messages.rank - 1) % messages.ranks
    content = [torch.arange(size).add(7 * size).to(torch.uint8) for size in SIZES]
    sent = [messages.send(each + messages.rank, there) for each in content]
    expected = [(messages.expect(each.numel(), back), each + back) for each in content]
    assert all(torch.equal(message.wait(), each) for message, each in expected[::order])
    for each in sent:
        each.wait()


@pytest.mark.parametrize("count", [1, 2, 5, MOST_CONNECTIONS])
@on_ranks(3)
def test_messages_of_all_sizes_arrive(count: int) -> None:
    connect_more(None, count, timeout=20)
    sent_round(-1)


@on_ranks
def test_the_number_changes_while_nothing_is_under_way() -> None:
    for count in (3, 1, 4, 2):
        connect_more(None, count, timeout=20)
        sent_round(1)
    side = dist.new_group()
    connect_more(side, 2, timeout=20)
    assert [len(connections_of(each)) for each in (side, default_group())] == [2, 4]


def test_pieces_cover_the_class_once_each_over_another_connection():
    class Group:
        pass

    group: Any = Group()
    connections._more[group], connections._used[group] = [Group() for _ in range(6)], 5  # type: ignore[list-item]
    for nbytes in (1, 300, 70_000, 98_304, 98_305, 1 << 20, (1 << 24) + 1):
        for channel in (0, 1, 7):
            found = list(connections.pieces(group, channel, nbytes))
            if nbytes <= 300:
                assert found == [(group, slice(0, None))]
                continue
            size = tags.capacity(nbytes)
            starts, ends, _ = zip(*sorted(place.indices(size) for _, place in found), strict=True)
            assert (*starts, size) == (0, *ends)
            assert len({id(carrier) for carrier, _ in found}) == len(found) <= 5
            assert found[0][0] is connections_of(group)[channel % 5]
            assert all(place.stop - place.start >= LEAST_PIECE for _, place in found)


def widened(count: int, function: Callable[..., Any]) -> Any:
    """The result of a function on a rank whose default group has several connections."""
    connect_more(None, count, timeout=20)
    return function()


def trained() -> list[float]:
    run = toy.Run("1f1b", toy.lowbit(forward=TransformQuant(), timeout=20.0))
    return [float(gradient.double().square().sum()) for step in range(3) for gradient in run.train(step)]


def summed() -> list[float]:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(dist.get_rank()))
    outcome = []
    for codec in (Cast(dtype=torch.float32), GroupInt(bits=8)):
        y = x.clone()
        all_reduce(y, codec, timeout=20)
        outcome += [float(y.double().sum()), float(y[::97].double().square().sum())]
    return outcome


@pytest.mark.parametrize(("work", "count"), [(trained, 2), (summed, 3)])
def test_pipelines_and_collectives_compute_the_same_over_them(ranks: Ranks, work: Callable[[], Any], count: int):
    assert ranks.run(widened, 4, work, ranks=count) == ranks.run(work, ranks=count)


@pytest.mark.parametrize(("sent", "expected"), [(200_000, 64), (70_000, 90_000)])
@pytest.mark.parametrize("kind", [conversed, collected])
@on_ranks
def test_lengths_that_disagree_are_the_same_error(kind: Callable[..., None], sent: int, expected: int) -> None:
    connect_more(None, 3, timeout=20)
    kind(sent, expected)


@pytest.mark.parametrize("at", [3, 50_000, 99_999])
@on_ranks
def test_damage_to_any_piece_is_noticed(at: int) -> None:
    connect_more(None, 4, timeout=20)
    messages = Messages(None, "saving", timeout=10)
    if messages.rank == 0:
        with on_the_way(0, Flip(0, at)):
            messages.send(torch.zeros(100_000, dtype=torch.uint8), 1).wait()
    else:
        with pytest.raises(DamagedError, match="weight, number 0: the message from rank 0"):
            messages.receive(100_000, 0, "weight")


def _sockets() -> list[int]:
    """File descriptors of this process's established TCP connections."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                        found.append(int(name))
    return found


def _break(number: int, how: str) -> None:
    with socket.socket(fileno=os.dup(number)) as each:
        if how == "reset":
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        each.shutdown({"both": socket.SHUT_RDWR, "reset": socket.SHUT_RDWR, "one direction": socket.SHUT_WR}[how])


@pytest.mark.parametrize(("which", "how"), [(0, "both"), (2, "reset"), (1, "one direction")])
@on_ranks
def test_a_lost_connection_is_a_lost_peer(which: int, how: str) -> None:
    """One connection of several is shut down, reset, or hangs on the other side, in the middle of the traffic."""
    before = set(_sockets())
    connect_more(None, 4, timeout=20)
    mine = sorted(set(_sockets()) - before)
    messages = Messages(None, "test", timeout=4)
    other = 1 - messages.rank

    def talk(steps: int) -> None:
        for step in range(steps):
            sent = messages.send(torch.full((200_000,), step, dtype=torch.uint8), other)
            assert messages.receive(200_000, other).eq(step).all()
            sent.wait()

    talk(4)
    if messages.rank == 0:
        _break(mine[which], how)
    with pytest.raises(PeerError, match=f"rank {other} (closed its connection|gave up)"):
        talk(40)


@on_ranks
def test_a_piece_that_never_comes_is_a_peer_that_does_not_answer() -> None:
    """Rank 1 never sends one piece: the wait for it ends, and so do those of the other rank, on other connections."""
    connect_more(None, 4, timeout=20)
    rank, started = dist.get_rank(), mailbox._started
    messages = Messages(None, "test", timeout=10)
    dropped = connections_of(default_group())[3] if rank else None

    def start(send: Any, *args: Any) -> Any:
        return RuntimeError("dropped") if send.__self__ is dropped else started(send, *args)

    with mock.patch.object(mailbox, "_started", start):
        _kept = messages.send(torch.zeros(200_000, dtype=torch.uint8), 1 - rank)
    if rank == 1:
        messages.receive(200_000, 0)
    hurry, store = contextlib.nullcontext() if rank else impatient(0.5), default_group().get_group_store()
    with hurry, pytest.raises(PeerError, match="rank 0 closed" if rank else "rank 1"):
        messages.receive(8 if rank else 200_000, 1 - rank)
    # Until then, no connection is closed by the end of the group.
    return store.wait(["said"], timedelta(seconds=30)) if rank == 0 else store.set("said", "")


@pytest.mark.parametrize("count", [0, 33, True, "4"])
def test_other_numbers_are_refused(count: Any):
    with pytest.raises(ValueError, match=f"count is {count!r}; allowed: an integer from 1 to 32"):
        connect_more(None, count)


@on_ranks
def test_ranks_agree_on_the_number() -> None:
    with pytest.raises(AgreementError, match="connections"):
        connect_more(None, 2 + dist.get_rank(), timeout=5)


ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection between two addresses, as between two machines, and one within an address."""
    with socket.socket() as listener, socket.socket() as caller:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        caller.bind(("127.0.0.2", 0))
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()
            caller.connect(listener.getsockname())
            with listener.accept()[0] as called:
                yield caller, called


def test_segments_of_connections_to_other_addresses_are_counted(pair: tuple[socket.socket, socket.socket]):
    before = segments()
    for _ in range(20):
        pair[0].sendall(bytes(1000))
        pair[1].recv(1000)
    sent, again = segments()
    assert 1 <= sent - before.sent <= 20
    assert again - before.again <= 1


@pytest.mark.parametrize(("known", "again"), [(220, 3), (192, 10)])
def test_segments_that_arrived_twice_were_not_lost(monkeypatch: pytest.MonkeyPatch, known: int, again: int):
    info = bytearray(220)
    for offset, value in ((100, 10), (156, 5000), (216, 7)):
        struct.pack_into("I", info, offset, value)
    monkeypatch.setattr(
        connections, "_connections", lambda: [SimpleNamespace(getsockopt=lambda *_: bytes(info[:known]))]
    )
    assert segments() == (5000, again)


def test_congestion_control_can_be_changed_where_another_process_names_the_connection(
    pair: tuple[socket.socket, socket.socket],
):
    (here, there), *_ = connections.ends()
    first, *_, last = allowed = ALLOWED.read_text().split()
    for name in (*allowed, first):
        assert connections.set_congestion_control(name)
        assert connections.congestion_control() == name
        assert pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode() == name
    assert not connections.set_congestion_control(last, [["127.0.0.2 1", "127.0.0.1 1"]])
    assert connections.congestion_control() == first
    assert connections.set_congestion_control(last, [[there, here]])
    assert connections.congestion_control() == last


def test_looking_leaves_the_connections_and_no_file_open(pair: tuple[socket.socket, socket.socket]):
    before = os.listdir("/proc/self/fd")
    assert segments().sent >= 0
    control = connections.congestion_control()
    assert not connections.set_congestion_control("nosuch")
    assert connections.congestion_control() == control != ""
    assert os.listdir("/proc/self/fd") == before
    pair[0].sendall(b"there")
    assert pair[1].recv(9) == b"there"


def test_without_connections_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "_connections", lambda: iter(()))
    assert (segments(), connections.congestion_control(), connections.set_congestion_control("cubic")) == (
        (0, 0),
        "",
        False,
    )


@pytest.mark.parametrize(
    ("sent", "again", "lossy"),
    [(0, 0, False), (11_000, 3, False), (20_000, 10, True), (1_000_000, 49, False), (1_000_000, 50, True)],
)
def test_a_few_segments_sent_again_mean_nothing(sent: int, again: int, lossy: bool):
    now = Segments(500 + sent, 7 + again)
    assert connections.is_lossy(now.since(Segments(500, 7)), again) == lossy
