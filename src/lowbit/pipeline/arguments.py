"""Arguments of a pipeline and of its emulation, checked, and the lanes that a stage makes of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowbit.codecs.base import Codec
from lowbit.codecs.checks import check_int
from lowbit.codecs.sessions import Key
from lowbit.pipeline.boundary import Direction, Lane
from lowbit.pipeline.traffic import Traffic


def check_warm_up(argument: str, codecs: Codec | Mapping[int, Codec], warmup_steps: int, prefix: str = "") -> None:
    """Raise unless there is a warm-up, or nothing in these codecs that it would have to settle.

    Raises:
        ValueError: naming `prefix`warmup_steps.
    """
    for codec in codecs.values() if isinstance(codecs, Mapping) else (codecs,):
        if isinstance(codec, Codec) and not codec.settled and not warmup_steps:
            raise ValueError(
                f"{prefix}warmup_steps is 0, and {argument} has {codec}, which is settled in the last of these steps; "
                "allowed: at least 1"
            )


def codec_at(argument: str, codecs: Codec | Mapping[int, Codec], boundary: int, boundaries: int) -> Codec:
    """The codec of one of so many boundaries, from one for all or a mapping.

    Raises:
        TypeError: not a codec.
        ValueError: the mapping has none for this boundary, or one for a boundary that does not exist.
    """
    if isinstance(codecs, Mapping):
        given = ", ".join(map(str, codecs)) or "none"
        if boundary not in codecs:
            raise ValueError(f"{argument} has no codec for boundary {boundary}; given: {given}")
        if not set(codecs) <= set(range(boundaries)):
            raise ValueError(f"{argument} has codecs for boundaries {given}; there are 0 to {boundaries - 1}")
        codecs = codecs[boundary]
    if not isinstance(codecs, Codec):
        raise TypeError(
            f"{argument} is {codecs!r}; allowed: a codec such as lowbit.codecs.TAHQuant(), "
            "or a mapping from boundary index to codec"
        )
    return codecs


def checked_samples(ids: Tensor | Sequence[int]) -> Tensor:
    """Sample ids as an int64 tensor (batch,).

    Raises:
        TypeError: not integers.
        ValueError: not one-dimensional.
    """
    samples = torch.as_tensor(ids).cpu()
    if samples.is_floating_point() or samples.is_complex() or samples.dtype == torch.bool:
        raise TypeError(f"ids have dtype {samples.dtype}; allowed: integers")
    if samples.dim() != 1:
        raise ValueError(f"ids have shape {tuple(samples.shape)}; allowed: one dimension, (batch,)")
    return samples.long()


def keys_of(samples: Tensor, micro_batches: int) -> tuple[Key, ...]:
    """Sample ids of each micro-batch, split the way that a pipeline schedule splits the batch.

    Raises:
        ValueError: an id occurs twice. The size of a sample's second message depends on its first, which may still be
            under way when the second is expected.
    """
    if samples.unique().numel() != samples.numel():
        raise ValueError("ids has a sample twice; the ids of a batch must differ")
    return tuple(tuple(part.tolist()) for part in samples.tensor_split(micro_batches))


def check_numbers(warmup_steps: object, timeout: object) -> None:
    """Raise unless these can be a number of steps, and one of seconds."""
    check_int("warmup_steps", warmup_steps, 0, sys.maxsize)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is {timeout!r}; allowed: a number of seconds above 0")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; allowed: a number of seconds above 0")


def open_lanes(
    stage: int,
    stages: int,
    forward: Codec | Mapping[int, Codec],
    backward: Codec | Mapping[int, Codec],
    device: torch.device,
    traffic: Traffic,
    overhead: int,
) -> dict[tuple[Direction, bool], Lane]:
    """The up to four ways in and out of a stage, by direction and whether they lead out.

    Args:
        stage: which of the `stages`. forward, backward: as `LowBitStage` takes them. device, traffic, overhead: as
            `Lane` does.

    Raises:
        TypeError, ValueError: as `codec_at`.
    """
    below, above = stage - 1, stage
    ways: list[tuple[Direction, bool, int]] = [
        ("forward", False, below), ("backward", True, below), ("forward", True, above), ("backward", False, above)
    ]  # fmt: skip
    codecs = {"forward": forward, "backward": backward}
    return {
        (direction, outgoing): Lane(
            boundary,
            direction,
            codec_at(direction, codecs[direction], boundary, stages - 1),
            device,
            traffic,
            overhead,
        )
        for direction, outgoing, boundary in ways
        if 0 <= boundary < stages - 1
    }
