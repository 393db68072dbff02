from __future__ import annotations

import pytest

from lowbit.train import train
from tests.ranks import Ranks
from tests.train.runs import again, losses, tiny

ONE = {"ranks": 1, "stages_per_rank": 1, "schedule": "GPipe"}

SCHEDULES = [
    ("llama", None, "GPipe", 1),
    ("gpt2", None, "1F1B", 1),
    ("qwen2", True, "Interleaved1F1B", 2),
    ("qwen3", None, "InterleavedZeroBubble", 2),
    ("gpt2", None, "ZBVZeroBubble", 2),
    ("mistral", None, "LoopedBFS", 2),
]


@pytest.mark.parametrize(("family", "tied", "schedule", "per_rank"), SCHEDULES)
def test_a_pipeline_has_the_losses_of_a_single_process(
    ranks: Ranks, tmp_path, family, tied, schedule, per_rank
):
    model = {"family": family} | ({} if tied is None else {"tied": tied})
    pipeline = {"schedule": schedule, "stages_per_rank": per_rank}
    config = tiny(tmp_path, model=model, pipeline=pipeline)
    alone = losses(again(config, pipeline=ONE))
    assert ranks.run(losses, config) == [alone, alone]
