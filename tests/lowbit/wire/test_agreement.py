"""Ranks compare what they hold to be true, say the same when it differs, and need few round trips for it."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from lowbit.collectives import AgreementError, PeerError, agree
from lowbit.wire.agreement import Agreement
from lowbit.wire.pytorch import default_group
from tests.distant import distant
from tests.forked import run_script
from tests.lowbit.pipeline import toy
from tests.processes import Failure, Ranks, on_ranks

SAME = {"version": "1", "codec": "int4"}


def agrees(facts: list[Any], timeout: float = 20.0, late: int = -1, seconds: float = 0.0) -> None:
    """One rank comes late, or ends instead."""
    if dist.get_rank() == late:
        time.sleep(seconds) if seconds else os._exit(3)
    agree(None, facts[dist.get_rank()], timeout)


def agrees_often() -> None:
    for value in "abc":
        agree(dist.group.WORLD, value, 20)
    agree(None, "other", 20, topic="something else")


def test_equal_facts_pass_again_and_again_however_late_a_rank_comes(ranks: Ranks):
    ranks.run(agrees, [SAME] * 3, ranks=3)
    ranks.run(agrees_often)
    ranks.run(agrees, [SAME] * 2, 20.0, 1, 0.3)


def test_every_rank_raises_the_same_and_names_who_says_what(ranks: Ranks):
    facts = [SAME, SAME | {"codec": "int8"}, {"codec": "int4", "shape": "(2, 3)"}]
    text = "the ranks do not agree:\n  codec: int4 on rank 0 and rank 2; int8 on rank 1"
    assert toy.disagreement(toy.timely(ranks, agrees, facts, 60.0, count=3)) == text


def test_a_rank_that_never_comes_is_named(ranks: Ranks):
    # It comes after all, and learns what the others concluded instead of going on alone.
    text = toy.disagreement(ranks.outcomes(agrees, [SAME] * 3, 0.6, 2, 1.2, ranks=3))
    assert text.startswith("rank 2 did not report within 0.6 s")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ended_is_named(ranks: Ranks, rank: int):
    outcomes = ranks.outcomes(agrees, [SAME] * 3, 0.6, rank, ranks=3)
    assert outcomes.pop(rank) == Failure("ended", "exit code 3")
    assert toy.disagreement(outcomes).startswith(f"rank {rank} did not report within 0.6 s")


def members(speaker: dict[int, int]) -> Any:
    facts = {m: {"of": "all", f"by {m}": str(r)} for m, r in speaker.items()}
    own = {m: facts[m] for m, r in speaker.items() if r == dist.get_rank()}
    names = [f"member {m}" for m in range(4)]
    assert Agreement(default_group(), "members", 20).exchange(own, names) == facts


def test_a_rank_may_speak_for_several_or_none_and_some_rank_for_each(ranks: Ranks):
    ranks.run(members, {0: 0, 1: 1, 2: 0, 3: 1}, ranks=3)
    assert toy.disagreement(ranks.outcomes(members, {0: 0, 1: 1, 3: 1}, ranks=3)) == "no rank reports for member 2"


LATE = """
import os, time
from datetime import timedelta
import torch.distributed as dist
from lowbit.collectives import agree
from lowbit.wire import agreement

agreement._QUIET_SECONDS = agreement._GRACE = 0.2
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
store = dist.group.WORLD.get_group_store()
if rank == 2:  # the others wait for it no longer before they say why
    store.wait(["raised 0", "raised 1"], timedelta(seconds=60))
    time.sleep(1)
try:
    agree(None, "int8" if rank == 1 else "int4", 60)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    if rank < 2:
        store.set(f"raised {rank}", "")
"""


def test_a_rank_that_comes_late_reads_the_same_from_the_rank_that_keeps_the_store(tmp_path: Path):
    """And nobody prints lines of C++ about a store that has gone."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    outputs = run_script(script, ranks=3, folder=tmp_path, own_store=True).outputs
    said = "AgreementError: the ranks do not agree:\n  configuration: int4 on rank 0; int8 on rank 1\n"
    assert outputs[1:] == [said] * 2
    stayed = re.fullmatch(re.escape(said) + ".*so that rank 2 can read why the run ended\n", outputs[0])
    assert stayed, outputs[0]


def gives_up(rank: int) -> None:
    agreement = Agreement(default_group(), "topic", 60)
    if dist.get_rank() == rank:
        agreement.give_up("no room")
    else:
        agreement.exchange({}, [])


def test_a_rank_that_gives_up_ends_the_wait_of_the_others(ranks: Ranks):
    outcomes = toy.timely(ranks, gives_up, 1, count=3)
    assert outcomes.pop(1) is None
    assert [(o.kind, o.text) for o in outcomes] == [("AgreementError", "no room")] * 2


@on_ranks(1)
def test_the_rank_with_the_store_stays_no_longer_than_others_read() -> None:
    store = PrefixStore("group", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    with (
        mock.patch.object(dist.ProcessGroup, "get_group_store", return_value=store),
        mock.patch("lowbit.wire.agreement._LINGER", 60.0),
    ):
        agreement, start = Agreement(default_group(), "topic", 60), time.monotonic()
        agreement.give_up("no room")
        with pytest.raises(AgreementError, match="no room"):
            agreement.exchange({}, [])
        assert time.monotonic() - start < 20


LOG = "lowbit/agreement/configuration/0"


def agrees_after(line: bytes) -> None:
    if dist.get_rank() == 0:
        default_group().get_group_store().compare_set(LOG, "", line.decode("latin-1"))
    dist.barrier()
    agree(None, "same", 20.0)


@pytest.mark.parametrize(
    "line",
    [
        b"{\n",
        b"7\n",
        b"[" * 100_000 + b"\n",
        b'{"rank": 9, "count": 2, "members": {}}\n',
        b'{"rank": 1e999, "count": 2, "members": {}}\n',
        b'{"rank": 1, "count": 2, "members": {"1": ["rank 1", {"a": 5}]}}\n',
        b'{"rank": 1, "count": 2, "members": {"5": ["rank 1", {}]}}\n',
        b'{"rank": 1, "count": 2, "members": [1]}\n',
        b'{"rank": 1}\n',
        b'{"left": "x"}\n',
        b"\xff\xfe\x00",
    ],
    ids=range(11),
)
def test_what_is_no_statement_is_the_same_error_everywhere(ranks: Ranks, line: bytes):
    text = toy.disagreement(ranks.outcomes(agrees_after, line))
    assert "which no rank of this run wrote" in text
    assert len(text) < 500


@on_ranks(3)
def test_agreements_leave_nothing_behind() -> None:
    """Keys in the store after each agreement; rank 0 deletes, so that it counts."""
    keys = []
    for _ in range(12):
        agree(None, "same", 20.0)
        keys.append(default_group().get_group_store().num_keys())
        dist.barrier()
    if dist.get_rank() == 0:
        assert keys[-1] == keys[2]


@on_ranks(3)
def test_threads_may_agree_at_once() -> None:
    ordered = "abc" if dist.get_rank() == 0 else "cba"

    def repeat(topic: str) -> None:
        for _ in range(5):
            agree(None, "same", 20.0, topic=topic)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(repeat, ordered))


def agrees_through(path: str, facts: list[Any]) -> None:
    """A file, or this process's memory."""
    store = PrefixStore("group", FileStore(path, 2)) if path else HashStore()
    with mock.patch.object(dist.ProcessGroup, "get_group_store", return_value=store):
        for _ in range(2):
            agrees(facts)


def test_any_store_will_do(ranks: Ranks, tmp_path: Path):
    ranks.run(agrees_through, str(tmp_path / "same"), [SAME, SAME])
    unlike = [SAME, SAME | {"codec": "int8"}]
    toy.disagreement(ranks.outcomes(agrees_through, str(tmp_path / "unlike"), unlike))
    ranks.run(agrees_through, "", [SAME], ranks=1)


class Silent:
    """A store whose machine no longer answers."""

    def append(self, key: str, value: str) -> None:
        pass

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        time.sleep(60)
        return b""


@on_ranks
def test_a_store_that_does_not_answer_is_an_error() -> None:
    start = time.monotonic()
    with (
        mock.patch.object(dist.ProcessGroup, "get_group_store", return_value=Silent()),
        pytest.raises(PeerError, match="store of the process group did not answer within 0.3 s"),
    ):
        agree(None, "same", 0.3)
    assert time.monotonic() - start < 5


def test_without_a_process_group_the_error_says_so():
    with pytest.raises(RuntimeError, match="init_process_group"):
        agree(None, "same", 1.0)


ROUND_TRIP = 0.1  # seconds
FACTS = {f"boundary 0 forward fact {i}": "GroupInt(bits=4, group=64)" for i in range(20)}


def agrees_from_afar(near: int, far: int, times: int) -> list[float]:
    """Seconds of each agreement on this rank; all ranks but the first are far from the store."""
    port = far if dist.get_rank() else near
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    own, taken = PrefixStore("group", store), []
    with mock.patch.object(dist.ProcessGroup, "get_group_store", return_value=own):
        for _ in range(times):
            dist.barrier()
            start = time.monotonic()
            agree(None, FACTS, 30.0)
            taken.append(time.monotonic() - start)
    return taken


def test_an_agreement_takes_at_most_three_round_trips_whatever_the_number_of_ranks():
    store, eight = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), Ranks(8)
    try:
        with distant(store.port, ROUND_TRIP / 2) as port:
            taken = eight.run(agrees_from_afar, store.port, port, 4, ranks=8)
    finally:
        eight.stop()
    slowest = [max(seconds) for seconds in zip(*taken, strict=True)]
    # Not less than one, or there was no distance. The machine may be busy now and then, but not always.
    assert ROUND_TRIP <= min(slowest) <= 3.3 * ROUND_TRIP
