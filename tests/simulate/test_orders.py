from __future__ import annotations

import pytest

from lowbit.simulate import actions


@pytest.mark.parametrize(
    ("schedule", "each", "kinds"),
    [
        ("GPipe", 1, "FB"), ("1F1B", 1, "FB"), ("Interleaved1F1B", 2, "FB"), ("LoopedBFS", 2, "FB"),
        ("InterleavedZeroBubble", 2, "FBIW"),
        ("ZBVZeroBubble", 2, "FBIW"), ("DualPipeV", 2, "FBIW"),
    ],
)  # fmt: skip
def test_schedules_are_read_from_pytorch(schedule: str, each: int, kinds: str):
    found = actions(schedule, ranks=2, stages_per_rank=each, microbatches=4)
    names = [name for rank in range(2) for name in found.names(rank)]
    assert {name.strip("0123456789") for name in names} <= set(kinds)
    assert sum("F" in name for name in names) == 4 * 2 * each
    assert len(set(names)) == len(names)


def test_numbers_that_pytorch_does_not_take_are_refused():
    with pytest.raises(ValueError, match="stages_per_rank is 2; allowed with 1F1B: 1"):
        actions("1F1B", ranks=2, stages_per_rank=2, microbatches=4)
    with pytest.raises(ValueError, match="microbatches"):
        actions("GPipe", ranks=2, microbatches=0)
    with pytest.raises(ValueError, match="ranks is 0"):
        actions("1F1B", ranks=0, microbatches=4)
    with pytest.raises(ValueError, match="Unknown schedule name '2F2B'"):
        actions("2F2B", ranks=2, microbatches=4)
