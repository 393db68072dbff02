"""The bytes that a step of the recipe sends between machines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lowbit.codecs import Codec
from lowbit.config import ConfigError
from lowbit.plan.sizes import ModelSizes
from lowbit.train import TrainConfig
from lowbit.train.boundaries import make_codecs
from lowbit.train.layout import make_layout
from lowbit.train.replicas import all_reduce_codec, ranks_of_pipeline
from lowbit.train.tied import expected_rows, row_bytes, tied_codec


def step_bytes(config: TrainConfig, sizes: ModelSizes, vocab: int, ranks: Sequence[int]) -> list[list[float]]:
    """Return the bytes of a step after the warm-up from each machine to each, in the formats of the recipe.

    Checksums and the sums at the end of a step, a few hundred bytes, are left out.

    With `pipeline.forward = "auto"`, they are those of the most exact format.

    Args:
        ranks: number of each machine's ranks, which are numbered in the order of the machines.

    Returns:
        Bytes by sender, then receiver; empty if the recipe cannot run on this number of ranks.
    """
    pipelines, shape = config.pipeline.data_parallel, (config.rows, config.data.sequence, sizes.width)
    machine_of = [machine for machine, count in enumerate(ranks) for _ in range(count)]
    try:
        of_pipeline = ranks_of_pipeline(len(machine_of), pipelines)
        layout = make_layout(config.pipeline, ranks=of_pipeline, layers=sizes.layers)
        codecs, all_reduce = make_codecs(config.pipeline, layout.stages - 1), all_reduce_codec(config.gradients)
    except ConfigError:
        return []
    sent = [[0.0] * len(ranks) for _ in ranks]

    def send(source: int, target: int, nbytes: float) -> None:
        sent[machine_of[source]][machine_of[target]] += nbytes

    def message(codec: Codec) -> int:
        return config.pipeline.microbatches * (codec.nbytes(shape) if codec.settled else 4 * math.prod(shape))

    last = layout.stages - 1
    ends = layout.rank_of(0), layout.rank_of(last)
    rows = expected_rows(config.data.batch // pipelines * config.data.sequence, vocab)
    followed = bool(sizes.tied) and not config.lora.rank and ends[0] != ends[1]  # the first rank's copy is no parameter
    tied = row_bytes(rows, sizes.width, tied_codec(config.pipeline), checksums=False) if followed else 0
    for first in range(0, len(machine_of), of_pipeline):
        for boundary, (forward, backward) in enumerate(zip(codecs.forward, codecs.backward, strict=True)):
            one, other = first + layout.rank_of(boundary), first + layout.rank_of(boundary + 1)
            send(one, other, message(forward))
            send(other, one, message(backward))
        for one, other in (ends, ends[::-1]):
            send(first + one, first + other, tied)
        for place in range(of_pipeline if not config.lora.rank else 0):  # adapters are small
            parameters = sum(
                sizes.parameters(layout.layer_counts[stage], first=stage == 0, last=stage == last)
                for stage in layout.stages_of(place)
            ) - sizes.tied * (followed and place == ends[0])
            for other in range(place, len(machine_of), of_pipeline):
                if other != first + place:
                    send(first + place, other, 2 / pipelines * all_reduce.nbytes((parameters,)))
    return [[0.0 if a == b else nbytes for b, nbytes in enumerate(row)] for a, row in enumerate(sent)]
