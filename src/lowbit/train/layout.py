"""Which rank holds which stages, and which stages hold which layers: arithmetic, known before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.train.config import PipelineConfig
from lowbit.train.section import ConfigError

_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_SINGLE = ("GPipe", "1F1B")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one pipeline.

    Args:
        ranks: processes; stages_per_rank: stages on each of them.
        v_shaped: stages run down the ranks and back up (rank 0 has the first and the last), instead of round and round.
        layer_counts: decoder layers of each stage.
    """

    ranks: int
    stages_per_rank: int
    v_shaped: bool
    layer_counts: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        lap, position = divmod(stage, self.ranks)
        return self.ranks - 1 - position if self.v_shaped and lap % 2 else position

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in ascending order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def layers_of(self, stage: int) -> range:
        """The decoder layers of a stage."""
        start = sum(self.layer_counts[:stage])
        return range(start, start + self.layer_counts[stage])

    def crosses(self, boundary: int) -> bool:
        """Whether boundary i, between stage i and i + 1, lies between two ranks."""
        return self.rank_of(boundary) != self.rank_of(boundary + 1)


def make_layout(pipeline: PipelineConfig, *, ranks: int, layers: int) -> Layout:
    """Cut `layers` decoder layers into stages for `ranks` processes, as the schedule wants them.

    The first stages get one layer more where it does not come out even: the last one has the output matrix to compute.

    Raises:
        ConfigError: more stages than layers, or a combination that the schedule does not allow.
    """
    _check_schedule(pipeline, ranks)
    stages = ranks * pipeline.stages_per_rank
    if stages > layers:
        raise ConfigError(
            f"the pipeline has {stages} stages ({ranks} ranks x {pipeline.stages_per_rank}), the model {layers} "
            f"layers; allowed: at most one stage for each layer"
        )
    each, extra = divmod(layers, stages)
    return Layout(
        ranks=ranks,
        stages_per_rank=pipeline.stages_per_rank,
        v_shaped=pipeline.schedule in _V_SHAPED,
        layer_counts=tuple(each + (stage < extra) for stage in range(stages)),
    )


def parameters_at(layout: Mapping[str, Any], rank: int) -> str:
    """What a rank of a run of this layout (`lowbit.train.identity.layout_of`) held, in words."""
    plan = Layout(
        ranks=layout["pipeline.ranks"],
        stages_per_rank=layout["pipeline.stages_per_rank"],
        v_shaped=layout["pipeline.schedule"] in _V_SHAPED,
        layer_counts=tuple(layout["layers"]),
    )
    stages = plan.stages_of(rank % plan.ranks)
    parts = [f"layers {r[0]} to {r[-1]}" for r in map(plan.layers_of, stages)]
    if 0 in stages:
        parts.insert(0, "the embedding")
    if plan.stages - 1 in stages:
        parts.append("the output matrix")
    return ", ".join(parts)


def _check_schedule(pipeline: PipelineConfig, ranks: int) -> None:
    """What the schedule classes refuse, said before anything starts."""
    name, per_rank, pieces = pipeline.schedule, pipeline.stages_per_rank, pipeline.microbatches
    stages = ranks * per_rank
    if name in _SINGLE and per_rank != 1:
        raise ConfigError(
            f"pipeline.stages_per_rank is {per_rank}; allowed with {name}: 1 (use Interleaved1F1B for more)"
        )
    if name in _V_SHAPED and per_rank != 2:
        raise ConfigError(f"pipeline.stages_per_rank is {per_rank}; allowed with {name}: 2")
    if name in ("1F1B", "DualPipeV") and pieces < stages:
        raise ConfigError(
            f"pipeline.microbatches is {pieces}; allowed with {name}: at least as many as stages ({stages})"
        )
    rounds = max(1, pieces // ranks)
    if name in ("Interleaved1F1B", "InterleavedZeroBubble") and pieces % rounds:
        raise ConfigError(
            f"pipeline.microbatches is {pieces}; allowed with {name} on {ranks} ranks: a multiple of {ranks}, "
            f"or fewer than {2 * ranks}"
        )
    for direction in ("forward", "backward"):
        count = len(getattr(pipeline, direction))
        if count not in (1, stages - 1) and (count or direction == "forward"):
            raise ConfigError(
                f"pipeline.{direction} lists {count} codecs; allowed: one for all boundaries, "
                f"or one for each of the {stages - 1}"
            )
