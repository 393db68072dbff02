from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from lowbit.collectives.agreement import default_group
from lowbit.train.peers import ALARM, Cause, Peers, first_line
from tests.ranks import Failure, Ranks

SECRET = b"known to the ranks"


def _peers(timeout: float, secret: bytes = SECRET) -> Peers:
    store = PrefixStore("peers", default_group().get_group_store())
    return Peers(
        store, rank=dist.get_rank(), ranks=dist.get_world_size(), timeout=timeout, secret=secret
    )


def _explanation(silent: list[int], failing: int) -> tuple[str, int] | None:
    """What a rank concludes when communication fails while some ranks give no sign of life."""
    peers = _peers(10)
    try:
        time.sleep(1)
        dist.barrier()
        if peers.rank in silent:
            peers.close()
            return None
        error = peers.explain(RuntimeError(f"of rank {failing}"))
        return None if error is None else (str(error), error.rank)
    finally:
        peers.close()  # before the watchdog ends this process: an alarm is known
        dist.barrier()


def test_the_rank_without_a_sign_of_life_is_named(ranks: Ranks):
    first, second, third = ranks.run(_explanation, [1], 0, ranks=3)
    assert second is None
    text = "rank 1 stopped answering: killed or stopped, or its machine or network is gone"
    assert first == third == (text, 1)


def test_without_a_silent_rank_the_first_to_fail_is_the_cause(ranks: Ranks):
    outcomes = ranks.run(_explanation, [], 0)
    assert outcomes.count(None) == 1
    cause = outcomes.index(None)
    assert outcomes[1 - cause] == (f"rank {cause} failed: RuntimeError: of rank 0", cause)


def _blocked_for_good(timeout: float) -> None:
    """Rank 1 falls silent; the others wait for it in a way that has no limit of its own."""
    peers = _peers(timeout)
    time.sleep(1)
    dist.barrier()
    if dist.get_rank() == 1:
        peers.close()
    time.sleep(60)


def test_the_watchdog_ends_what_nothing_else_does(ranks: Ranks):
    started = time.monotonic()
    outcomes = ranks.outcomes(_blocked_for_good, 4, ranks=3, timeout=15)
    assert outcomes[0] == outcomes[2] == Failure("ended", "exit code 1")
    assert outcomes[1].kind == "TimeoutError", "nobody is silent for it"
    assert time.monotonic() - started < 40


def _strangers_alarm() -> bool:
    """Whether an alarm that nobody of the run has written is left alone."""
    if dist.get_rank() == 0:
        store = PrefixStore("peers", default_group().get_group_store())
        store.set(ALARM, Cause(1, "all is lost").signed(b"another secret"))
        time.sleep(0.2)
    dist.barrier()
    peers = _peers(10)
    time.sleep(2)
    known = peers._known.is_set()
    dist.barrier()
    peers.close()
    return known


def test_an_alarm_of_a_stranger_ends_nothing(ranks: Ranks):
    assert ranks.run(_strangers_alarm) == [False, False]


def test_causes_are_signed():
    cause = Cause(3, "rank 3 is gone")
    written = cause.signed(SECRET).encode()
    assert Cause.read(written, SECRET) == cause
    assert Cause.read(written, b"") is None
    assert Cause.read(written.replace(b"3", b"2"), SECRET) is None
    for damaged in (b"", b"{}", b"[1, 2]", b"\xff", b'["x", 1, 2]'):
        assert Cause.read(damaged, SECRET) is None


def test_errors_are_told_in_one_line():
    assert first_line(ValueError("a\nb")) == "ValueError: a"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.parametrize(
    "written", ['[Infinity, "a", "b"]', "[" * 100_000, '[0, "a", "\u00e4"]', "", "7"]
)
def test_what_a_stranger_writes_is_no_cause(written: str):
    assert Cause.read(written.encode(), SECRET) is None


def test_a_watch_that_is_closed_leaves_no_thread(ranks: Ranks):
    assert ranks.run(_threads_after_closing) == [[], []]


def _threads_after_closing() -> list[str]:
    _peers(10).close()
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name in ("lowbit-beat", "lowbit-guard")
    ]
