"""The layout of a pipeline: which rank holds which stages, and which stage holds which layers."""

from dataclasses import dataclass

from lowbit_run.config import ConfigError
from lowbit_run.train.config import PipelineConfig
from lowbit_run.train.schedules import SCHEDULES

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """The stages of each rank and the layers of each stage in one pipeline.

    Args:
        ranks: processes; stages_per_rank: stages on each of them.
        v_shaped: stages go down the ranks and back up (rank 0 has the first and the last), instead of cyclically.
        layer_counts: number of decoder layers in each stage.
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
        """Whether a boundary (i lies between stages i and i + 1) lies between two ranks."""
        return self.rank_of(boundary) != self.rank_of(boundary + 1)


def make_layout(pipeline: PipelineConfig, *, ranks: int, layers: int) -> PipelineLayout:
    """Split `layers` decoder layers into stages for `ranks` processes, by `pipeline.layers` or evenly.

    If they do not divide evenly, the first stages get one layer more, as the last one also computes the output matrix.

    Raises:
        ConfigError: there are more stages than layers, `pipeline.layers` does not fit the model or the stages, or the
            schedule does not allow the combination.
    """
    _check_schedule(pipeline, ranks)
    stages = ranks * pipeline.stages_per_rank
    if stages > layers:
        raise ConfigError(
            f"the pipeline has {stages} stages ({ranks} ranks x {pipeline.stages_per_rank}), the model {layers} "
            f"layers; allowed: at most one stage for each layer"
        )
    counts = pipeline.layers
    if counts and (len(counts) != stages or sum(counts) != layers):
        raise ConfigError(
            f"pipeline.layers is {list(counts)}, {sum(counts)} layers on {len(counts)} stages; "
            f"allowed: a number for each of the {stages} stages, {layers} together, as the model has"
        )
    return PipelineLayout(
        ranks=ranks, stages_per_rank=pipeline.stages_per_rank, v_shaped=SCHEDULES[pipeline.schedule].v_shaped,
        layer_counts=counts or even(layers, stages),
    )  # fmt: skip


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Split layers over stages as evenly as possible; the first stages get one more."""
    fewest, extra = divmod(layers, stages)
    return tuple(fewest + (stage < extra) for stage in range(stages))


def _check_schedule(pipeline: PipelineConfig, ranks: int) -> None:
    """Raise an error in terms of the configuration for what PyTorch's schedules would refuse later."""
    name, per_rank, microbatches = pipeline.schedule, pipeline.stages_per_rank, pipeline.microbatches
    stages, facts = ranks * per_rank, SCHEDULES[name]
    rounds = max(1, microbatches // ranks)
    problem = ""
    if per_rank != (only := facts.stages_per_rank or per_rank):
        more = " (use Interleaved1F1B for more)" if only == 1 else ""
        problem = f"stages_per_rank is {per_rank}; allowed with {name}: {only}{more}"
    elif facts.fills and microbatches < stages:
        allowed = f"at least as many as stages ({stages} on {ranks} ranks)"
        problem = f"microbatches is {microbatches}; allowed with {name}: {allowed}"
    elif facts.in_rounds and microbatches % rounds:
        problem = (
            f"microbatches is {microbatches}; allowed with {name} on {ranks} ranks: a multiple of {ranks}, "
            f"or fewer than {2 * ranks}"
        )
    for direction in ("forward", "backward"):
        count = len(getattr(pipeline, direction))
        if not problem and count not in (1, stages - 1) and (count or direction == "forward"):
            allowed = f"one for all boundaries, or one for each of the {stages - 1}"
            problem = f"{direction} lists {count} codecs; allowed: {allowed}"
    if problem:
        raise ConfigError(f"pipeline.{problem}")
