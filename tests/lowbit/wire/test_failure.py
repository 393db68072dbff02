"""From the neighbour that a rank sees fail to the rank that failed first."""

import json
import time
from unittest import mock

import pytest
import torch.distributed as dist

from lowbit.collectives import PeerError
from lowbit.wire import failure
from lowbit.wire.checksum import signature
from lowbit.wire.failure import FailureBoard
from lowbit.wire.pytorch import default_group
from lowbit.wire.store import Board
from tests.processes import Ranks, on_ranks

CLOSED = RuntimeError("Connection closed by peer")
SILENT = RuntimeError("Timed out waiting 4000ms for recv operation to complete")


def blames(suspects: dict[int, int], error: RuntimeError, timeout: float, delay: float = 0) -> tuple[str, int, float]:
    """Give up on the rank that `suspects` names, each rank `delay` after the one below it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    board = FailureBoard(default_group(), "test", [f"host {i}" for i in range(ranks)], timeout)
    if rank not in suspects:
        return "", rank, 0
    time.sleep(delay * (rank if delay > 0 else rank - ranks))
    start = time.monotonic()
    found = board.blame(suspects[rank], error)
    assert isinstance(found, PeerError)
    return str(found), found.rank, time.monotonic() - start


def test_the_neighbour_that_ended_is_named(ranks: Ranks):
    (text, rank, seconds), _ = ranks.run(blames, {0: 1}, CLOSED, 20.0)
    assert text.startswith("host 1 closed its connection (seen by host 0: Connection closed")
    assert rank == 1
    assert seconds < 10


@pytest.mark.parametrize(("error", "delay"), [(CLOSED, -0.1), (SILENT, -0.1), (SILENT, 0.1)])
def test_notes_lead_to_the_first_that_failed(ranks: Ranks, error: RuntimeError, delay: float):
    """Rank 3 failed; 2 waits for it, 1 for 2, 0 for 1. Who waits in vain may give up in any order."""
    outcomes = ranks.run(blames, {0: 1, 1: 2, 2: 3}, error, 8.0, delay, ranks=4)
    for rank, (text, culprit, seconds) in enumerate(outcomes[:3]):
        assert culprit == 3, text
        assert f"host {rank + 1} " in text
        assert "host 3 " in text
        assert seconds < 6


def test_two_that_wait_for_each_other_blame_each_other(ranks: Ranks):
    found = ranks.run(blames, {0: 1, 1: 0}, SILENT, 5.0)
    assert [rank for _, rank, _ in found] == [1, 0]


class Gone:
    """A store whose host has ended, or no longer answers."""

    def __init__(self, answers: bool) -> None:
        self.answers = answers

    def append(self, key: str, value: str) -> None:
        if not self.answers:
            time.sleep(60)
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("answers", [True, False])
@on_ranks(1)
def test_a_store_that_is_gone_too_does_not_hold_anybody_up(answers: bool) -> None:
    board = FailureBoard(default_group(), "test", ["host 0", "host 1"], 0.5)
    board._board = Board(Gone(answers), "key")
    start = time.monotonic()
    text = str(board.blame(1, CLOSED))
    assert text.startswith("host 1 closed its connection; so did the store, which host 0 hosts")
    assert time.monotonic() - start < 10


def signed(key: str = "lowbit/failure/test", attempt: str = "0", secret: bytes = b"", **note: object) -> str:
    return json.dumps(note | {"signature": signature(secret, attempt, key, note)})


def blame_after(written: str) -> tuple[int, str]:
    default_group().get_group_store().append("lowbit/failure/test", written + "\n")
    error = FailureBoard(default_group(), "test", ["host 0", "host 1"], 5.0).blame(1, CLOSED)
    return error.rank, str(error)


NO_NOTES = (
    "{", "7", signed(rank=1, suspect=9, silent=0), signed(rank=1, suspect=[]), signed(rank=[], reason="x"),
    '{"rank": 1, "reason": "pay me"}', '{"rank": 1, "reason": "pay me", "signature": "\u00e4"}',
    signed(secret=b"another", rank=1, reason="pay me"), signed(attempt="1", rank=1, reason="pay me"),
    signed(key="lowbit/failure/other", rank=1, reason="pay me"), signed(rank=1, suspect=0, silent=True, reason=7),
    signed(rank=1, suspect=0, silent=True, lengths=7), signed(rank=1, suspect=0, silent=True, lengths=None),
)  # fmt: skip


@on_ranks(1)
def test_only_notes_that_a_rank_signed_count_and_are_given_in_printable_characters() -> None:
    with mock.patch.object(failure, "_CLOSED_GRACE", 0.0):
        for written in NO_NOTES:
            rank, text = blame_after(written)
            assert (rank, text.split(" (")[0]) == (1, "host 1 closed its connection"), written
    note = signed(rank=1, reason="no \x1b[31mroom\x9b")
    assert blame_after(note) == (1, "host 1 gave up: no \\x1b[31mroom\\x9b")


@on_ranks(1)
def test_notes_in_a_group_of_several_runs_belong_to_no_attempt() -> None:
    with mock.patch.object(failure, "is_known", return_value=False):
        assert blame_after(signed(attempt="", rank=1, reason="no room")) == (1, "host 1 gave up: no room")
