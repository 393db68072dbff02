import threading
import time
from typing import Any, cast
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from lowbit.collectives import PeerError
from lowbit.wire.errors import first_line
from lowbit.wire.pytorch import default_group
from lowbit_run.job import peers as module
from lowbit_run.job.exit_codes import ALONE, FAILED
from lowbit_run.job.peers import AbsentError, Alarm, Cause, Peers
from lowbit_run.job.process_group import AloneError, MeetingError
from lowbit_run.train.worker import exit_code
from tests.processes import Failure, Ranks, on_ranks

SECRET = b"known to the ranks"
quick = mock.patch.multiple(module, _BEAT_SECONDS=0.1, _TURN_SECONDS=0.05)


def _peers(timeout: float, secret: bytes = SECRET) -> Peers:
    store = PrefixStore("peers", default_group().get_group_store())
    return Peers(store, rank=dist.get_rank(), ranks=dist.get_world_size(), timeout=timeout, secret=secret)


@quick
def _explanation(silent: int = -1) -> tuple[str, int] | None:
    """What a rank concludes when communication fails while one rank gives no sign of life."""
    peers = _peers(7)
    try:
        time.sleep(0.3)
        dist.barrier()
        if peers.rank == silent:
            return None
        error = peers.explain(RuntimeError("of this rank"))
        return None if error is None else (str(error), error.rank)
    finally:
        peers.close()  # before the watchdog ends this process: an alarm is known
        dist.barrier()


def test_the_rank_without_a_sign_of_life_is_named(ranks: Ranks):
    text = "rank 1 stopped answering: killed or stopped, or its machine or network is gone"
    assert ranks.run(_explanation, 1, ranks=3) == [(text, 1), None, (text, 1)]


def test_without_a_silent_rank_the_first_to_fail_is_the_cause(ranks: Ranks):
    outcomes = ranks.run(_explanation)
    assert outcomes.count(None) == 1
    cause = outcomes.index(None)
    assert outcomes[1 - cause] == (f"rank {cause} failed: RuntimeError: of this rank", cause)


@quick
def _blocked_for_good(timeout: float) -> None:
    """Rank 1 falls silent; the others wait for it in a way that has no limit of its own."""
    peers = _peers(timeout)
    time.sleep(0.3)
    dist.barrier()
    if dist.get_rank() == 1:
        peers.close()
    time.sleep(60)


@pytest.mark.slow
def test_the_watchdog_ends_what_nothing_else_does(ranks: Ranks):
    started = time.monotonic()
    outcomes = ranks.outcomes(_blocked_for_good, 3, ranks=3, timeout=6)
    assert outcomes[0] == outcomes[2] == Failure("ended", "exit code 1")
    assert outcomes[1].kind == "TimeoutError", "nobody is silent for it"
    assert time.monotonic() - started < 40


@on_ranks
@quick
def test_an_alarm_of_a_stranger_ends_and_hides_nothing() -> None:
    if dist.get_rank() == 0:
        store = PrefixStore("peers", default_group().get_group_store())
        store.append("alarm", '{"cause": "[]"}\n[7]\n{')
        Alarm(store, b"another secret", ["0"]).sound(Cause(1, "all is lost"))
        time.sleep(0.2)
    dist.barrier()
    peers = _peers(10)
    time.sleep(0.5)
    known = peers._known.is_set()
    dist.barrier()
    if dist.get_rank() == 0:
        peers._proposed = Cause(0, "no room")
    heard = peers._known.wait(2)
    peers.close()
    dist.barrier()
    assert not known
    assert heard


@quick
def _explained(kind: type[Exception], *arguments: object) -> str:
    """What becomes of a rank's own trouble while rank 0 knows a cause."""
    peers = _peers(10)
    dist.barrier()
    found = peers.explain(RuntimeError("gone") if dist.get_rank() else kind(*arguments))
    dist.barrier()
    peers.close()
    return type(found).__name__


def test_a_rank_within_a_group_is_nobody_else(ranks: Ranks):
    """Rank 2 of all can be rank 1 of a group; rank 1 of all has not failed then."""
    found = ranks.run(_explained, PeerError, "rank 2 closed its connection", 1)
    assert found == ["NoneType", "PeerError"], "rank 0 has the words of all already"


def test_who_gives_up_on_a_rank_says_so_to_all(ranks: Ranks):
    assert ranks.run(_explained, AloneError, "rank 2 did not come") == ["NoneType", "AbsentError"]
    assert exit_code(AbsentError("rank 2 did not come", 0)) == exit_code(AloneError("rank 1 did not come")) == ALONE
    assert exit_code(MeetingError("rank 1 did not prove")) == FAILED, "an older start of rank 1?"


NO_CAUSES = (
    *(b"", b"{}", b"[1, 2]", b"\xff", b'["x", 1, 2]', b'[Infinity, "a", false, "b"]', b"[" * 100_000, b"7"),
    '[0, "a", "\u00e4"]'.encode(),
)


def test_causes_are_signed_for_an_attempt_and_safe_to_print():
    cause = Cause(3, "rank 3 is gone")
    for each in (cause, cause._replace(alone=True)):
        assert Cause.read(each.signed(SECRET, "second").encode(), SECRET, ["second"]) == each
    written = cause.signed(SECRET, "second").encode()
    for damaged in (*NO_CAUSES, written.replace(b"false", b"true"), written.replace(b"3", b"2")):
        assert Cause.read(damaged, SECRET, ["second"]) is None, damaged
    assert Cause.read(written, b"", ["second"]) is None
    # Whoever reads the store can keep an alarm, and write it again in the next attempt.
    kept = cause.signed(SECRET, "first").encode()
    assert Cause.read(kept, SECRET, ["second"]) is None
    assert Cause.read(kept, SECRET, ["first", "second"]) == cause, "until all ranks know the attempt's name"
    unsafe = Cause.read(Cause(3, "gone \x1b[2J\u202e" + "x" * 100_000).signed(SECRET, "first"), SECRET, ["first"])
    assert unsafe is not None
    assert unsafe.text.startswith("gone \\x1b[2J\\u202exxx")
    assert len(unsafe.text) < 10_000
    assert first_line(ValueError("a\nb")) == "ValueError: a"


class _Distant:
    """A store that answers late."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def clone(self) -> "_Distant":
        return _Distant(self._store.clone())

    def __getattr__(self, name: str) -> Any:
        time.sleep(0.2)
        return getattr(self._store, name)


@on_ranks
@quick
def test_a_watch_that_is_closed_leaves_no_thread() -> None:
    store = PrefixStore("peers", default_group().get_group_store())
    for place in (store, _Distant(store)):
        peers = Peers(cast("Any", place), rank=dist.get_rank(), ranks=dist.get_world_size(), timeout=20)
        with mock.patch.object(module, "_CLOSE_SECONDS", 0.0), peers.explaining():  # for failures only
            time.sleep(0.1)
        assert not {thread.name for thread in threading.enumerate()} & {"lowbit-beat", "lowbit-guard"}
