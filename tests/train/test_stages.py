from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from lowbit.codecs import GroupInt
from lowbit.train import TrainConfig
from lowbit.train.prepare import prepare
from lowbit.train.trainer import Trainer
from tests.processes import Ranks
from tests.train.runs import tiny


def compiled(config: TrainConfig) -> set[int]:
    """Bits of the codecs that a rank has used before its first step."""
    used, encode = set(), GroupInt._encode

    def note(self: GroupInt, *args) -> None:
        used.add(self.bits)
        encode(self, *args)

    GroupInt._encode = note
    try:
        Trainer(prepare(config, ranks=dist.get_world_size()))
        dist.barrier()  # or a rank that leaves early disturbs one that is not ready yet
    finally:
        GroupInt._encode = encode
    return used


def test_kernels_of_a_ranks_own_boundaries_are_compiled_before_the_first_step(ranks: Ranks, tmp_path: Path):
    # A group that no other test has, since each codec is used once in a process.
    forward = ["GroupInt(bits=2, group=88)", "GroupInt(bits=3, group=88)"]
    config = tiny(tmp_path, pipeline={"forward": forward, "backward": "GroupInt(bits=7, group=88)", "ranks": 3})
    assert ranks.run(compiled, config, ranks=3) == [{2, 7}, {2, 3, 7}, {3, 7}]
