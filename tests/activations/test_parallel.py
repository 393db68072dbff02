"""Compressed activations of a Llama under tensor and sequence parallel, ZeRO-1 and in three dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.activations.split_llama import ParallelLayout, Sizes, measured
from tests.processes import Ranks

LAYOUTS = {
    "tensor": ParallelLayout(tensor=2),
    "sequence": ParallelLayout(tensor=2, sequence=True),
    "zero": ParallelLayout(data=2, zero=True),  # a step's weights are compared in there
}


def check(ranks: Ranks, layout: ParallelLayout, policy: str) -> list[dict[str, Any]]:
    """Gradients and bytes of each rank against those of one process."""
    plain, coded = (ranks.run(measured, Sizes(), layout, kind, ranks=layout.ranks) for kind in ("none", policy))
    for before, after in zip(plain, coded, strict=True):
        assert after["error"] == pytest.approx(after["error_alone"], rel=0.05)
        share, share_alone = (after[key] / before[key] for key in ("kept_bytes", "kept_alone"))
        assert share < 1.05 * share_alone, (share, share_alone)
    return coded


@pytest.mark.parametrize(("name", "policy"), [("tensor", "ours"), ("sequence", "published"), ("zero", "published")])
def test_gradients_and_bytes_are_those_of_one_process(ranks: Ranks, name: str, policy: str):
    found = check(ranks, LAYOUTS[name], policy)
    if name == "zero":  # each rank has the states of its own part of 122,944 parameters
        assert sum(row["state_bytes"] for row in found) < 1.01 * 2 * 4 * 122_944
        assert all(row["gradient_bytes"] < 1.02 * 122_944 for row in found)


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
