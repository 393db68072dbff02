"""Compressed activations of a Llama under tensor, sequence and data parallel and in three dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.activations.split_llama import ParallelLayout, Sizes, measured
from tests.processes import Ranks

LAYOUTS = {
    "tensor": ParallelLayout(tensor=2),
    "sequence": ParallelLayout(tensor=2, sequence=True),
    "data": ParallelLayout(data=2),
}


def check(ranks: Ranks, layout: ParallelLayout, policy: str) -> None:
    """Gradients and bytes of each rank against those of one process."""
    plain, coded = (ranks.run(measured, Sizes(), layout, kind, ranks=layout.ranks) for kind in ("none", policy))
    for before, after in zip(plain, coded, strict=True):
        assert after["error"] == pytest.approx(after["error_alone"], rel=0.05)
        share, share_alone = (after[key] / before[key] for key in ("kept_bytes", "kept_alone"))
        assert share < 1.05 * share_alone, (share, share_alone)


@pytest.mark.parametrize(("name", "policy"), [("tensor", "ours"), ("sequence", "published"), ("data", "published")])
def test_gradients_and_bytes_are_those_of_one_process(ranks: Ranks, name: str, policy: str):
    check(ranks, LAYOUTS[name], policy)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    processes = Ranks(8)
    yield processes
    processes.stop()


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_eight_ranks_in_three_dimensions(eight_ranks: Ranks, sequence: bool):
    """Two stages, cut over two ranks each, in two replicas with data of their own; gradients stored and sent in FP8."""
    check(eight_ranks, ParallelLayout(pipeline=2, tensor=2, data=2, sequence=sequence), "published")
