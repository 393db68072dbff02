"""The layout of a pipeline: which rank holds which stages and layers, and which codecs join the stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowbit.codecs import Cast, Codec, backward_codec, parse, parse_pair
from lowbit.config import ConfigError
from lowbit.train.config import AUTO, PipelineConfig

_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_SINGLE = ("GPipe", "1F1B")
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
    given = pipeline.layers
    if given and (len(given) != stages or sum(given) != layers):
        raise ConfigError(
            f"pipeline.layers is {list(given)}, {sum(given)} layers on {len(given)} stages; "
            f"allowed: a number for each of the {stages} stages, {layers} together, as the model has"
        )
    return PipelineLayout(
        ranks=ranks, stages_per_rank=pipeline.stages_per_rank, v_shaped=pipeline.schedule in _V_SHAPED,
        layer_counts=given or even(layers, stages),
    )  # fmt: skip


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Split layers over stages as evenly as possible; the first stages get one more."""
    each, extra = divmod(layers, stages)
    return tuple(each + (stage < extra) for stage in range(stages))


def _check_schedule(pipeline: PipelineConfig, ranks: int) -> None:
    """Raise an error in terms of the configuration for what PyTorch's schedules would refuse later."""
    name, per_rank, microbatches = pipeline.schedule, pipeline.stages_per_rank, pipeline.microbatches
    stages = ranks * per_rank
    rounds = max(1, microbatches // ranks)
    problem = ""
    if name in _SINGLE and per_rank != 1:
        problem = f"stages_per_rank is {per_rank}; allowed with {name}: 1 (use Interleaved1F1B for more)"
    elif name in _V_SHAPED and per_rank != 2:
        problem = f"stages_per_rank is {per_rank}; allowed with {name}: 2"
    elif name in ("1F1B", "DualPipeV") and microbatches < stages:
        allowed = f"at least as many as stages ({stages} on {ranks} ranks)"
        problem = f"microbatches is {microbatches}; allowed with {name}: {allowed}"
    elif name in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % rounds:
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


AUTO_FORMATS = (
    "bf16",
    "int8 / int8",
    "TAHQuant(high_bits=6, low_bits=5)",
    "transform",
    "TransformQuant(bits=2.7) / TransformQuant(bits=1.8, step='message')",
    "TransformQuant(bits=2.0) / TransformQuant(bits=1.5, step='message')",
)
"""Formats that `pipeline.forward = "auto"` chooses among, the most exact first.

Bits (both ways together) at dim 256, and held-out loss minus that of FP32 in nats, with 512 tokens a step, from
docs/results/convergence.md: 32 bits, -0.001; 17, 0.000; 12.8, not measured from scratch; 5.2, 0.003; 4.5, 0.004 (with
an earlier receiver); 3.5, 0.014. Coding time rises among the first four. In pretrained models, at 3 boundaries forward,
the third diverges by a half (Gemma 3) to a twentieth (SmolLM2, Qwen2.5) of what the fourth does
(docs/results/codecs.md).
"""


def usable(texts: Sequence[str], shape: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """Return sizes of the formats that can code this shape and take fewer bytes than all formats before them."""
    sizes_by_format: dict[str, tuple[int, int]] = {}
    for text in texts:
        forward, backward = parse_pair(text)
        try:
            sizes = forward.nbytes(shape), backward.nbytes(shape)
        except ValueError:
            continue
        if all(sum(sizes) < sum(each) for each in sizes_by_format.values()):
            sizes_by_format[text] = sizes
    return sizes_by_format


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """One codec for each boundary in each direction; boundary i lies between stages i and i + 1."""

    forward: tuple[Codec, ...]
    backward: tuple[Codec, ...]


def codec_of(key: str, text: str, check: Callable[[Codec], Any] | None = None) -> Any:
    """Parse the codec that a setting names, and return the result of `check` on it."""
    try:
        return parse(text) if check is None else check(parse(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error


def make_codecs(pipeline: PipelineConfig, boundaries: int) -> Codecs:
    """Make the codecs that the configuration names. Raises ConfigError: a codec's name or argument is invalid."""

    def each(direction: str, names: tuple[str, ...]) -> tuple[Codec, ...]:
        named = [codec_of(f"pipeline.{direction}", text) for text in names]
        return tuple(named) if len(named) == boundaries else tuple(named[:1]) * boundaries

    if pipeline.is_auto:  # the most exact format, until the run has chosen
        return codecs_of(AUTO_FORMATS[:1] * boundaries)
    if pipeline.boundary == "lowbit":
        forward = each("forward", pipeline.forward)  # first: `backward_formats` takes it for valid
        return Codecs(forward=forward, backward=each("backward", backward_formats(pipeline)))
    plain = (Cast(dtype=stock_dtype(pipeline)),) * boundaries
    return Codecs(forward=plain, backward=plain)


def codecs_of(pairs: Sequence[str]) -> Codecs:
    """Make the codecs from a pair of formats ("int4 / int6") for each boundary."""
    both = [parse_pair(text) for text in pairs]
    return Codecs(forward=tuple(forward for forward, _ in both), backward=tuple(backward for _, backward in both))


def backward_formats(pipeline: PipelineConfig) -> tuple[str, ...]:
    """Return `pipeline.backward`, or the default backward format of each format in `pipeline.forward`.

    PyTorch's own stage has no codecs; for it, `pipeline.backward` is returned as it is.
    """
    if pipeline.is_auto:
        return (AUTO,)
    if pipeline.backward or pipeline.boundary != "lowbit":
        return pipeline.backward
    return tuple(repr(backward_codec(parse(text))) for text in pipeline.forward)


def in_full(pipeline: PipelineConfig) -> PipelineConfig:
    """Write formats in full, as `repr` does, for files: the meaning of names and defaults may change.

    PyTorch's own stage has no codecs; for it, the configuration is returned as it is. "auto" stays.
    """
    if pipeline.is_auto:
        return replace(pipeline, backward=(AUTO,))
    if pipeline.boundary != "lowbit":
        return pipeline
    forward, backward = (
        tuple(repr(parse(text)) for text in texts) for texts in (pipeline.forward, backward_formats(pipeline))
    )
    return replace(pipeline, forward=forward, backward=backward)


def stock_dtype(pipeline: PipelineConfig) -> torch.dtype:
    """Return the dtype in which stages hand over activations: bfloat16 for "stock-bf16", otherwise float32."""
    return torch.bfloat16 if pipeline.boundary == "stock-bf16" else torch.float32
