from __future__ import annotations

import time

import torch.distributed as dist

from lowbit.collectives.agreement import default_group
from lowbit.train.peers import Peers, first_line
from tests.ranks import Ranks


def _explanation(silent: list[int], failing: int) -> tuple[str, int] | None:
    """What a rank concludes when communication fails while some ranks give no sign of life."""
    peers = Peers(default_group(), timeout=10)
    try:
        time.sleep(1)
        dist.barrier()
        if peers.rank in silent:
            peers.close()
            time.sleep(4)
            return None
        error = peers.explain(RuntimeError(f"of rank {failing}"))
        return None if error is None else (str(error), error.rank)
    finally:
        dist.barrier()  # no rank may take the store away before
        peers.close()


def test_the_rank_without_a_sign_of_life_is_named(ranks: Ranks):
    first, second, third = ranks.run(_explanation, [1], 0, ranks=3)
    assert second is None
    assert (
        first == third == ("rank 1 stopped answering: killed, or its machine or network is gone", 1)
    )


def test_without_a_silent_rank_the_first_to_fail_is_the_cause(ranks: Ranks):
    outcomes = ranks.run(_explanation, [], 0)
    assert outcomes.count(None) == 1
    cause = outcomes.index(None)
    assert outcomes[1 - cause] == (f"rank {cause} failed: RuntimeError: of rank 0", cause)


def test_errors_are_told_in_one_line():
    assert first_line(ValueError("a\nb")) == "ValueError: a"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
