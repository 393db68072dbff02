"""Ranks compare what they hold to be true, and say the same when it differs."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from lowbit.collectives import AgreementError, agree
from lowbit.collectives.agreement import Agreement, contradictions, default_group
from tests.ranks import Failure, Ranks

SAME = {"version": "1", "codec": "int4"}


def test_contradictions_name_who_says_what():
    text = contradictions(
        {
            "rank 0": {"codec": "int4", "version": "1"},
            "rank 1": {"codec": "int8", "version": "1"},
            "rank 2": {"codec": "int4", "shape": "(2, 3)"},
        }
    )
    assert text.splitlines() == [
        "the ranks do not agree:",
        "  codec: int4 on rank 0 and rank 2; int8 on rank 1",
    ]


def test_members_need_not_state_the_same_names():
    assert contradictions({"a": {"x": "1"}, "b": {"y": "2"}, "c": {}}) == ""


def agrees(facts: list[dict[str, str]], timeout: float = 20) -> None:
    agree(None, facts[dist.get_rank()], timeout)


def agrees_often() -> None:
    for value in "abc":
        agree(dist.group.WORLD, value, 20)
    agree(None, "other", 20, topic="something else")


def test_equal_facts_pass_again_and_again(ranks: Ranks):
    ranks.run(agrees, [SAME] * 3, ranks=3)
    ranks.run(agrees_often)


def test_every_rank_raises_the_same(ranks: Ranks):
    ranks.start(3)
    start = time.monotonic()
    outcomes = ranks.outcomes(agrees, [SAME, SAME | {"codec": "int8"}, SAME], 60.0, ranks=3)
    assert time.monotonic() - start < 20
    assert {o.kind for o in outcomes} == {"AgreementError"}
    assert {o.text for o in outcomes} == {
        "the ranks do not agree:\n  codec: int4 on rank 0 and rank 2; int8 on rank 1"
    }


def comes_late(rank: int, seconds: float, timeout: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)
    agree(None, "same", timeout)


def test_a_rank_that_takes_its_time_is_waited_for(ranks: Ranks):
    ranks.run(comes_late, 1, 1.5, 20)


def test_a_rank_that_never_comes_is_named(ranks: Ranks):
    outcomes = ranks.outcomes(comes_late, 2, 4, 1.0, ranks=3)
    for outcome in outcomes[:2]:
        assert outcome.kind == "AgreementError"
        assert outcome.text.startswith("rank 2 stated nothing within 1 s")
    # It comes after all, and learns what the others concluded instead of going on alone.
    assert outcomes[2].text == outcomes[0].text


def members() -> None:
    """Each rank speaks for two, and checks only when both have been stated."""
    agreement, rank = Agreement(default_group(), "members", 20), dist.get_rank()
    for member in (rank, rank + 2):
        agreement.state(member, {"member": "any", "of": str(member % 2)[:0]})
    agreement.check([f"member {i}" for i in range(4)])


def test_a_rank_may_speak_for_several(ranks: Ranks):
    ranks.run(members)


def ends() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    agree(None, "same", 2.0)


def test_a_rank_that_ended_is_named(ranks: Ranks):
    left, ended = ranks.outcomes(ends)
    assert ended == Failure("ended", "exit code 3")
    assert left.kind == "AgreementError"
    assert "rank 1 stated nothing" in left.text


def test_without_a_process_group_the_error_says_so():
    with pytest.raises(RuntimeError, match="init_process_group"):
        agree(None, "same", 1.0)
    assert issubclass(AgreementError, RuntimeError)
