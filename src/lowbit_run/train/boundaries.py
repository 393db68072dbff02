"""Make the codecs of a run's boundaries from its configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowbit.codecs import Codec, RateGoal, backward_codec, parse, parse_pair
from lowbit.codecs.names import parse_goal
from lowbit_run.config import ConfigError
from lowbit_run.train.config import AUTO, PipelineConfig

AUTO_FORMATS = (
    "bf16",
    "int8 / int8",
    "TAHQuant(high_bits=6, low_bits=5)",
    "transform",
)
"""Formats that `pipeline.forward = "auto"` chooses among, the most exact first.

Bits (both ways together) at dim 256, and held-out loss minus that of FP32 in nats, with 512 tokens a step, from
docs/results/convergence.md: 32 bits, -0.001; 17, 0.000; 12.8, not measured from scratch; 5.2, 0.003. Coding
time rises from each to the next. In pretrained models, at 3 boundaries forward, the third diverges by a half (Gemma 3)
to a twentieth (SmolLM2, Qwen2.5) of what the fourth does (docs/results/codecs.md). With fewer bits, SmolLM2 diverges
twice as much (2.7 bits), so a run must name such formats.
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
        if all(sum(sizes) < sum(exacter) for exacter in sizes_by_format.values()):
            sizes_by_format[text] = sizes
    return sizes_by_format


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """One codec for each boundary in each direction; boundary i lies between stages i and i + 1.

    `goals`: by direction and boundary, goals of rates to be chosen; until then their codecs have the default rate.
    """

    forward: tuple[Codec, ...]
    backward: tuple[Codec, ...]
    goals: dict[tuple[str, int], RateGoal] = field(default_factory=dict)


def format_of(text: str) -> Codec | RateGoal:
    """Parse the name of a codec or of a goal."""
    return parse_goal(text) or parse(text)


def codec_of(
    key: str, text: str, check: Callable[[Codec], Any] | None = None, *, read: Callable[[str], Any] = parse
) -> Any:
    """Parse the codec that a setting names with `read`, and return the result of `check` on it."""
    try:
        return read(text) if check is None else check(read(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error


def make_codecs(pipeline: PipelineConfig, boundaries: int) -> Codecs:
    """Make the codecs that the configuration names. Raises ConfigError: a codec's name or argument is invalid."""
    goals: dict[tuple[str, int], RateGoal] = {}

    def each(direction: str, names: tuple[str, ...]) -> tuple[Codec, ...]:
        named = [codec_of(f"pipeline.{direction}", text, read=format_of) for text in names]
        named = named if len(named) == boundaries else named[:1] * boundaries
        goals.update({(direction, i): goal for i, goal in enumerate(named) if isinstance(goal, RateGoal)})
        return tuple(codec.default() if isinstance(codec, RateGoal) else codec for codec in named)

    if pipeline.is_auto:  # the most exact format, until the run has chosen
        return codecs_of(AUTO_FORMATS[:1] * boundaries)
    forward = each("forward", pipeline.forward)  # first: `backward_formats` takes it for valid
    return Codecs(forward=forward, backward=each("backward", backward_formats(pipeline)), goals=goals)


def codecs_of(pairs: Sequence[str]) -> Codecs:
    """Make the codecs from a pair of formats ("int4 / int6") for each boundary."""
    both = [parse_pair(text) for text in pairs]
    return Codecs(forward=tuple(forward for forward, _ in both), backward=tuple(backward for _, backward in both))


def backward_formats(pipeline: PipelineConfig) -> tuple[str, ...]:
    """Return `pipeline.backward`, or the default backward format of each format in `pipeline.forward`."""
    if pipeline.is_auto:
        return (AUTO,)
    forward = map(format_of, pipeline.forward)
    defaults = (x.for_gradients() if isinstance(x, RateGoal) else backward_codec(x) for x in forward)
    return pipeline.backward or tuple(map(str, defaults))


def in_full(pipeline: PipelineConfig) -> PipelineConfig:
    """Write formats in full, for files: the meaning of names and defaults may change. "auto" stays."""
    if pipeline.is_auto:
        return replace(pipeline, backward=(AUTO,))
    forward, backward = (
        tuple(str(format_of(text)) for text in texts) for texts in (pipeline.forward, backward_formats(pipeline))
    )
    return replace(pipeline, forward=forward, backward=backward)
